"""How two sets of weights, their versions and their digests lie in one shared block."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from vla_rl.sim.shared_memory import SharedArena, aligned
from vla_rl.weights.digest import DIGEST_BYTES, bytes_of
from vla_rl.weights.layout import WeightLayout

HEADER_WORDS = 8
"""int64: the front buffer, the version of each buffer, whether each has digests."""


COPY_THREADS = min(4, len(os.sched_getaffinity(0)))
"""One core does not use up the memory's bandwidth; more than a few gain nothing."""


class WeightBlock:
    """Views into an arena of `block_size(layout)` bytes: a header, digests, and two buffers that start on a page each."""

    def __init__(self, arena: SharedArena, layout: WeightLayout) -> None:
        count = len(layout.synced)
        header = arena.array(0, (HEADER_WORDS,), np.int64)
        self.front = header[0:1]
        """int64[1]: the buffer that workers take; -1 before the first push."""
        self.versions = header[1:3]
        """int64[2]: the version that each buffer holds whole; -1 while it is being written."""
        self.has_digests = header[3:5]
        """int64[2]: whether the trainer left digests of that version."""
        self.digests = arena.array(8 * HEADER_WORDS, (2, count, DIGEST_BYTES), np.uint8)
        """uint8[2, tensors, 32]."""
        starts = (_digests_end(layout), _digests_end(layout) + _pages(layout.nbytes))
        self._bytes = [arena.array(start, (layout.nbytes,), np.uint8) for start in starts]
        self.tensors = [
            [_view(block, offset, entry.nbytes).view(entry.dtype).view(entry.shape) for entry, offset in zip(layout.synced, layout.offsets)]
            for block in self._bytes
        ]
        """The tensors of each buffer, in the order of the layout."""

    def touch(self) -> None:
        """Map every page into this process by reading, so that a trainer may be writing meanwhile."""
        for block in self._bytes:
            block[:: mmap.PAGESIZE].max(initial=0)


def block_size(layout: WeightLayout) -> int:
    """Bytes of the whole block."""
    return _digests_end(layout) + 2 * _pages(layout.nbytes)


class Copiers:
    """Threads that copy tensors beside who gathers them. Copying lets go of the interpreter."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="weights")

    def write_all(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`write` each (target, source); all are written when this returns, or raises what `pairs` or a copy raised.

        At most two sources per thread wait, so that gathered tensors do not pile up.
        """
        running: deque[Future[None]] = deque()
        try:
            for target, source in pairs:
                running.append(self._threads.submit(write, target, source))
                if len(running) > 2 * COPY_THREADS:
                    running.popleft().result()
        finally:
            wait(running)  # also where one failed: nobody writes into the buffer after this
        for copy in running:
            copy.result()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._threads.shutdown()


def write(target: Tensor, source: Tensor) -> None:
    """Copy `source` into a contiguous `target`, which keeps its dtype and device.

    Equal dtypes in host memory go through memcpy, which for large blocks writes past the caches; torch's copy reads the target first.
    """
    in_host_memory = target.device.type == source.device.type == "cpu"
    if in_host_memory and target.dtype == source.dtype and source.is_contiguous():
        np.copyto(bytes_of(target).numpy(), bytes_of(source).numpy())
    else:
        target.detach().copy_(source)


def _view(block: np.ndarray, offset: int, nbytes: int) -> Tensor:
    return torch.from_numpy(block[offset : offset + nbytes])


def _digests_end(layout: WeightLayout) -> int:
    return _pages(8 * HEADER_WORDS + aligned(2 * len(layout.synced) * DIGEST_BYTES))


def _pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
