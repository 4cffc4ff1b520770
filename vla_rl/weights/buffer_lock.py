"""Many readers or one writer, between processes, and the kernel lets go for whoever dies.

`flock` belongs to the open file, not to the process, so two attachments in one process exclude each other too. Taking and releasing it
orders memory between the two sides, on every processor.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 2e-3
"""`flock` has no deadline, so a taken lock is asked for again after pauses that double up to this."""


class BufferLock:
    """One attachment to a lock. Holds it shared, exclusively, or not at all."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> BufferLock:
        """A new lock, free."""
        return cls(os.memfd_create("vla-rl-weights-lock"))

    @classmethod
    def attach(cls, path: str) -> BufferLock:
        """Another attachment to the lock behind `path`."""
        return cls(os.open(path, os.O_RDWR))

    @property
    def path(self) -> str:
        """How a process of the same user attaches while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def take(self, shared: bool, deadline_s: float) -> bool:
        """Take the lock, shared with other readers or alone; False if somebody else had it for all of `deadline_s`."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        ends, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(self.fd, kind)
                return True
            except BlockingIOError:
                if time.monotonic() >= ends:
                    return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def release(self) -> None:
        """Let go; does nothing where it is not held."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def holders(self) -> list[int]:
        """Process ids of those who hold it now, from the kernel's table."""
        inode = str(os.fstat(self.fd).st_ino)
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]

    def close(self) -> None:
        """Give it back; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
