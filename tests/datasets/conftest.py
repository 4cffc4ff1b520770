"""A synthetic episode with every field of the schema filled, and a folder of such."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.conventions import Conventions
from vla_rl.datasets.lerobot_format import Pictures
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import VIEWS, ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome, StepProtocol

os.environ.setdefault("MUJOCO_GL", "egl")  # before the first import of robosuite, or no later test of this process can render
from robosuite.utils.transform_utils import quat2axisangle

MakeEpisode = Callable[..., Episode]
TASK = {"problem": "Libero_Floor_Manipulation", "bddl_file": "pick_up_the_milk_and_place_it_in_the_basket.bddl"}


def observed_state(robot_state_R: np.ndarray) -> np.ndarray:
    """`Observation.state` as LIBERO's users make it, with robosuite's own conversion."""
    gripper, position, quaternion = robot_state_R[:2], robot_state_R[2:5], robot_state_R[5:9].copy()
    return np.concatenate([position, quat2axisangle(quaternion), gripper]).astype(np.float32)


def synthetic_episode(
    seed: int = 0,
    steps: int = 10,
    chunk: int = 4,
    frame_every: int = 1,
    size: int = 8,
    outcome: Outcome = Outcome.SUCCESS,
    conventions: Conventions | None = None,
    spec: EpisodeSpec | None = None,
    corrected: bool = False,
) -> Episode:
    """Random numbers in the shapes and dtypes of a real episode; `chunk` actions per chunk, the last one shorter.

    `corrected`: an operator took over from a policy at random steps; otherwise a person (odd seeds) or a script (even) acted throughout.
    """
    rng = np.random.default_rng(seed)
    quaternions = rng.normal(size=(steps + 1, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    robot = np.concatenate([rng.normal(size=(steps + 1, 5)), quaternions, rng.normal(size=(steps + 1, 7))], axis=1)
    states = rng.normal(size=(steps, 45))
    executed = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    labels = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    prompt = spec.prompt if spec and spec.prompt else "pick up the milk and place it in the basket"

    def observation(t: int, pictures: bool) -> Observation:
        images = {view: rng.integers(0, 256, (size, size, 3), np.uint8) for view in VIEWS} if pictures else {}
        return Observation(images, observed_state(robot[t]), prompt)

    frames = {t: observation(t, True) for t in range(0, steps, frame_every)}
    chunks = []
    for start in range(0, steps, chunk):
        end = min(start + chunk, steps)
        last = end == steps
        reward = np.zeros(end - start, np.float32)
        reward[-1] = float(last and outcome is Outcome.SUCCESS)
        chunks.append(
            ChunkStep(
                observation=frames.get(start, observation(start, False)),
                proposed=ActionChunk(executed[start:end], labels[start:end], weights_version=seed),
                executed_EA=executed[start:end],
                labels_EA=labels[start:end],
                reward_E=reward,
                intervention_E=rng.random(end - start) < 0.3 if corrected else np.full(end - start, seed % 2 == 1),
                success=bool(reward[-1]),
                terminated=bool(reward[-1]),
                truncated=last and outcome is Outcome.FAILURE,
                frames={t: frames[t] for t in range(start, end) if t in frames},
                sim_states_ED=states[start:end],
                robot_states_ER=robot[start:end],
            )
        )
    return Episode(
        spec=spec or EpisodeSpec("libero_object", 7, f"sampled:{seed}", "demonstrations", StepProtocol(max_steps=50)),
        steps=chunks,
        final_observation=observation(steps, True),
        outcome=outcome,
        reason="predicate" if outcome is Outcome.SUCCESS else "time limit",
        provenance={"conventions": (conventions or Conventions()).to_dict(), "task": TASK, "fixtures": {"basket_1": [0.1, 0.2]}},
    )


@pytest.fixture
def make_episode() -> MakeEpisode:
    """The factory of synthetic episodes."""
    return synthetic_episode


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., EpisodeStore]:
    """Writes `count` episodes of growing length into a store."""

    def make(count: int = 4, frame_every: int = 1, first_steps: int = 9, **options: object) -> EpisodeStore:
        store = EpisodeStore(tmp_path / "episodes")
        for number in range(count):
            episode = synthetic_episode(seed=number, steps=first_steps + number, frame_every=frame_every, **options)  # type: ignore[arg-type]
            store.write(number, episode, frame_every)
        return store

    return make


@pytest.fixture
def smooth_pictures() -> Callable[[Episode], Episode]:
    """Gives an episode pictures that a video codec is made for: a ramp that moves to the right, eight grey levels a step."""

    def smooth(episode: Episode) -> Episode:
        size = episode.frames()[0].images[VIEWS[0]].shape[0]
        ramp = np.linspace(0, 100, size, dtype=np.uint8)[None, :, None]
        for step in episode.steps:
            step.frames = {
                t: replace(f, images={view: np.broadcast_to(ramp + np.uint8(8 * t), (size, size, 3)).copy() for view in VIEWS})
                for t, f in step.frames.items()
            }
        return episode

    return smooth


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., LeRobotStore]:
    """Writes episodes into a LeRobot folder, numbered in order."""

    def write(episodes: list[Episode], pictures: Pictures = "png", folder: str = "lerobot") -> LeRobotStore:
        store = LeRobotStore(tmp_path / folder, pictures)
        with store.writing():
            for number, episode in enumerate(episodes):
                store.write(number, episode, frame_every=1)
        return store

    return write


@pytest.fixture
def seen_by_lerobot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """LeRobot's own dataset over a folder, with its cache below `tmp_path`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf_cache"))

    def load(folder: Path, **options: Any) -> Any:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        return LeRobotDataset("ours", root=folder, video_backend="pyav", **options)

    return load


@pytest.fixture(scope="session")
def reach_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with six real demonstrations of Reach in both formats, a picture before every step."""
    from vla_rl.collection.collect import collect
    from vla_rl.collection.config import CollectConfig
    from vla_rl.sim.base import EnvConfig
    from vla_rl.sim.pool import PoolConfig

    folder = tmp_path_factory.mktemp("reach") / "run"
    config = CollectConfig(
        run_dir=str(folder),
        suite="reach",
        tasks=(0, 2),
        episodes_per_task=3,
        noise_std=(0.2, 0.4),
        frame_every=1,
        format="both",
        env=EnvConfig(kind="reach", resolution=32),
        pool=PoolConfig("serial", 1),
        show_progress=False,
    )
    assert collect(config).complete
    return folder


@pytest.fixture
def reach_folders(reach_run: Path, tmp_path: Path) -> dict[str, Path]:
    """Copies of the two datasets of `reach_run` that a test may spoil."""
    folders = {"hdf5": tmp_path / "reach_hdf5", "lerobot": tmp_path / "reach_lerobot"}
    shutil.copytree(reach_run / "episodes", folders["hdf5"])
    shutil.copytree(reach_run / "lerobot", folders["lerobot"])
    return folders


@pytest.fixture
def kill_writer() -> Callable[..., list[int]]:
    """`kill_writer(write, arguments, first, moment_s)`: SIGKILL a process that runs `write(*arguments, reports)`, `moment_s` after its
    `first`-th report; what it reported before it died."""

    def kill(write: Callable[..., None], arguments: tuple[Any, ...], first: int, moment_s: float) -> list[int]:
        fork = multiprocessing.get_context("fork")  # nothing to import again: many rounds in little time
        receiver, sender = fork.Pipe(duplex=False)
        writer = fork.Process(target=write, args=(*arguments, sender))
        writer.start()
        sender.close()
        reported = [receiver.recv() for _ in range(first)]
        spin_until = time.perf_counter() + moment_s
        while time.perf_counter() < spin_until:
            pass
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        while receiver.poll():
            try:
                reported.append(receiver.recv())
            except EOFError:
                break
        return reported

    return kill
