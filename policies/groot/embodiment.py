"""Maps with weights of their own for each embodiment, of which a policy uses one (GR00T's category-specific layers).

Shape legend: B batch; N tokens; I, O inputs and outputs; E embodiments; C actions per chunk; A action dimensions; M width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EmbodimentLinear(nn.Module):
    """x W + b with one (W, b) per embodiment."""

    def __init__(self, embodiments: int, inputs: int, outputs: int, embodiment: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(embodiments, inputs, outputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))
        self.embodiment = embodiment

    def forward(self, x_BNI: Tensor) -> Tensor:
        """float32[B, N, I] -> float32[B, N, O]."""
        return x_BNI @ self.W[self.embodiment] + self.b[self.embodiment]


class EmbodimentMLP(nn.Module):
    """Two such layers with a ReLU between them."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int, embodiment: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden, embodiment)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs, embodiment)

    def forward(self, x_BNI: Tensor) -> Tensor:
        """float32[B, N, I] -> float32[B, N, O]."""
        return self.layer2(F.relu(self.layer1(x_BNI)))


class ActionEncoder(nn.Module):
    """Noisy actions and the bucket of flow time to tokens, one per action."""

    def __init__(self, embodiments: int, action_dims: int, width: int, embodiment: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, action_dims, width, embodiment)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width, embodiment)
        self.W3 = EmbodimentLinear(embodiments, width, width, embodiment)

    def forward(self, x_BCA: Tensor, bucket_B: Tensor) -> Tensor:
        """float32[B, C, M]."""
        actions_BCM = self.W1(x_BCA)
        time_BM = bucket_sines(bucket_B, _exponents(actions_BCM.shape[-1] // 2, bucket_B.device))
        joined = torch.cat((actions_BCM, time_BM[:, None].expand_as(actions_BCM).to(actions_BCM.dtype)), -1)
        return self.W3(F.silu(self.W2(joined)))


def bucket_sines(bucket_B: Tensor, exponents_H: Tensor) -> Tensor:
    """float32[B, 2 H]: sines, then cosines, of the bucket's number times exp of the exponents.

    The exponents come in the published order of operations: a float32 rounding of one, times bucket 999, is a visible phase.
    """
    angles_BH = bucket_B[:, None].float() * exponents_H.exp()
    return torch.cat((angles_BH.sin(), angles_BH.cos()), 1)


def _exponents(half: int, device: torch.device) -> Tensor:
    """float32[half]: 0 to almost -log 10,000, as Isaac-GR00T's `SinusoidalPositionalEncoding` computes them."""
    log_period = torch.log(torch.tensor(10_000.0))
    return -torch.arange(half, dtype=torch.float32, device=device) * (log_period / half)
