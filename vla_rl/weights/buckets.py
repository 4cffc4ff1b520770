"""A flat space of bytes that crosses a process group in buckets of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from vla_rl.weights.errors import WeightSyncError

BUCKET_BYTES = 64 << 20
"""Large enough to hide a broadcast's latency, small enough that packing and sending overlap."""

Backend = Literal["gloo", "nccl"]


class BucketChannel:
    """Member 0 sends, the others receive. Two pieces of memory take turns: bucket k lies in piece k % 2."""

    def __init__(self, group: Any, total_bytes: int, bucket_bytes: int, device: torch.device) -> None:
        self.bucket_bytes = min(bucket_bytes, total_bytes)
        """Bytes of a bucket; the last one may be shorter."""
        self.count = -(-total_bytes // self.bucket_bytes)
        """Buckets in the flat space."""
        self._group, self._device, self._total = group, device, total_bytes
        self._memory = [torch.zeros(self.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._works: list[Any] = [None, None]
        self._current = 0

    def memory(self, bucket: int) -> Tensor:
        """uint8[<= bucket_bytes]: where this bucket lies while it is its turn."""
        return self._memory[bucket % 2][: min(self.bucket_bytes, self._total - bucket * self.bucket_bytes)]

    def begin(self) -> None:
        """Start again at bucket 0."""
        self._works, self._current = [None, None], -1 if self._group.rank() else 0
        if self._group.rank():
            self._start(0)

    def leave_before(self, bucket: int) -> None:
        """Sender: send every bucket before this one, and wait until its memory is free."""
        while self._current < bucket:
            self._start(self._current)
            self._current += 1
            self._wait(self._current)

    def finish(self) -> None:
        """Sender: send what is left and wait for all of it."""
        self.leave_before(self.count)
        self._wait(self.count - 1)

    def arrive_up_to(self, bucket: int) -> None:
        """Receiver: wait for this bucket and have the next one come; those before it must have been unpacked."""
        while self._current < bucket:
            self._current += 1
            self._wait(self._current)
            if self._current + 1 < self.count:
                self._start(self._current + 1)

    def send(self, tensor: Tensor) -> None:
        """Sender: a small tensor, at once."""
        self.receive(tensor)

    def receive(self, tensor: Tensor) -> Tensor:
        """Receiver: member 0's tensor of this shape and dtype."""
        tensor = tensor.to(self._device)
        with losses():
            self._group.broadcast(tensor, 0).wait()
        return tensor

    def _start(self, bucket: int) -> None:
        with losses():
            self._works[bucket % 2] = self._group.broadcast(self.memory(bucket), 0)

    def _wait(self, bucket: int) -> None:
        work, self._works[bucket % 2] = self._works[bucket % 2], None
        if work is not None:
            with losses():
                work.wait()


def pieces(offset: int, length: int, bucket_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Where the bytes [offset, offset + length) of the flat space lie: (bucket, slice of the bucket, slice of the bytes)."""
    done = 0
    while done < length:
        bucket, inside = divmod(offset + done, bucket_bytes)
        size = min(bucket_bytes - inside, length - done)
        yield bucket, slice(inside, inside + size), slice(done, done + size)
        done += size


def open_group(backend: Backend, store: Store, rank: int, size: int, deadline_s: float) -> Any:
    """A process group apart from torch's default one, so that trainer ranks outside it need not take part."""
    arguments: tuple[Any, ...] = (PrefixStore("weights", store), rank, size, timedelta(seconds=deadline_s))
    with losses():
        return dist.ProcessGroupNCCL(*arguments) if backend == "nccl" else ProcessGroupGloo(*arguments)


def wait_for(store: Store, key: str, who: str) -> bytes:
    """What `who` writes into the store. Raises WeightSyncError where it does not within the store's timeout."""
    try:
        return store.get(key)
    except RuntimeError as error:
        raise WeightSyncError(f"{who} did not come to the weight sync: {error}") from error


@contextmanager
def losses() -> Iterator[None]:
    """Turn the group's errors into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"a member of the weight sync was lost; connect all members again over a new store: {error}") from error
