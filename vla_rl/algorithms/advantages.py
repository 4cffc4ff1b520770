"""Advantages and returns from scalars: GAE over chunks, group baselines, normalisation over all ranks.

Shape legend: T chunks of one episode (values have T + 1 entries: before every chunk, and at the final observation);
              E executed actions of one chunk;  N episodes;  B chunks (rows) of a batch.

Everything here is float64 on the CPU: the driver computes advantages once, from scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.algorithms.shapes import require_rank, require_shape
from vla_rl.config import ConfigError

Discounting = Literal["control_step", "chunk"]
GroupBaseline = Literal["group_mean", "leave_one_out"]
GroupScale = Literal["unbiased", "biased", "none"]


@dataclass(frozen=True)
class GaeSettings:
    """Generalised advantage estimation (Schulman et al. 2016) at the level of chunks."""

    discount: float = 0.99
    """gamma, in (0, 1]; per control step or per chunk, see `discounting`."""
    smoothing: float = 0.95
    """lambda, in [0, 1], per chunk."""
    discounting: Discounting = "control_step"
    """`control_step`: a chunk that executed c steps discounts by gamma^c, and its rewards by gamma^0 .. gamma^(c-1) (a semi-Markov
    decision process, Sutton, Precup and Singh 1999). `chunk`: by gamma whatever its length, its rewards summed (RLinf)."""

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise ConfigError(f"gae.discount is {self.discount}; allowed: above 0 and at most 1")
        if not 0 <= self.smoothing <= 1:
            raise ConfigError(f"gae.smoothing is {self.smoothing}; allowed: 0 to 1")


def chunk_reward(reward_E: Sequence[float], settings: GaeSettings) -> float:
    """The reward of a chunk, as seen from its first action: sum_e gamma^e r_e, or the plain sum where gamma is per chunk."""
    rate = settings.discount if settings.discounting == "control_step" else 1.0
    return sum(rate**step * float(reward) for step, reward in enumerate(reward_E))


def chunk_gae(reward_T: Tensor, executed_T: Tensor, value_T1: Tensor, terminated: bool, settings: GaeSettings) -> tuple[Tensor, Tensor]:
    """(advantage_T, return_T) float64[T] of one episode.

    delta_t = R_t + g_t V_{t+1} - V_t,  A_t = delta_t + g_t lambda A_{t+1},  return_t = A_t + V_t, with R_t = `reward_T` from
    `chunk_reward`, and g_t = gamma^c_t (`executed_T` int64[T]) or gamma. `value_T1` float[T + 1] ends with the value of the final
    observation: it counts where the episode was truncated (time limit, or cut off by the batch) and not where it `terminated`.
    """
    require_rank("reward_T", reward_T, 1)
    chunks = len(reward_T)
    require_shape("executed_T", executed_T, (chunks,))
    require_shape("value_T1", value_T1, (chunks + 1,))
    rewards, values = reward_T.double().tolist(), value_T1.double().tolist()
    if terminated:
        values[-1] = 0.0
    advantage, advantages = 0.0, [0.0] * chunks
    for t in reversed(range(chunks)):
        rate = settings.discount ** int(executed_T[t]) if settings.discounting == "control_step" else settings.discount
        delta = rewards[t] + rate * values[t + 1] - values[t]
        advantage = delta + rate * settings.smoothing * advantage
        advantages[t] = advantage
    advantage_T = torch.tensor(advantages, dtype=torch.float64)
    return advantage_T, advantage_T + value_T1[:-1].double()


def group_advantages(score_N: Tensor, group_N: Tensor, baseline: GroupBaseline, scale: GroupScale, epsilon: float = 1e-6) -> Tensor:
    """float64[N]: how much better each episode did than its group.

    group_mean:    A_i = (R_i - mean R) / (std R + epsilon), with the `unbiased` (n - 1) or `biased` (n) standard deviation, or undivided
                   for `none` (GRPO, Shao et al. 2024; Dr. GRPO for `none`)
    leave_one_out: A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean R), scaled likewise (RLOO, Ahmadian et al. 2024)

    `score_N` float[N] is an episode's return; `group_N` int64[N] tells groups apart, in any order and of any size. An episode without
    a companion has nothing to be compared with: its advantage is 0, as it is where all scores of a group are equal.
    """
    require_rank("score_N", score_N, 1)
    require_shape("group_N", group_N, score_N.shape)
    score_N = score_N.double()
    groups, inverse_N = torch.unique(group_N, return_inverse=True)

    def group_sum(value_N: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64).index_add(0, inverse_N, value_N)[inverse_N]

    size_N = group_sum(torch.ones_like(score_N))
    centered_N = score_N - group_sum(score_N) / size_N
    advantage_N = centered_N * (size_N / (size_N - 1).clamp(min=1) if baseline == "leave_one_out" else 1.0)
    if scale != "none":
        degrees_N = size_N - 1 if scale == "unbiased" else size_N
        advantage_N = advantage_N / ((group_sum(centered_N.square()) / degrees_N.clamp(min=1)).sqrt() + epsilon)
    return torch.where(_all_equal(score_N, inverse_N, len(groups)), 0.0, advantage_N)


def _all_equal(score_N: Tensor, inverse_N: Tensor, groups: int) -> Tensor:
    """bool[N]: no two scores of the episode's group differ (rounding of the mean must not make a signal of that)."""
    highest = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, inverse_N, score_N, "amax")
    lowest = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, inverse_N, score_N, "amin")
    return (highest == lowest)[inverse_N]


@dataclass(frozen=True)
class Moments:
    """Sufficient statistics of mean and variance; ranks add theirs (`+`, or an all-reduced sum of `as_list()`)."""

    count: float
    """Number of values."""
    total: float
    """Their sum."""
    square_total: float
    """The sum of their squares."""

    @classmethod
    def of(cls, value_B: Tensor, mask_B: Tensor) -> Moments:
        """Statistics of the unmasked values: `value_B` float[B], `mask_B` bool[B]."""
        require_rank("value_B", value_B, 1)
        require_shape("mask_B", mask_B, value_B.shape)
        kept = value_B[mask_B].double()
        return cls(float(len(kept)), float(kept.sum()), float(kept.square().sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.square_total + other.square_total)

    def as_list(self) -> list[float]:
        """[count, total, square_total], to be summed over ranks and given back as `Moments(*sums)`."""
        return [self.count, self.total, self.square_total]

    @property
    def mean(self) -> float:
        """Mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Biased variance; 0 without values."""
        return max(self.square_total / self.count - self.mean**2, 0.0) if self.count else 0.0


def normalize(value_B: Tensor, moments: Moments, epsilon: float = 1e-5) -> Tensor:
    """(value - mean) / (std + epsilon), with the statistics of the whole batch, over all ranks, unmasked rows only."""
    return (value_B - moments.mean) / (moments.variance**0.5 + epsilon)
