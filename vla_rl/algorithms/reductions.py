"""From a log-probability per action to the log-probability of one importance ratio.

Shape legend: B chunks (rows);  C actions per chunk;  U ratios per chunk: C for `action`, 1 for `chunk`;
              D real action dimensions;  K recorded denoise steps.

Policies give the log-likelihood per action, *summed* over real dimensions and recorded denoise steps. Whether the ratio is
taken of that sum or of a mean is a choice that moves the effective clip range by orders of magnitude: a clip range of 0.2 on
the mean over 8 actions of 7 dimensions is one of exp(56 * log 1.2), about 27,000, on the joint ratio (ddpo#10, flow_grpo#143).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.algorithms.shapes import require_rank, require_shape
from vla_rl.config import ConfigError

Unit = Literal["action", "chunk"]
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class LogProbReduction:
    """What one importance ratio is taken of."""

    unit: Unit = "chunk"
    """`action`: one ratio per executed action. `chunk`: one per chunk, over its executed actions (RLinf's pi0 recipes)."""
    dims: Reduction = "sum"
    """Over the real action dimensions of an action: `sum` is its likelihood, `mean` divides by 7 (ReinFlow, DPPO), also where some of
    them are constant in the data and say nothing, so that a clip range means the same on every task."""
    actions: Reduction = "sum"
    """Over the unmasked actions of a chunk; only `sum` where the unit is `action`, and only `mean` where each of them carries the
    likelihood of the whole chunk (`exploration.noise_over: chunk`): that does not shrink where an episode ends inside the chunk."""
    denoise_steps: Reduction = "sum"
    """Over the recorded denoise steps: `sum` is the chain's likelihood, `mean` divides by their number
    (as RLinf's joint log-prob, whose divisor also counts the initial noise, which no weight changes)."""

    def __post_init__(self) -> None:
        if self.unit == "action" and self.actions == "mean":
            raise ConfigError("log_prob.actions is 'mean', but a ratio per action (log_prob.unit) reduces over no actions; set it to 'sum'")


def element_mask(mask_BC: Tensor, unit: Unit) -> Tensor:
    """bool[B, U]: which ratios exist. A chunk counts if any of its actions does."""
    require_rank("mask_BC", mask_BC, 2)
    return mask_BC if unit == "action" else mask_BC.any(1, keepdim=True)


def reduce_per_action(value_BC: Tensor, mask_BC: Tensor, reduction: LogProbReduction, action_dims: int, denoise_steps: int) -> Tensor:
    """float[B, U] from float[B, C] summed over D = `action_dims` dimensions and K = `denoise_steps` recorded steps.

    For log-probabilities and entropies alike. Masked actions are replaced by 0 before they are reduced (a NaN there stays
    there), and a mean over actions divides by the unmasked ones. Raises ValueError where the shapes differ.
    """
    require_rank("value_BC", value_BC, 2)
    require_shape("mask_BC", mask_BC, value_BC.shape)
    value_BC = torch.where(mask_BC, value_BC, 0.0)
    if reduction.dims == "mean":
        value_BC = value_BC / action_dims
    if reduction.denoise_steps == "mean":
        value_BC = value_BC / denoise_steps
    if reduction.unit == "action":
        return value_BC
    total_B1 = value_BC.sum(1, keepdim=True)
    if reduction.actions == "sum":
        return total_B1
    return total_B1 / mask_BC.sum(1, keepdim=True).clamp(min=1)
