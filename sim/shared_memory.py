"""Anonymous shared memory between processes, a lock that dies with its holder, and poison.

An arena is a memory file (`memfd_create`): it has no name, so the kernel frees it with its last holder and
nothing is left behind, however a process dies; and it does not count against the size of `/dev/shm`.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""Bytes; every array in an arena starts at a multiple of it (a cache line)."""
POISON = np.uint64(0xC3_5A_96_F1_0B_E7_2D_A8)
"""The word with which debug mode fills memory that nobody has written yet."""


def aligned(size: int) -> int:
    """`size` (bytes) rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class SharedArena:
    """A block of shared memory that both sides map, and that either side can enlarge while it is the other's turn to wait.

    Pages are allocated at once, so that a lack of memory is an OSError here and not a SIGBUS in the middle of a copy.
    The creator hands `fd` to a child process (`pass_fds`) or `path` to any process of the same user.
    Arrays made by `array` share the memory and keep it mapped; they are not copies. They stay valid when it is enlarged,
    because a new mapping shows the same pages.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map()

    @classmethod
    def create(cls, size: int, name: str = "vla-rl") -> SharedArena:
        """A new zero-filled arena of at least `size` bytes; `name` shows in `/proc/PID/maps`.

        Raises OSError when the memory is not there.
        """
        fd = os.memfd_create(name)
        os.posix_fallocate(fd, 0, _page_multiple(size))
        return cls(fd)

    @classmethod
    def attach(cls, path: str) -> SharedArena:
        """The arena behind `path` of another process; it must still be open there.

        Raises FileNotFoundError when it is not.
        """
        return cls(os.open(path, os.O_RDWR))

    @property
    def path(self) -> str:
        """How any process of the same user can `attach` it while this one keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """A writable array in the arena at `offset` (bytes). Raises ValueError where it does not fit."""
        return np.frombuffer(self.buffer, dtype, math.prod(shape), offset).reshape(shape)

    def ensure(self, size: int) -> bool:
        """Enlarge the arena to at least `size` bytes; True if the mapping changed. Raises OSError when memory is short."""
        if size <= self.size:
            return False
        os.posix_fallocate(self.fd, 0, _page_multiple(max(size, 2 * self.size)))
        return self.remap()

    def remap(self) -> bool:
        """Follow an enlargement by the other side; True if the mapping changed."""
        if os.fstat(self.fd).st_size == self.size:
            return False
        self._map()
        return True

    def prefault(self) -> None:
        """Map every page into this process now, so that later copies run at memory speed; nobody may be writing meanwhile."""
        first_bytes = self.array(0, (self.size,), np.uint8)[:: mmap.PAGESIZE]
        first_bytes |= 0

    def close(self) -> None:
        """Give the file back; the mapping goes with the last array in it. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self) -> None:
        self.size = os.fstat(self.fd).st_size
        """Mapped bytes."""
        self.buffer = mmap.mmap(self.fd, self.size)
        """The mapped bytes."""


def _page_multiple(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


class ProcessLock:
    """Mutual exclusion between processes that the kernel releases when the holder dies (a POSIX record lock)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> ProcessLock:
        """A new lock; hand its `fd` to child processes."""
        return cls(os.memfd_create("vla-rl-lock"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock, and hold it inside the block. Not for threads, and not nested: the owner is the process."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the file back; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PoisonError(AssertionError):
    """Memory was read that nobody had written."""


def poison(block: np.ndarray) -> None:
    """Fill a contiguous array with `POISON`, up to its last whole word."""
    block.reshape(-1).view(np.uint8)[: block.nbytes // 8 * 8].view(np.uint64)[:] = POISON


def require_written(name: str, array: np.ndarray) -> None:
    """Raise PoisonError if an aligned word of a contiguous `array` is still `POISON`: `name` was not written there."""
    words = array.reshape(-1).view(np.uint8)[: array.nbytes // 8 * 8].view(np.uint64)
    unwritten = int(np.count_nonzero(words == POISON))
    if unwritten:
        raise PoisonError(
            f"{name} {array.shape} {array.dtype}: {8 * unwritten} of {array.nbytes} bytes were read before anybody wrote them"
        )
