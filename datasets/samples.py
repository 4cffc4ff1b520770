"""Samples of recorded episodes: an observation that has pictures, and the chunk of actions that follows it.

    episodes ── EpisodeDataset ── window and mask ── SampleBatch ── policy.preprocess

Shape legend: see `vla_rl/episode.py`; B batch, V views, C actions of a chunk, R control steps of all episodes together,
X samples of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vla_rl.datasets.episode_rows import EpisodeInfo, require_alike
from vla_rl.datasets.episodes import load_steps
from vla_rl.datasets.frames import FileFrames, Frames
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import VIEWS, Bool, Float32, Int64, Observation, UInt8

NO_OP_MOTION = 1e-4
"""An action whose six motion dimensions have a smaller norm moves nothing (OpenVLA's threshold)."""


@dataclass
class SampleBatch:
    """Samples as `policy.preprocess(observations, actions_BCA, action_mask_BC)` takes them."""

    observations: list[Observation]
    """B observations with both views."""
    actions_BCA: Float32
    """float32[B, C, 7], environment units; past the episode's end its last action is repeated."""
    action_mask_BC: Bool
    """bool[B, C]: False past the episode's end."""
    index_B: Int64
    """int64[B]: which samples of the dataset these are."""
    update: int
    """Number of the update that these samples belong to (0 for batches outside training)."""


@dataclass
class SampleColumns:
    """A batch before its observations are made: what crosses from a worker process."""

    images_BVHWC: UInt8
    states_BS: Float32
    actions_BCA: Float32
    action_mask_BC: Bool
    index_B: Int64
    update: int


def action_windows(actions_RA: Float32, starts_B: Int64, ends_B: Int64, chunk_length: int) -> tuple[Float32, Bool]:
    """Chunks of `chunk_length` rows from each start; past an end (exclusive) the row before it is repeated and masked.

    Returns float32[B, C, A] and bool[B, C].
    """
    rows_BC = starts_B[:, None] + np.arange(chunk_length)
    mask_BC = rows_BC < ends_B[:, None]
    return actions_RA[np.minimum(rows_BC, ends_B[:, None] - 1)], mask_BC


class EpisodeDataset:
    """Episodes as samples. Holds all actions and states (60 bytes a control step); pictures come from `frames`.

    A sample is a control step that has pictures: sparse episodes give fewer samples, never repeated pictures.
    """

    def __init__(self, infos: Sequence[EpisodeInfo], labels: Literal["clean", "executed"] = "clean", frames: Frames | None = None) -> None:
        require_alike(infos)
        self.infos = list(infos)
        self._frames = frames if frames is not None else FileFrames(self.infos)
        self._read_rows(labels == "clean")

    def _read_rows(self, labels: bool) -> None:
        """Fill the tables: rows R over all episodes, samples X over all pictures."""
        actions, states, sample_rows = [], [], []
        self.row_starts = np.concatenate([[0], np.cumsum([info.num_steps for info in self.infos])])
        for info, start in zip(self.infos, self.row_starts):
            actions_NA, states_NS, frame_index_F = load_steps(info, labels)
            require_motion(actions_NA, info.name, f"{info.spec.suite} task {info.spec.task} ({info.prompt!r})")
            actions.append(actions_NA)
            states.append(states_NS)
            sample_rows.append(start + frame_index_F)
        self.actions_RA: Float32 = np.concatenate(actions)
        self.states_RS: Float32 = np.concatenate(states)
        self.sample_rows_X: Int64 = np.concatenate(sample_rows)
        counts = [len(rows) for rows in sample_rows]
        self.sample_episodes_X: Int64 = np.repeat(np.arange(len(counts)), counts)
        self.sample_positions_X: Int64 = np.concatenate([np.arange(count) for count in counts])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_rows_X)

    def columns(self, index_B: Int64, chunk_length: int, update: int = 0) -> SampleColumns:
        """The samples `index_B`, as arrays."""
        episodes_B, rows_B = self.sample_episodes_X[index_B], self.sample_rows_X[index_B]
        actions_BCA, mask_BC = action_windows(self.actions_RA, rows_B, self.row_starts[episodes_B + 1], chunk_length)
        images_BVHWC = self._frames.read(episodes_B, self.sample_positions_X[index_B])
        return SampleColumns(images_BVHWC, self.states_RS[rows_B], actions_BCA, mask_BC, index_B, update)

    def batch(self, columns: SampleColumns) -> SampleBatch:
        """Give `columns` the form that policies take."""
        prompts = [self.infos[episode].prompt for episode in self.sample_episodes_X[columns.index_B]]
        observations = [
            Observation(dict(zip(VIEWS, images_VHWC)), state_S, prompt)
            for images_VHWC, state_S, prompt in zip(columns.images_BVHWC, columns.states_BS, prompts)
        ]
        return SampleBatch(observations, columns.actions_BCA, columns.action_mask_BC, columns.index_B, columns.update)

    def sequential(self, batch_size: int, chunk_length: int, rank: int = 0, world_size: int = 1) -> Iterator[SampleBatch]:
        """Every sample once, in order: this rank's share (every `world_size`-th), the last batch possibly smaller."""
        share = np.arange(rank, len(self), world_size)
        for start in range(0, len(share), batch_size):
            yield self.batch(self.columns(share[start : start + batch_size], chunk_length))


def require_motion(actions_NA: np.ndarray, name: str, task: str) -> None:
    """Raise DatasetError naming demo and task for a demonstration of nothing but no-ops (LIBERO #120)."""
    moves = np.linalg.norm(actions_NA[:, :6], axis=1) >= NO_OP_MOTION
    turns = np.diff(np.sign(actions_NA[:, 6])) != 0
    if not moves.any() and not turns.any():
        raise DatasetError(f"{name}: all {len(actions_NA)} actions are no-ops, the demonstration of {task} shows nothing; remove it")
