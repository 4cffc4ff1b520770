"""Our HDF5 file against a stock LIBERO environment, row by row: alignment, orientation, names and values, all bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from vla_rl.actors import random_actor
from vla_rl.collection.recorder import Recorder, fill_frames
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.published import import_published
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import Episode, EpisodeSpec, StepProtocol
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import PoolConfig, SerialPool

SPEC = EpisodeSpec("libero_object", 0, "benchmark:0", "test", StepProtocol(max_steps=7))
CONFIG = EnvConfig(resolution=64)
KEYS = {
    "agentview_rgb": "agentview_image",
    "eye_in_hand_rgb": "robot0_eye_in_hand_image",
    "ee_pos": "robot0_eef_pos",
    "gripper_states": "robot0_gripper_qpos",
    "joint_states": "robot0_joint_pos",
}
"""Our dataset below `obs/` -> stock observation."""


def record(folder: Path) -> Episode:
    """Seven random actions with a picture before every third, written as the recorder writes them."""
    actor = random_actor(chunk_length=4)
    pool = SerialPool(PoolConfig("serial", 1), CONFIG, make_env)
    look = look_of(actor.needs, record_every=3, record_states=True)
    try:
        (episode,) = run_episodes(pool, actor, ListSource([SPEC]), lambda spec: look)
        recorder = Recorder(EpisodeStore(folder), folder / "episodes.jsonl", pool.spec, frame_every=3, keep_failures=True)
        recorder.record(0, episode, {})
    finally:
        pool.close()
    return episode


def play_stock(actions_NA: np.ndarray) -> list[dict[str, Any]]:
    """Observations (with `state` and `robot_state`) of a fresh stock env before every action, and after the last."""
    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv

    suite = benchmark.get_benchmark_dict()[SPEC.suite]()
    env = OffScreenRenderEnv(
        bddl_file_name=suite.get_task_bddl_file_path(SPEC.task), camera_heights=CONFIG.resolution, camera_widths=CONFIG.resolution
    )
    np.random.seed(SPEC.scene_seed)  # noqa: NPY002 - stock LIBERO draws from the global generator
    env.reset()
    observation = env.set_init_state(suite.get_task_init_states(SPEC.task)[0])
    for _ in range(SPEC.protocol.settle_steps):
        observation = env.step(list(SPEC.protocol.settle_action))[0]
    seen = []
    for action in [*actions_NA, None]:
        extra = {"state": env.get_sim_state(), "robot_state": env.env.get_robot_state_vector(observation)}
        seen.append({**{name: np.array(value) for name, value in observation.items()}, **extra})
        if action is not None:
            observation = env.step(action.astype(np.float64))[0]
    return seen


def write_as_libero(path: Path, actions_NA: np.ndarray, seen: list[dict[str, Any]]) -> None:
    """A file as `create_dataset.py` writes it: states before the action, everything observed after it."""
    from robosuite.utils.transform_utils import quat2axisangle

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"problem_name": "libero_floor_manipulation", "language_instruction": "pick it up"})
        demo = data.create_group("demo_0")
        demo["actions"] = actions_NA.astype(np.float64)
        demo["states"] = np.array([row["state"] for row in seen[:-1]])
        demo["robot_states"] = np.array([row["robot_state"] for row in seen[1:]])
        for ours, theirs in KEYS.items():
            demo[f"obs/{ours}"] = np.array([row[theirs] for row in seen[1:]])
        demo["obs/ee_ori"] = np.array([quat2axisangle(row["robot0_eef_quat"].copy()) for row in seen[1:]])


@pytest.mark.slow
def test_rows_are_what_stock_libero_shows_before_each_action(tmp_path: Path) -> None:
    episode = record(tmp_path / "ours")
    seen = play_stock(episode.actions_NA())
    with h5py.File(tmp_path / "ours" / "episode_000000.hdf5") as file:
        demo: Any = file["data/demo_0"]
        assert demo["obs/frame_index"][()].tolist() == [0, 3, 6]
        for row, t in enumerate([0, 3, 6]):
            for name in ("agentview_rgb", "eye_in_hand_rgb"):
                assert np.array_equal(demo["obs"][name][row], seen[t][KEYS[name]]), f"{name} before action {t}, raw as stock renders it"
        for t in range(episode.num_steps):
            assert np.array_equal(demo["states"][t], seen[t]["state"])
            assert np.array_equal(demo["robot_states"][t], seen[t]["robot_state"])
            for name in ("ee_pos", "gripper_states", "joint_states"):
                assert np.array_equal(demo["obs"][name][t], seen[t][KEYS[name]]), f"{name} before action {t}"

    env = make_env(CONFIG)
    dense = fill_frames(read_episode(tmp_path / "ours" / "episode_000000.hdf5"), env)
    env.close()
    for t, frame in dense.frames().items():
        assert np.array_equal(frame.images["image"], seen[t]["agentview_image"][::-1, ::-1]), "filled in, rotated as policies see it"

    write_as_libero(tmp_path / "published.hdf5", episode.actions_NA(), seen)
    imported = EpisodeStore(tmp_path / "imported")
    assert import_published(tmp_path / "published.hdf5", imported, "libero_object", 0).late_by == 1
    corrected = read_episode(imported.path(0))
    assert np.array_equal(corrected.actions_NA(), episode.actions_NA()[1:])
    for t, frame in corrected.frames().items():
        assert np.array_equal(frame.state, dense.frames()[t + 1].state)
        assert np.array_equal(frame.images["image2"], seen[t + 1]["robot0_eye_in_hand_image"])
