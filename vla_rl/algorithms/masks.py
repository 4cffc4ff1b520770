"""Which actions of a chunk the learner may credit to the policy.

Shape legend: B chunks (rows);  C actions per chunk;  E executed actions of one chunk (E <= C).

A row exists only for a chunk that ran, so an episode of F steps in chunks of K has ceil(F / K) rows, also where F is a
multiple of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_rl.algorithms.shapes import require_rank, require_shape
from vla_rl.episode import ChunkStep


def action_mask(executed_B: Tensor, intervention_BC: Tensor) -> Tensor:
    """bool[B, C]: `c < executed and not intervention`, to be applied before anything is reduced over c.

    `executed_B` int64[B] in [0, C]; `intervention_BC` bool[B, C], padded with False. Raises ValueError outside that.
    """
    require_rank("intervention_BC", intervention_BC, 2)
    rows, length = intervention_BC.shape
    require_shape("executed_B", executed_B, (rows,))
    if bool(((executed_B < 0) | (executed_B > length)).any()):
        raise ValueError(f"executed_B is {executed_B.tolist()}; a chunk of {length} actions executes 0 to {length}")
    position_C = torch.arange(length, device=executed_B.device)
    return (position_C < executed_B[:, None]) & ~intervention_BC


def action_mask_of(steps: Sequence[ChunkStep], chunk_length: int) -> Tensor:
    """bool[B, C]: the mask of chunks as they really happened; C is the policy's chunk length."""
    executed_B = torch.tensor([len(step.executed_EA) for step in steps], dtype=torch.int64)
    intervention_BC = torch.zeros(len(steps), chunk_length, dtype=torch.bool)
    for row, step in enumerate(steps):
        if len(step.intervention_E) > chunk_length:
            raise ValueError(f"chunk {row} executed {len(step.intervention_E)} actions; the policy's chunk_length is {chunk_length}")
        intervention_BC[row, : len(step.intervention_E)] = torch.from_numpy(step.intervention_E)
    return action_mask(executed_B, intervention_BC)
