"""The two ways to look at a sharded tensor."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective); any other tensor as it is. May share memory with the tensor.

    Shards that were offloaded to host memory go back to the device first: its ranks talk through the device. A rank that is alone holds
    the whole already, and DTensor's way through a collective of one would take longer than copying a small tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return cast(Tensor, tensor.to_local())
    on_device = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return on_device.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory, without gradient; any other tensor as it is."""
    tensor = tensor.detach()
    return cast(Tensor, tensor.to_local()) if isinstance(tensor, DTensor) else tensor
