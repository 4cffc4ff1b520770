"""How much each ratio counts in the loss: the named aggregations, as weights computed before the batch is cut.

Shape legend: B chunks (rows);  U ratios per chunk.

With element loss l and mask m, over all rows of a batch, e an episode, n_e its unmasked elements, M their episodes' number:

    element_mean    sum m l / sum m                     every ratio counts the same (verl's token-mean)
    episode_mean    1/M sum_e (1/n_e) sum_e m l         every episode counts the same (seq-mean-token-mean)
    episode_sum     1/M sum_e sum_e m l                 (seq-mean-token-sum)
    fixed_divisor   1/(M Z) sum_e sum_e m l             the sum over a constant Z (Dr. GRPO, Liu et al. 2025)

Each is `sum weight l / sum count`, where weight and count belong to a row and depend on no other row of its minibatch.
So the value and the gradient are the same however a minibatch is cut into micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.algorithms.shapes import require_rank, require_shape

Aggregation = Literal["element_mean", "episode_mean", "episode_sum", "fixed_divisor"]


@dataclass(frozen=True)
class ElementWeights:
    """Weights of the ratios of a batch; rows can be selected freely."""

    loss_BU: Tensor
    """float32[B, U]: factor of each element's policy loss; 0 where masked."""
    share_BU: Tensor
    """float32[B, U]: factor of each element in a mean (metrics); 0 where masked; their sum is the count."""

    @property
    def count_B(self) -> Tensor:
        """float32[B]: what each row adds to the divisor; also the weight of its value loss."""
        return self.share_BU.sum(1)

    def count(self) -> float:
        """The divisor of these rows, for the engine's `normalizer`."""
        return float(self.count_B.double().sum())

    def select(self, index: Tensor | slice) -> ElementWeights:
        """The weights of some rows."""
        return ElementWeights(self.loss_BU[index], self.share_BU[index])


def element_weights(mask_BU: Tensor, episode_B: Tensor, aggregation: Aggregation, fixed_divisor: float | None = None) -> ElementWeights:
    """Weights of every row of a rollout's whole batch (all ranks, before minibatches are drawn).

    `mask_BU` bool[B, U]; `episode_B` int64[B], any numbers that tell episodes apart; `fixed_divisor` is Z, in elements per
    episode. Raises ValueError for other shapes, and where Z and the aggregation do not go together.
    """
    require_rank("mask_BU", mask_BU, 2)
    require_shape("episode_B", episode_B, (len(mask_BU),))
    if (aggregation == "fixed_divisor") != (fixed_divisor is not None):
        raise ValueError(f"aggregation is {aggregation!r} and fixed_divisor is {fixed_divisor}; give a divisor for 'fixed_divisor' only")
    mask = mask_BU.to(torch.float32)
    if aggregation == "element_mean":
        return ElementWeights(mask, mask)
    share = mask / _elements_of_episode(mask, episode_B).clamp(min=1)[:, None]
    if aggregation == "episode_mean":
        return ElementWeights(share, share)
    return ElementWeights(mask if fixed_divisor is None else mask / fixed_divisor, share)


def _elements_of_episode(mask_BU: Tensor, episode_B: Tensor) -> Tensor:
    """float32[B]: how many unmasked elements the episode of each row has."""
    episodes, inverse_B = torch.unique(episode_B, return_inverse=True)
    elements = torch.zeros(len(episodes), device=mask_BU.device).index_add(0, inverse_B, mask_BU.sum(1))
    return elements[inverse_B]
