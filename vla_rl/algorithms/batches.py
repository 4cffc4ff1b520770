"""From the rows of a rollout to the micro-batches of every rank, each row exactly once.

Shape legend: B chunks (rows);  R ranks;  S micro-batches per rank;  W rows per micro-batch.
"""

from __future__ import annotations

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


def rank_batches(row_B: Tensor, ranks: int, micro_batch_size: int) -> RankBatches:
    """Deal a minibatch out to ranks in micro-batches of one fixed size, filled up with repeated rows.

    One size means one shape of the forward batch (equal bits), and equal numbers mean that no rank waits for another's collective.
    """
    if len(row_B) == 0:
        raise ValueError("a minibatch must have at least one row")
    steps = -(-len(row_B) // (ranks * micro_batch_size))
    slots = ranks * steps * micro_batch_size
    position = torch.arange(slots)
    shape = (steps, ranks, micro_batch_size)
    row_SRW = row_B[position % len(row_B)].view(shape)
    return RankBatches(row_SRW.transpose(0, 1).contiguous(), (position < len(row_B)).view(shape).transpose(0, 1).contiguous())
