"""Samples of recorded episodes: an observation that has pictures, and the chunk of actions that follows it.

    episodes ── EpisodeDataset ── window and mask ── SampleBatch ── policy.preprocess

Shape legend: see `vla_rl/episode.py`; B batch, V views, C actions of a chunk, R control steps of all episodes together,
X samples of the dataset, T offsets of a window, M = B T.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from vla_rl.datasets.episode_rows import EpisodeInfo, require_alike
from vla_rl.datasets.episodes import load_interventions, load_steps
from vla_rl.datasets.frames import FileFrames, Frames
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import ACTION_DIM, VIEWS, Bool, Float32, Int64, Observation, UInt8

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
    """bool[B, C]: False past the episode's end, and where a policy acted that an operator corrected."""
    weight_B: Float32
    """float32[B]: of each sample in the loss; `human_weight` where an operator acted, else 1."""
    index_B: Int64
    """int64[B]: which samples of the dataset these are."""
    update: int
    """Number of the update that these samples belong to (0 for batches outside training)."""

    def target_count(self, rows: slice) -> float:
        """What a supervised loss of these rows counts: the weighted numbers of all actions that are targets."""
        return float((self.action_mask_BC[rows].sum(1) * self.weight_B[rows]).sum()) * ACTION_DIM


@dataclass
class SampleColumns:
    """A batch before its observations are made: what crosses from a worker process."""

    images_BVHWC: UInt8
    states_BS: Float32
    actions_BCA: Float32
    action_mask_BC: Bool
    weight_B: Float32
    index_B: Int64
    update: int


@dataclass
class ObservedWindows:
    """Observations at several offsets around each sample."""

    images_BTVHWC: UInt8
    """uint8[B, T, V, H, W, 3], views in the order of `VIEWS`."""
    states_BTS: Float32
    mask_BT: Bool
    """bool[B, T]: False past an end of the episode, where its first or last observation is repeated."""


def action_windows(actions_RA: Float32, starts_B: Int64, ends_B: Int64, chunk_length: int) -> tuple[Float32, Bool]:
    """Chunks of `chunk_length` rows from each start; past an end (exclusive) the row before it is repeated and masked.

    Returns float32[B, C, A] and bool[B, C].
    """
    rows_BC = starts_B[:, None] + np.arange(chunk_length)
    mask_BC = rows_BC < ends_B[:, None]
    return actions_RA[np.minimum(rows_BC, ends_B[:, None] - 1)], mask_BC


class EpisodeDataset:
    """Episodes as samples. Holds all actions and states (60 bytes a control step); pictures come from `frames`.

    A sample is a control step that has pictures: sparse episodes give fewer samples, never repeated pictures. Of an episode in
    which an operator corrected a policy, only the operator's steps are samples and targets: what the policy did was not good enough.
    """

    def __init__(
        self,
        infos: Sequence[EpisodeInfo],
        labels: Literal["clean", "executed"] = "clean",
        frames: Frames | None = None,
        human_weight: float = 1.0,
    ) -> None:
        require_alike(infos)
        self.infos = list(infos)
        self._human_weight = human_weight
        self._frames = frames if frames is not None else FileFrames(self.infos)
        self._read_rows(labels == "clean")

    def _read_rows(self, labels: bool) -> None:
        """Fill the tables: rows R over all episodes, samples X over all pictures."""
        actions, states, targets, weights, sample_rows, positions = [], [], [], [], [], []
        self.row_starts = np.concatenate([[0], np.cumsum([info.num_steps for info in self.infos])])
        for info, start in zip(self.infos, self.row_starts):
            actions_NA, states_NS, frame_index_F = load_steps(info, labels)
            require_motion(actions_NA, info.name, f"{info.spec.suite} task {info.spec.task} ({info.prompt!r})")
            intervention_N = load_interventions(info)
            target_N = intervention_N if intervention_N.any() else np.ones_like(intervention_N)
            taught_F = target_N[frame_index_F]
            actions.append(actions_NA)
            states.append(states_NS)
            targets.append(target_N)
            weights.append(np.where(intervention_N, self._human_weight, 1.0).astype(np.float32))
            sample_rows.append(start + frame_index_F[taught_F])
            positions.append(np.flatnonzero(taught_F))
        self.actions_RA: Float32 = np.concatenate(actions)
        self.states_RS: Float32 = np.concatenate(states)
        self.target_R: Bool = np.concatenate(targets)
        self.weight_R: Float32 = np.concatenate(weights)
        self.sample_rows_X: Int64 = np.concatenate(sample_rows)
        counts = [len(rows) for rows in sample_rows]
        self.sample_episodes_X: Int64 = np.repeat(np.arange(len(counts)), counts)
        self.sample_positions_X: Int64 = np.concatenate(positions)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_rows_X)

    @cached_property
    def sha256(self) -> str:
        """Of everything but the pictures: actions, states, targets, weights, which control steps are samples, and prompts."""
        digest = hashlib.sha256("\0".join(info.prompt for info in self.infos).encode())
        for rows in (self.row_starts, self.actions_RA, self.states_RS, self.target_R, self.weight_R, self.sample_rows_X):
            digest.update(np.ascontiguousarray(rows).data)
        return digest.hexdigest()

    def columns(self, index_B: Int64, chunk_length: int, update: int = 0) -> SampleColumns:
        """The samples `index_B`, as arrays."""
        episodes_B, rows_B = self.sample_episodes_X[index_B], self.sample_rows_X[index_B]
        actions_BCA, mask_BC = action_windows(self.actions_RA, rows_B, self.row_starts[episodes_B + 1], chunk_length)
        mask_BC &= self.target_R[np.minimum(rows_B[:, None] + np.arange(chunk_length), len(self.target_R) - 1)]
        images_BVHWC = self._frames.read(episodes_B, self.sample_positions_X[index_B])
        return SampleColumns(images_BVHWC, self.states_RS[rows_B], actions_BCA, mask_BC, self.weight_R[rows_B], index_B, update)

    def observed_windows(self, index_B: Int64, offsets: Sequence[int]) -> ObservedWindows:
        """Observations around the samples `index_B`, at whole numbers of pictures before (negative) and after them.

        As LeRobot's `delta_timestamps` for observations, in pictures instead of seconds: past an end of the episode its last
        (first) observation is repeated and masked. With sparse pictures the neighbours are `frame_every` control steps apart.
        """
        episodes_B = self.sample_episodes_X[index_B]
        ends_B = np.array([info.num_frames for info in self.infos])[episodes_B]
        wanted_BT = self.sample_positions_X[index_B][:, None] + np.array(offsets, np.int64)
        mask_BT = (wanted_BT >= 0) & (wanted_BT < ends_B[:, None])
        positions_BT = np.clip(wanted_BT, 0, ends_B[:, None] - 1)
        images_MVHWC = self._frames.read(np.repeat(episodes_B, len(offsets)), positions_BT.reshape(-1))
        every_B = np.array([info.frame_every for info in self.infos])[episodes_B]
        states_BTS = self.states_RS[self.row_starts[episodes_B][:, None] + positions_BT * every_B[:, None]]
        return ObservedWindows(images_MVHWC.reshape(*mask_BT.shape, *images_MVHWC.shape[1:]), states_BTS, mask_BT)

    def batch(self, columns: SampleColumns) -> SampleBatch:
        """Give `columns` the form that policies take."""
        prompts = [self.infos[episode].prompt for episode in self.sample_episodes_X[columns.index_B]]
        observations = [
            Observation(dict(zip(VIEWS, images_VHWC)), state_S, prompt)
            for images_VHWC, state_S, prompt in zip(columns.images_BVHWC, columns.states_BS, prompts)
        ]
        return SampleBatch(observations, columns.actions_BCA, columns.action_mask_BC, columns.weight_B, columns.index_B, columns.update)

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
