"""The two ways to look at a sharded tensor."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory, without gradient; any other tensor as it is."""
    tensor = tensor.detach()
    return cast(Tensor, tensor.to_local()) if isinstance(tensor, DTensor) else tensor
