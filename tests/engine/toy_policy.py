"""A policy of 5,000 parameters with the engine-facing shape of a real one: blocks, an expert, and `sft_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.policies.base import LossSums


@dataclass
class Rows:
    """Inputs float32[B, 6], targets float32[B, 3], weights float32[B]."""

    x_BI: Tensor
    y_BO: Tensor
    weight_B: Tensor

    def __len__(self) -> int:
        return len(self.x_BI)

    def cut(self, start: int, stop: int) -> Rows:
        return Rows(self.x_BI[start:stop], self.y_BO[start:stop], self.weight_B[start:stop])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class TinyPolicy(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inputs = nn.Linear(6, width)
            self.layers = nn.ModuleList(Block(width) for _ in range(depth))
            self.expert = nn.Linear(width, 3)
        self.register_buffer("mean", torch.full((6,), 0.5))

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def parameter_names(self, selection: str) -> list[str]:
        return [name for name, _ in self.named_parameters() if selection == "all" or name.startswith("expert.")]

    def predict(self, x_BI: Tensor) -> Tensor:
        x = self.inputs(x_BI - self.mean)
        for layer in self.layers:
            x = layer(x)
        return self.expert(x)

    def act(self, x_BI: Tensor) -> Tensor:
        return self.predict(x_BI)

    def sft_loss(self, rows: Rows, noise_seeds: Sequence[int] = ()) -> LossSums:
        error_B = (self.predict(rows.x_BI) - rows.y_BO).float().square().mean(1)
        loss_sum = (error_B * rows.weight_B).sum()
        return LossSums(loss_sum, rows.weight_B.sum(), {"error": (error_B.detach() * rows.weight_B).sum()})


def rows(count: int = 16, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    y = torch.stack((x[:, 0] * x[:, 1], x[:, 2].sin(), x.sum(1)), 1)
    return Rows(x, y, torch.rand(count, generator=generator) + 0.5)


def loss(policy: TinyPolicy, batch: Rows) -> LossSums:
    return policy.sft_loss(batch)


def count(batch: Rows) -> float:
    return float(batch.weight_B.double().sum())


def train(engine, updates: int) -> None:
    """Updates whose batches depend on the engine's counter alone, in two micro-batches split over the ranks."""
    for _ in range(updates):
        batch, ranks, rank = rows(16, seed=100 + engine.updates), engine.world.size, engine.world.rank
        cut = 8 // ranks
        parts = [batch.cut(8 * i + cut * rank, 8 * i + cut * (rank + 1)) for i in range(2)]
        engine.forward_backward(parts, loss, count)
        engine.optim_step()
