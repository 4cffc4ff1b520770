"""From the rows of a rollout to the micro-batches of every rank, each row exactly once.

Shape legend: N episodes;  B chunks (rows) of the step;  M rows of a minibatch;  R ranks;  S micro-batches per rank;
              W rows per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.config import ConfigError


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of a minibatch, equally many and equally large on every rank."""

    row_RSW: Tensor
    """int64[R, S, W]: rows of the rollout's batch."""
    real_RSW: Tensor
    """bool[R, S, W]: False where a row is repeated to fill a micro-batch up; its weight must be 0."""


def require_divisible(whole_name: str, whole: int, part_name: str, part: int) -> None:
    """Raises ConfigError, naming both numbers and the remainder, unless `part` divides `whole`."""
    if part < 1 or whole < 1:
        raise ConfigError(f"{whole_name} is {whole} and {part_name} is {part}; both must be at least 1")
    if whole % part:
        below, above = whole - whole % part, whole + part - whole % part
        raise ConfigError(
            f"{whole_name} is {whole} and {part_name} is {part}: {whole % part} would be left over; "
            f"make {whole_name} a multiple of {part_name}, such as {f'{below} or {above}' if below else above}"
        )


def minibatches(rows: int, global_batch_size: int, seed: int) -> list[Tensor]:
    """int64 rows of each minibatch of one epoch, shuffled; the last one is smaller where the size does not divide, and kept."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randperm(rows, generator=generator).split(global_batch_size))


def deal_episodes(chunks_N: Sequence[int], ranks: int) -> list[int]:
    """The rank that trains on each episode, so that none has to fetch the others' pictures.

    Balanced by chunks, because episodes differ in length: the longest first, each to the rank that has the fewest chunks (Graham 1969).
    """
    load_R, rank_N = [0] * ranks, [0] * len(chunks_N)
    for episode in sorted(range(len(chunks_N)), key=lambda episode: -chunks_N[episode]):
        rank = load_R.index(min(load_R))
        rank_N[episode] = rank
        load_R[rank] += chunks_N[episode]
    return rank_N


def rank_batches(row_M: Tensor, rank_B: Tensor, ranks: int, micro_batch_size: int) -> RankBatches:
    """Deal a minibatch out in micro-batches of one fixed size, filled up with repeated rows: each row to the rank `rank_B` int64[B] names.

    One size means one shape of the forward batch (equal bits), and equal numbers mean that no rank waits for another's collective. A rank
    without a row in this minibatch repeats its first row of the step; one that has none at all repeats row 0, which it must hold for that.
    """
    if len(row_M) == 0:
        raise ValueError("a minibatch must have at least one row")
    own_R = [row_M[rank_B[row_M] == rank] for rank in range(ranks)]
    steps = -(-max(len(own) for own in own_R) // micro_batch_size)
    position = torch.arange(steps * micro_batch_size)
    shape = (ranks, steps, micro_batch_size)
    filled = [own if len(own) else _stand_in(rank_B, rank) for rank, own in enumerate(own_R)]
    rows = torch.stack([own[position % len(own)] for own in filled])
    real = torch.stack([position < len(own) for own in own_R])
    return RankBatches(rows.view(shape), real.view(shape))


def _stand_in(rank_B: Tensor, rank: int) -> Tensor:
    """int64[1]: a row that `rank` holds."""
    own = torch.nonzero(rank_B == rank)[:1, 0]
    return own if len(own) else torch.zeros(1, dtype=torch.int64)
