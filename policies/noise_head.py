"""The noise head of Flow-Noise: how widely the policy explores, learned per action dimension (Zhang et al. 2025, ReinFlow)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.policies.mlp import mlp


@dataclass(frozen=True)
class NoiseHeadConfig:
    """Size of the noise head; the bounds of the spread belong to `Exploration`."""

    hidden: tuple[int, ...] = (128, 64)
    """Widths of the hidden layers; each at least 1."""

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"noise_head.hidden is {list(self.hidden)}; every width must be at least 1")


class NoiseHead(nn.Module):
    """From the action expert's tokens to a raw spread; `flow_stochastic.learned_std` maps it into the allowed range."""

    def __init__(self, config: NoiseHeadConfig, token_width: int, action_dims: int) -> None:
        super().__init__()
        self.layers = mlp(token_width, config.hidden, action_dims)

    def forward(self, tokens_BCM: Tensor) -> Tensor:
        """float32[B, C, A] from the tokens [B, C, M] of the actions; near 0 at first, which is the middle of the range."""
        return self.layers(tokens_BCM).float()
