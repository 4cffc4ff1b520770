"""From episodes to training rows: one row per chunk, with what was recorded, what may be credited to the policy, and its advantage.

Shape legend: B rows (chunks of all episodes, in spec order);  C actions per chunk;  K recorded denoise steps;  T chunks of an episode;
              E executed actions of a chunk;  N episodes;  A action dimensions of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vla_rl.algorithms.advantages import Moments, chunk_gae, chunk_reward, group_advantages, normalize
from vla_rl.algorithms.batches import deal_episodes
from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.health import explained_variance
from vla_rl.algorithms.masks import action_mask_of
from vla_rl.episode import ChunkStep, Episode, EpisodeSpec, Float32, FlowRecord, Observation, TokenRecord
from vla_rl.policies.base import RecordBatch
from vla_rl.policies.records import stack_records


class StaleRollout(RuntimeError):
    """Data older than `max_staleness` reached the trainer: the pacing is broken."""


@dataclass(frozen=True)
class RowScalars:
    """The chunks of a step's episodes, in spec order: what advantages are made of, without pictures and records."""

    mask_BC: Tensor
    """bool[B, C]: executed, and not by a person; all False for episodes that count nothing."""
    value_B: Tensor
    """float32[B]: the critic's estimate at the rollout; zeros without a critic."""
    episode_B: Tensor
    """int64[B]: number of each row's episode."""
    version_B: Tensor
    """int64[B]: version of the weights that acted."""

    def __len__(self) -> int:
        return len(self.value_B)


@dataclass(frozen=True)
class TrainingRows(RowScalars):
    """The same chunks with what an update needs of those that this trainer rank holds."""

    rank_B: Tensor
    """int64[B]: the trainer rank that trains on each row."""
    observations: dict[int, Observation]
    """Row -> what was seen before its chunk; the rows that are held here."""
    record: RecordBatch
    """What was sampled, B rows; where a row is not held, another's stands in for it and is not looked at."""
    behaviour_BC: Tensor
    """float32[B, C]: log-probabilities as recorded by who acted; not a number where a row is not held."""


def row_scalars(episodes: Sequence[Episode], masked: Sequence[Episode], chunk_length: int) -> RowScalars:
    """One row per chunk of `episodes`, then of `masked`, whose masks are all False."""
    every = [*episodes, *masked]
    steps = [step for episode in every for step in episode.steps]
    numbers = [number for number, episode in enumerate(every) for _ in episode.steps]
    mask_BC = action_mask_of(steps, chunk_length)
    mask_BC[torch.tensor(numbers, dtype=torch.int64) >= len(episodes)] = False
    return RowScalars(
        mask_BC=mask_BC,
        value_B=torch.tensor([step.proposed.value or 0.0 for step in steps], dtype=torch.float32),
        episode_B=torch.tensor(numbers, dtype=torch.int64),
        version_B=torch.tensor([step.proposed.weights_version for step in steps], dtype=torch.int64),
    )


def rank_of_rows(rows: RowScalars, ranks: int) -> Tensor:
    """int64[B]: the trainer rank that trains on each row; whole episodes go to one rank."""
    rank_N = deal_episodes(torch.bincount(rows.episode_B).tolist(), ranks)
    return torch.tensor(rank_N, dtype=torch.int64)[rows.episode_B]


def episodes_to_hold(rows: RowScalars, rank_B: Tensor, rank: int) -> list[int]:
    """Numbers of the episodes that a rank fetches: those it trains on, or the first one if there are fewer episodes than ranks."""
    return sorted(set(rows.episode_B[rank_B == rank].tolist())) or [int(rows.episode_B[0])]


def training_rows(scalars: RowScalars, rank_B: Tensor, held: Mapping[int, Episode], chunk_length: int) -> TrainingRows:
    """The rows of `row_scalars` with pictures and records of the episodes that are `held` here, by their number.

    A chunk that an operator acted in the policy's place has no record: its row is masked whole, so that another chunk's stands in for it
    without being looked at. Raises ValueError for any other chunk without a record.
    """
    steps: dict[int, ChunkStep] = {}
    for number, episode in held.items():
        steps |= zip(torch.nonzero(scalars.episode_B == number)[:, 0].tolist(), episode.steps, strict=True)
    records = {row: _record_of(step, chunk_length) for row, step in steps.items() if not _is_operators(step)}
    stand_in = next(iter(records.values()), None)
    if stand_in is None:
        raise ValueError("every chunk of these episodes was acted by an operator, so there is nothing to credit to the policy")
    behaviour_BC = torch.full((len(scalars), chunk_length), torch.nan)
    for row in steps:
        behaviour_BC[row] = torch.from_numpy(records.get(row, stand_in).log_prob_C)
    return TrainingRows(
        **vars(scalars),
        rank_B=rank_B,
        observations={row: replace(step.observation, privileged={}) for row, step in steps.items()},  # as the policy saw it
        record=stack_records([records.get(row, stand_in) for row in range(len(scalars))]),
        behaviour_BC=behaviour_BC,
    )


def _is_operators(step: ChunkStep) -> bool:
    return step.proposed.record is None and bool(step.intervention_E.all())


def _record_of(step: ChunkStep, chunk_length: int) -> FlowRecord | TokenRecord:
    record = step.proposed.record
    if record is None or record.log_prob_C.shape != (chunk_length,):
        found = None if record is None else list(record.log_prob_C.shape)
        raise ValueError(f"a chunk has log-probabilities of shape {found}, wanted [{chunk_length}]; learners need a policy that explores")
    return record


def staleness(rows: RowScalars, trainer_version: int, most: int) -> Tensor:
    """int64[B]: how many versions older than the trainer's each row's weights are. Raises StaleRollout beyond `most`, or below 0."""
    age_B = trainer_version - rows.version_B
    if len(age_B) and not 0 <= int(age_B.min()) <= int(age_B.max()) <= most:
        raise StaleRollout(
            f"rows of weights version {int(rows.version_B.min())} to {int(rows.version_B.max())} reached the trainer at version "
            f"{trainer_version}; algorithm.max_staleness allows {most}"
        )
    return age_B


@dataclass(frozen=True)
class Advantages:
    """What the update wants of each row."""

    advantage_B: Tensor
    """float32[B], normalised where the algorithm says so."""
    return_B: Tensor
    """float32[B]: the critic's target; zeros without a critic."""
    explained_variance: float
    """Of the returns by the rollout's values; not a number without a critic."""
    mean_return: float
    """Mean over episodes of the sum of what they earned: undiscounted, and without penalties."""


def advantages(
    episodes: Sequence[Episode],
    earned: Sequence[Sequence[Float32]],
    rows: RowScalars,
    final_values: Mapping[str, float],
    penalty_B: Tensor | None,
    algorithm: AlgorithmConfig,
) -> Advantages:
    """Advantages and returns of `rows`, which are those of `episodes` in order; pictures and records may have been left out.

    `earned` holds each episode's rewards as `episode_rewards` gives them, float32[E] per chunk; `final_values` the critic's value of the
    final observation by `EpisodeSpec.key`, for episodes that were truncated; `penalty_B` float32[B] is subtracted from each chunk's
    reward (KL to the reference, where it belongs into the reward).
    """
    rewards = [_chunk_rewards(parts, algorithm) for parts in earned]
    if penalty_B is not None:
        parts = penalty_B.double().split([len(episode.steps) for episode in episodes])
        rewards = [reward_T - part for reward_T, part in zip(rewards, parts, strict=True)]
    if algorithm.group is None:
        advantage_B, return_B = _gae(episodes, rewards, rows.value_B, final_values, algorithm)
    else:
        advantage_B, return_B = _group(episodes, rewards, algorithm), torch.zeros(len(rows), dtype=torch.float64)
    counts_B = rows.mask_BC.any(1)
    explained = float("nan")
    if algorithm.critic is not None:
        explained = explained_variance(Moments.of(return_B - rows.value_B.double(), counts_B), Moments.of(return_B, counts_B))
    if algorithm.normalize_advantages:
        advantage_B = normalize(advantage_B, Moments.of(advantage_B, counts_B))
    mean_return = sum(float(part.sum()) for parts in earned for part in parts) / max(len(earned), 1)
    return Advantages(advantage_B.float(), return_B.float(), explained, mean_return)


def _chunk_rewards(parts: Sequence[Float32], algorithm: AlgorithmConfig) -> Tensor:
    """float64[T]: reward of each chunk, discounted inside it only where GAE discounts by control step."""
    if algorithm.group is not None:
        return torch.tensor([float(part.sum()) for part in parts], dtype=torch.float64)
    return torch.tensor([chunk_reward(part.tolist(), algorithm.gae) for part in parts], dtype=torch.float64)


def _gae(
    episodes: Sequence[Episode],
    rewards: Sequence[Tensor],
    value_B: Tensor,
    final_values: Mapping[str, float],
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    values = value_B.double().split([len(episode.steps) for episode in episodes])
    results: list[tuple[Tensor, Tensor]] = []
    for episode, reward_T, value_T in zip(episodes, rewards, values, strict=True):
        last = 0.0 if episode.success else final_values[episode.spec.key]
        value_T1 = torch.cat((value_T, torch.tensor([last], dtype=torch.float64)))
        executed_T = torch.tensor([len(step.executed_EA) for step in episode.steps], dtype=torch.int64)
        results.append(chunk_gae(reward_T, executed_T, value_T1, episode.success, algorithm.gae))
    return torch.cat([advantage for advantage, _ in results]), torch.cat([target for _, target in results])


def _group(episodes: Sequence[Episode], rewards: Sequence[Tensor], algorithm: AlgorithmConfig) -> Tensor:
    """float64[B]: each episode's advantage over its group, the same for all of its chunks."""
    assert algorithm.group is not None and algorithm.advantage != "gae", "AlgorithmConfig checks it"
    score_N = torch.stack([reward_T.sum() for reward_T in rewards])
    scenes = [_scene(episode.spec) for episode in episodes]
    group_N = torch.tensor([scenes.index(scene) for scene in scenes], dtype=torch.int64)
    advantage_N = group_advantages(score_N, group_N, algorithm.advantage, algorithm.group.scale)
    return advantage_N.repeat_interleave(torch.tensor([len(episode.steps) for episode in episodes]))


def _scene(spec: EpisodeSpec) -> tuple[str, int, str]:
    """What the members of a group share."""
    return spec.suite, spec.task, spec.init
