"""A small policy with everything that weight sync must carry: blocks, an expert, a value head, a buffer, and tied weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SyncedPolicy(nn.Module):
    """`y = head(expert(backbone(x)))`; `reading` is tied to `writing`, `mean` is a saved buffer, `grid` is one that is not saved."""

    mean: Tensor
    steps: Tensor

    def __init__(self, seed: int = 0, width: int = 24) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.backbone = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.writing = nn.Linear(width, 7, bias=False)
            self.reading = nn.Linear(width, 7, bias=False)
            self.expert = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
            self.value_head = nn.Linear(width, 1)
            self.scale = nn.Parameter(torch.randn(1))
        self.reading.weight = self.writing.weight
        self.register_buffer("mean", torch.randn(width, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("grid", torch.arange(4.0), persistent=False)

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.backbone)

    def parameter_names(self, selection: str) -> list[str]:
        return [n for n, _ in self.named_parameters() if selection == "all" or n.startswith(("expert.", "value_head."))]

    def act(self, x_BI: Tensor) -> Tensor:
        for layer in self.backbone:
            x_BI = torch.tanh(layer(x_BI - self.mean))
        return self.writing(self.expert(x_BI)) * self.scale

    def value(self, x_BI: Tensor) -> Tensor:
        return self.value_head(self.expert(x_BI))[:, 0]


INPUT_BI = torch.linspace(-1, 1, 48).reshape(2, 24)


def change(policy: SyncedPolicy, version: int) -> None:
    """What an optimizer step and a running mean would do, in place, also on shards: every tensor that can change does, by `version`."""
    from vla_rl.engine.tensors import local_tensor

    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                local_tensor(parameter).mul_(0.5).add_(0.125 * version)  # powers of two: the same bits on any number of ranks
        policy.mean.add_(version)
        policy.steps.add_(1)
