"""Free the device of what only the optimizer needs, while a rollout on the same device needs the room."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vla_rl.engine.engine import Engine
from vla_rl.engine.tensors import local_tensor


class Offload:
    """Moves an engine's moments (and average) between its device and host memory, in place: no tensor is replaced.

    A moment that is away has an empty storage. On a CPU the same happens between two places in host memory: nothing is won, and
    everything is tested.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._away: list[tuple[Tensor, Tensor]] = []

    def leave(self) -> int:
        """Copy to host memory and free the device's; returns the bytes freed. Gradients, if any are left, are dropped."""
        if self._away:
            return 0
        self._engine.optimizer.zero_grad(set_to_none=True)
        pin = self._engine.world.device.type == "cuda"
        for tensor in list(self._movable()):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            host.copy_(tensor)
            tensor.untyped_storage().resize_(0)
            self._away.append((tensor, host))
        return sum(host.numel() * host.element_size() for _, host in self._away)

    def come_back(self) -> None:
        """Allocate on the device again and copy back; does nothing where nothing is away."""
        for tensor, host in self._away:
            tensor.untyped_storage().resize_(host.numel() * host.element_size())
            tensor.copy_(host)
        self._away.clear()

    def _movable(self) -> Iterator[Tensor]:
        """This rank's shards of the moments and the average that lie on the device, each with a storage of its own."""
        device = self._engine.world.device
        moments = [value for state in self._engine.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        average = [] if self._engine.average is None else list(self._engine.average.values.values())
        for value in (*moments, *average):
            tensor = local_tensor(value)
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            if tensor.device == device and tensor.ndim > 0 and whole:
                yield tensor
