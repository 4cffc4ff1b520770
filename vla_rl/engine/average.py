"""An exponential moving average of the weights that learn, shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vla_rl.engine.tensors import local_tensor


class WeightAverage:
    """average <- d_n * average + (1 - d_n) * weights after update n, with d_n = min(decay, (1 + n) / (10 + n)).

    The decay grows (TensorFlow's `ExponentialMovingAverage` with `num_updates`), so that a training shorter than 1 / (1 - decay) updates
    does not end with an average of mostly untrained weights.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.values: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in weights.items()}
        """The average by parameter name, sharded like the parameter."""

    @torch.no_grad()
    def update(self, weights: Mapping[str, nn.Parameter], updates: int) -> None:
        """Take in the weights after update number `updates`, counted from 1."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        for name, weight in weights.items():
            local_tensor(self.values[name]).lerp_(local_tensor(weight), 1.0 - decay)

    @contextmanager
    def swapped_into(self, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Exchange the weights and the average inside the block."""
        self._exchange(weights)
        try:
            yield
        finally:
            self._exchange(weights)

    @torch.no_grad()
    def _exchange(self, weights: Mapping[str, nn.Parameter]) -> None:
        for name, weight in weights.items():
            here, average = local_tensor(weight), local_tensor(self.values[name])
            held = here.clone()
            here.copy_(average)
            average.copy_(held)
