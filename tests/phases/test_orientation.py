"""One picture from the renderer to the policy: collected, trained on, evaluated and filmed, it lies where its orientation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np
import pytest
import torch
from rl_recipe import POLICY, RESOLUTION

from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.conventions import Orientation
from vla_rl.datasets.loader import DataConfig
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.eval.runner import evaluate
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.policies.base import Batch
from vla_rl.policies.processor import Processor
from vla_rl.sim import reach
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pictures import oriented
from vla_rl.sim.pool import PoolConfig

MARK = 8
"""Pixels of a side of the marked corner: the first ones that OpenGL gives, at the lower left of the true picture."""
CORNERS = {Orientation.RAW: ("top", "left"), Orientation.VERTICAL_FLIP: ("bottom", "left"), Orientation.ROTATED_180: ("bottom", "right")}
"""Where the mark lies in memory."""


def marked_corners(picture_HW: np.ndarray) -> list[tuple[str, str]]:
    """Corners that are brighter than the middle between black and white."""
    halves = {"top": np.s_[:MARK], "bottom": np.s_[-MARK:]}, {"left": np.s_[:MARK], "right": np.s_[-MARK:]}
    middle = (picture_HW.max() + picture_HW.min()) / 2
    return [(row, column) for row in halves[0] for column in halves[1] if picture_HW[halves[0][row], halves[1][column]].mean() > middle]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Everything that any policy sees; renderers draw a black picture with one white corner."""

    def draw(picture: np.ndarray, orientation: Orientation) -> np.ndarray:
        picture = np.zeros_like(picture)
        picture[:MARK, :MARK] = 255
        return oriented(picture, orientation)

    batches: list[Batch] = []
    preprocess = Processor.preprocess

    def watched(self: Processor, *arguments: Any) -> Batch:
        batches.append(preprocess(self, *arguments))
        return batches[-1]

    monkeypatch.setattr(reach, "oriented", draw)
    monkeypatch.setattr(Processor, "preprocess", watched)
    return batches


@pytest.mark.parametrize(("read", "orientation"), [("episodes", Orientation.ROTATED_180), ("lerobot", Orientation.VERTICAL_FLIP)])
def test_a_marked_corner_through_collection_training_and_evaluation(
    read: str, orientation: Orientation, seen: list[Batch], tmp_path: Path
) -> None:
    """Rotated in one and not in the other, a policy succeeds never (openpi_subtask #3)."""
    env, pool = EnvConfig("reach", RESOLUTION, orientation=orientation), PoolConfig("serial", 1)
    run = tmp_path / "demonstrations"
    shown = {"suite": "reach", "tasks": (0,), "episodes_per_task": 1, "env": env, "pool": pool, "show_progress": False}
    collect(CollectConfig(run_dir=str(run), format="both", frame_every=1, **shown))
    with h5py.File(next((run / "episodes").glob("*.hdf5"))) as file:
        for view in ("agentview_rgb", "eye_in_hand_rgb"):
            assert marked_corners(file[f"data/demo_0/obs/{view}"][0, :, :, 0]) == [CORNERS[Orientation.RAW]], "LIBERO's own files are raw"
    data = DataConfig(paths=(str(run / read),), validation_fraction=0.0)
    sizes = {"updates": 1, "global_batch_size": 2, "micro_batch_size_per_rank": 2, "show_progress": False}
    assert run_sft(SftConfig(run_dir=str(tmp_path / "sft"), data=data, policy=POLICY, **sizes)) == 0
    trained = len(seen)
    policy = EvaluatedPolicy(str(tmp_path / "sft" / "checkpoints" / "last" / "policy"))
    evaluate(EvalConfig(run_dir=str(tmp_path / "eval"), protocol="sampled", policy=policy, videos=1, **shown))
    assert 0 < trained < len(seen)
    for picture_HW in torch.cat([batch.images_BVCHW[:, :, 0].flatten(0, 1) for batch in seen]):
        assert marked_corners(picture_HW.numpy()) == [CORNERS[orientation]]
    with av.open(str(next((tmp_path / "eval" / "videos").glob("*.mp4")))) as video:
        frame = next(video.decode(video=0)).to_ndarray(format="gray")
    for half in np.split(frame, 2, axis=1):
        assert marked_corners(half) == [CORNERS[Orientation.VERTICAL_FLIP]], "people see the true picture"
