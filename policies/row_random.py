"""Random numbers of foreign code, row by row: what a row of a batch draws depends on its own seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STANDARD_NORMAL: tuple[Callable[..., Tensor], ...] = (torch.randn, torch.randn_like)
"""Functions whose numbers are standard normal."""


class RowRandom(TorchFunctionMode):
    """Inside the block, `torch.randn`, `torch.randn_like` and a standard `torch.normal` draw row b from `seeds[b]`.

    Numbers are drawn on the CPU, so that they are the same on every device. The first dimension of what is drawn must be the batch;
    raises RuntimeError for anything else that is random, because it would make a row depend on the rest of the batch.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the numbers of random functions, pass everything else on."""
        named = dict(named or {})
        result = function(*arguments, **named)
        if function in STANDARD_NORMAL:
            return self._drawn(result)
        if function is torch.normal:
            if (named.get("mean", 0.0), named.get("std", 1.0)) != (0.0, 1.0) or arguments:
                raise RuntimeError("torch.normal with another mean or spread than 0 and 1 cannot be drawn row by row")
            return self._drawn(result)
        return result

    def _drawn(self, like: Tensor) -> Tensor:
        if not like.ndim or len(like) != len(self._generators):
            raise RuntimeError(f"random numbers of shape {list(like.shape)} are not one row for each of {len(self._generators)} seeds")
        rows = [torch.randn(like.shape[1:], generator=generator, dtype=torch.float32) for generator in self._generators]
        return torch.stack(rows).to(like)
