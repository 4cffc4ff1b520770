"""Two quick checks that this machine simulates and draws LIBERO as its published results did, for `vla-rl doctor`.

The golden values in `golden.npz` were written with mujoco 3.3.2 by `python -m vla_rl.sim.libero.golden`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEW_AGENT, EpisodeSpec, StepProtocol
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.libero.env import LiberoEnv

GOLDEN_PATH = Path(__file__).with_name("golden.npz")
RENDER_SPEC = EpisodeSpec("libero_object", 0, "benchmark:0", "test")
"""A scene that is mostly floor, which mujoco 3.3.3 and later draw darker."""
SETTLE_SPEC = EpisodeSpec("libero_spatial", 5, "benchmark:0", "test", protocol=StepProtocol(settle_steps=40))
"""A bowl on a ramekin, which slides off with the box contacts of mujoco 3.4.0 and later."""
CELLS = 16
"""The golden picture is averaged over CELLS x CELLS cells."""
RENDER_TOLERANCE = 3.0
"""Mean absolute difference of cells in grey levels. Another driver's rounding stays below 1."""
SETTLE_TOLERANCE = 0.002
"""Metres by which a resting object may be higher or lower. Another processor's rounding stays below 1e-4."""


class CheckResult(NamedTuple):
    """Outcome of a check."""

    ok: bool
    measured: float
    tolerance: float
    reason: str
    """Empty when it is ok."""


def golden_render_check() -> CheckResult:
    """Draw a known scene and compare it with the golden picture (grey levels)."""
    with np.load(GOLDEN_PATH) as golden:
        difference = _cells() - golden["cells"]
    measured = float(np.abs(difference).mean())
    reason = (
        f"the picture of {RENDER_SPEC.key} differs by {measured:.2f} grey levels on average "
        f"({'darker' if difference.mean() < 0 else 'brighter'} than with mujoco 3.3.2): another mujoco version or a broken GL driver"
    )
    return CheckResult(measured <= RENDER_TOLERANCE, measured, RENDER_TOLERANCE, "" if measured <= RENDER_TOLERANCE else reason)


def settle_check() -> CheckResult:
    """Let a known scene come to rest and compare where its objects lie (m)."""
    heights = _heights()
    with np.load(GOLDEN_PATH) as golden:
        wanted = dict(zip(golden["names"].tolist(), golden["heights"].tolist(), strict=True))
    errors = {name: abs(heights[name] - height) for name, height in wanted.items()}
    worst = max(errors, key=lambda name: errors[name])
    measured = errors[worst]
    reason = (
        f"in {SETTLE_SPEC.key}, {worst} rests at {heights[worst]:.4f} m instead of {wanted[worst]:.4f} m: "
        f"contacts are not those of mujoco 3.3.2"
    )
    return CheckResult(measured <= SETTLE_TOLERANCE, measured, SETTLE_TOLERANCE, "" if measured <= SETTLE_TOLERANCE else reason)


def _cells() -> np.ndarray:
    """float64[CELLS, CELLS, 3]: the agent's view, averaged."""
    env = LiberoEnv(EnvConfig(resolution=128, orientation=Orientation.RAW))
    try:
        picture = env.reset(RENDER_SPEC, Look(views=(VIEW_AGENT,))).observation.images[VIEW_AGENT]
    finally:
        env.close()
    side = len(picture) // CELLS
    return picture.reshape(CELLS, side, CELLS, side, 3).mean((1, 3))


def _heights() -> dict[str, float]:
    """Object -> height (m) after settling."""
    env = LiberoEnv(EnvConfig(resolution=16))
    try:
        truth = env.reset(SETTLE_SPEC, Look(privileged=True)).observation.privileged
    finally:
        env.close()
    bodies = (name for name in truth if name.endswith("_pos") and not name.startswith(("robot0", "site:")))
    return {name.removesuffix("_pos"): float(truth[name][2]) for name in bodies}


def write_golden() -> None:
    """Record what this installation does as golden; only for a machine that is known to be right."""
    heights = _heights()
    np.savez_compressed(
        GOLDEN_PATH, cells=_cells().astype(np.float32), names=np.array(list(heights)), heights=np.array(list(heights.values()))
    )


if __name__ == "__main__":
    write_golden()
