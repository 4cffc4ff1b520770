"""The critic: how good an observation is, from tokens that the policy computes anyway.

Shape legend: B batch; P tokens; M their width; S state dimensions; Q queries; H width of the last hidden layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.config import ConfigError
from vla_rl.policies.mlp import mlp


@dataclass(frozen=True)
class CriticConfig:
    """What the critic reads, and its size. The heads of RLinf's pi0.5 (`prefix`) and pi0 (`expert`) recipes, with pooling that learns."""

    reads: Literal["prefix", "expert"] = "prefix"
    """`prefix`: the tokens of images and prompt. `expert`: the action expert's tokens at the first flow time and x_t = 0, where no random
    number takes part, so that rollout and trainer see the same value. Both with the normalised state beside."""
    queries: int = 4
    """Learned queries that pool the tokens; at least 1. They start as the mean over tokens."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the hidden layers; each at least 1."""
    detach: bool = True
    """Whether the value loss stops at the tokens (it then trains nothing but the critic) or also shapes the policy's features."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ConfigError(f"critic.queries is {self.queries}; allowed: at least 1")
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"critic.hidden is {list(self.hidden)}; every width must be at least 1")


class Critic(nn.Module):
    """A value per observation from its tokens and state."""

    def __init__(self, config: CriticConfig, token_width: int, state_dims: int) -> None:
        super().__init__()
        self.config = config
        self.query_QM = nn.Parameter(torch.zeros(config.queries, token_width))
        self.layers = mlp(config.queries * token_width + state_dims, config.hidden, 1)

    def forward(self, tokens_BPM: Tensor, mask_BP: Tensor, state_BS: Tensor) -> Tensor:
        """value float32[B]. `mask_BP` bool[B, P] holds for real tokens; a row needs at least one.

        Raises ValueError for shapes that contradict each other: a value of shape [B, 1] would broadcast to [B, B] in a loss.
        """
        if tokens_BPM.ndim != 3 or mask_BP.shape != tokens_BPM.shape[:2] or state_BS.shape[:1] != tokens_BPM.shape[:1]:
            raise ValueError(
                f"critic: tokens {list(tokens_BPM.shape)}, mask {list(mask_BP.shape)} and state {list(state_BS.shape)} must be "
                "[B, P, M], [B, P] and [B, S]"
            )
        if self.config.detach:
            tokens_BPM = tokens_BPM.detach()
        tokens_BPM = F.layer_norm(tokens_BPM, tokens_BPM.shape[-1:])
        score_BPQ = (tokens_BPM @ self.query_QM.mT) / tokens_BPM.shape[-1] ** 0.5
        weight_BPQ = score_BPQ.masked_fill(~mask_BP[..., None], -torch.inf).softmax(1)
        pooled_BQM = weight_BPQ.mT @ tokens_BPM
        hidden_BH = self.layers[:-1](torch.cat((pooled_BQM.flatten(1), state_BS.to(pooled_BQM.dtype)), 1))
        last = cast(nn.Linear, self.layers[-1])
        # A product with one column sums in an order that depends on the row's place in the batch; a sum per row does not.
        return (hidden_BH.float() * last.weight[0].float()).sum(1) + last.bias[0].float()
