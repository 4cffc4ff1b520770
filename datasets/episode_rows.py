"""Episodes as arrays with one row per control step, and back: what every file format of this package shares.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.datasets import schema
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import VIEWS, ActionChunk, Bool, ChunkStep, Episode, EpisodeSpec, Float32, Float64, Int64, Observation, Outcome


@dataclass(frozen=True)
class EpisodeInfo:
    """What a stored episode is, without its arrays."""

    path: Path
    """The file, or the folder of a LeRobot dataset."""
    demo: str
    """Name of the episode there: the group below `/data`, or `episode_000012`."""
    spec: EpisodeSpec
    prompt: str
    """The instruction that its observations carried."""
    outcome: Outcome
    num_steps: int
    """N, control steps."""
    frame_every: int
    """1: dense; k: pictures before control steps 0, k, 2k, ..."""
    num_frames: int
    """F, pictures of each view."""
    resolution: int
    """Height and width of the pictures (pixels)."""
    conventions: Conventions
    """Those of the environment that it was recorded in; pictures are given back in its orientation."""

    @property
    def name(self) -> str:
        """`PATH:demo`, for messages."""
        return f"{self.path}:{self.demo}"


@dataclass(frozen=True)
class EpisodeRows:
    """One row per control step, as a format gives them back."""

    executed_NA: Float32
    labels_NA: Float32
    reward_N: Float32
    intervention_N: Bool
    observed_NS: Float32
    """`Observation.state` before every action."""
    sim_states_ND: Float64 | None
    robot_states_NR: Float64 | None
    chunk_lengths_T: Int64
    """How many rows each executed chunk had."""
    weights_version_T: Int64
    """Version of the weights that proposed each chunk."""


@dataclass(frozen=True)
class Ending:
    """How an episode's last chunk ended, see `ChunkStep`."""

    success: bool
    terminated: bool
    truncated: bool


def conventions_of(episode: Episode) -> Conventions:
    """The conventions an episode was recorded with. Raises DatasetError where there are none, or none that can be stored."""
    if "conventions" not in episode.provenance:
        raise DatasetError(f"{episode.spec.key}: provenance has no 'conventions'; it has {', '.join(episode.provenance) or 'nothing'}")
    conventions = Conventions.from_dict(episode.provenance["conventions"])
    schema.require_storable(conventions)
    return conventions


def prompt_of(episode: Episode) -> str:
    """The episode's instruction. Raises DatasetError for several."""
    prompts = {step.observation.prompt for step in episode.steps}
    if len(prompts) != 1:
        raise DatasetError(f"{episode.spec.key}: an episode has one instruction, this one has {sorted(prompts)}")
    return prompts.pop()


def required_frames(episode: Episode, frame_every: int) -> dict[int, Observation]:
    """The recorded observations that `frame_every` promises, both views each, in order. Raises DatasetError for a missing one."""
    if frame_every < 1:
        raise DatasetError(f"frame_every is {frame_every}, must be at least 1 (1: a picture before every action)")
    if not episode.num_steps:
        raise DatasetError(
            f"{episode.spec.key}: the episode has no control step ({episode.outcome.value}: {episode.reason}); nothing to write"
        )
    recorded = episode.frames()
    wanted = range(0, episode.num_steps, frame_every)
    missing = [t for t in wanted if t not in recorded or any(view not in recorded[t].images for view in VIEWS)]
    if missing:
        raise DatasetError(
            f"{episode.spec.key}: no picture of both views before {len(missing)} of {len(wanted)} control steps ({missing[:5]} ...); "
            f"record with Look(record_every={frame_every}), or fill them in with collection.recorder.fill_frames"
        )
    return {t: recorded[t] for t in wanted}


def has_states(episode: Episode) -> bool:
    """Whether simulator and robot states were recorded before every action; datasets of others have none."""
    return all(step.sim_states_ED is not None and step.robot_states_ER is not None for step in episode.steps)


def rows_of(episode: Episode, name: str) -> np.ndarray:
    """One array over all control steps from the chunks' arrays called `name`. Raises DatasetError if a chunk has none."""
    parts = [getattr(step, name) for step in episode.steps]
    if any(part is None for part in parts):
        raise DatasetError(f"{episode.spec.key}: {name} was not recorded; record with Look(record_states=True)")
    return np.concatenate(parts)


def observed_states_of(episode: Episode) -> Float32:
    """float32[N, 8]: `Observation.state` before every action, from the robot states.

    Raises DatasetError unless it is what the actor saw wherever an observation was kept, bit for bit.
    """
    states_NS = schema.observed_states(schema.robot_observations(rows_of(episode, "robot_states_ER")))
    for t, frame in episode.frames().items():
        if not np.array_equal(frame.state, states_NS[t]):
            raise DatasetError(
                f"{episode.spec.key}: before control step {t} the observation's state is {frame.state.tolist()}, "
                f"the recorded robot state says {states_NS[t].tolist()}; they must come from the same substep"
            )
    return states_NS


def build_steps(rows: EpisodeRows, frames: Mapping[int, Observation], prompt: str, ending: Ending) -> list[ChunkStep]:
    """The chunks as they were executed."""
    ends = np.cumsum(rows.chunk_lengths_T).tolist()
    steps = [
        _build_chunk(rows, range(start, end), frames, prompt, version)
        for start, end, version in zip([0, *ends[:-1]], ends, rows.weights_version_T.tolist())
    ]
    last = steps[-1]
    last.success, last.terminated, last.truncated = ending.success, ending.terminated, ending.truncated
    return steps


def _build_chunk(rows: EpisodeRows, steps: range, frames: Mapping[int, Observation], prompt: str, weights_version: int) -> ChunkStep:
    within = slice(steps.start, steps.stop)
    executed_EA, labels_EA = rows.executed_NA[within], rows.labels_NA[within]
    observation = frames[steps.start] if steps.start in frames else Observation({}, rows.observed_NS[steps.start], prompt)
    labels = None if np.array_equal(executed_EA, labels_EA) else labels_EA
    return ChunkStep(
        observation=observation,
        proposed=ActionChunk(executed_EA, labels, weights_version=weights_version),
        executed_EA=executed_EA,
        labels_EA=labels_EA,
        reward_E=rows.reward_N[within],
        intervention_E=rows.intervention_N[within],
        success=False,
        terminated=False,
        truncated=False,
        frames={t: frames[t] for t in steps if t in frames},
        sim_states_ED=None if rows.sim_states_ND is None else rows.sim_states_ND[within],
        robot_states_ER=None if rows.robot_states_NR is None else rows.robot_states_NR[within],
    )


def chunk_columns(episode: Episode) -> tuple[Int64, Int64]:
    """int64[T] lengths of the executed chunks and int64[T] versions of the weights that proposed them."""
    lengths = np.array([len(step.executed_EA) for step in episode.steps], np.int64)
    return lengths, np.array([step.proposed.weights_version for step in episode.steps], np.int64)


def require_alike(infos: Sequence[EpisodeInfo]) -> None:
    """Raise DatasetError naming the first two episodes that differ in resolution or conventions."""
    if not infos:
        raise DatasetError("a dataset needs at least one episode")
    first = infos[0]
    for info in infos:
        if (info.resolution, info.conventions) != (first.resolution, first.conventions):
            raise DatasetError(
                f"{info.name} ({info.resolution} px, {info.conventions.to_dict()}) is unlike "
                f"{first.name} ({first.resolution} px, {first.conventions.to_dict()}); only episodes of one kind go together"
            )
