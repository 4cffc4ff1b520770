"""Make `datasets/orientation.npz`: what each suite's first pictures look like on average, 16 x 16 grey, raw orientation.

`vla-rl data check` holds the first pictures of episodes against it and finds those that lie upside down or mirrored.

    python scripts/orientation_reference.py
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")

import numpy as np

from vla_rl.conventions import Orientation
from vla_rl.datasets.orientation import thumbnail
from vla_rl.episode import VIEWS, EpisodeSpec, StepProtocol
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.factory import make_env

SCENES = {
    "libero_object": range(0, 10, 3),
    "libero_spatial": range(0, 10, 3),
    "libero_goal": range(0, 10, 3),
    "libero_10": range(10),
    "reach": range(4),
}
"""Suite -> tasks whose first pictures are averaged."""


def main() -> None:
    """Render, average, write."""
    reference = {}
    for suite, tasks in SCENES.items():
        kind = "reach" if suite == "reach" else "libero"
        env = make_env(EnvConfig(kind=kind, resolution=64, orientation=Orientation.RAW), lambda: False, 0, nullcontext())
        seen = [
            env.reset(
                EpisodeSpec(suite, task, "sampled:0", "demonstrations", StepProtocol(settle_steps=10)), Look(VIEWS)
            ).observation.images
            for task in tasks
        ]
        env.close()
        for view in VIEWS:
            reference[f"{suite}/{view}"] = np.mean([thumbnail(images[view]) for images in seen], axis=0).astype(np.float32)
        print(suite, len(seen))
    np.savez_compressed(Path(__file__).parents[1] / "datasets" / "orientation.npz", **reference)


if __name__ == "__main__":
    main()
