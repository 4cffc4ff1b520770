"""Arenas, the lock and the poison."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.sim.shared_memory import POISON, PoisonError, ProcessLock, SharedArena, aligned, poison, require_written


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_aligned(size: int, expected: int) -> None:
    assert aligned(size) == expected


def test_another_process_reads_and_writes_the_arena() -> None:
    arena = SharedArena.create(1000)
    arena.array(64, (3,), np.int64)[:] = [1, 2, 3]
    child = """
import sys
import numpy as np
from vla_rl.sim.shared_memory import SharedArena
arena = SharedArena.attach(sys.argv[1])
arena.array(128, (3,), np.int64)[:] = 10 * arena.array(64, (3,), np.int64)
"""
    subprocess.run([sys.executable, "-c", child, arena.path], check=True, timeout=60)
    assert arena.array(128, (3,), np.int64).tolist() == [10, 20, 30]


def test_the_other_side_follows_an_enlargement_and_old_arrays_stay_valid() -> None:
    first = SharedArena.create(mmap.PAGESIZE)
    second = SharedArena(os.dup(first.fd))
    before = second.array(0, (4,), np.uint8)
    assert first.ensure(10 * mmap.PAGESIZE) and not first.ensure(10 * mmap.PAGESIZE)
    first.array(9 * mmap.PAGESIZE, (1,), np.uint8)[0] = 7
    first.array(0, (1,), np.uint8)[0] = 5
    with pytest.raises(ValueError, match="buffer"):
        second.array(9 * mmap.PAGESIZE, (1,), np.uint8)
    assert second.remap() and not second.remap()
    assert second.array(9 * mmap.PAGESIZE, (1,), np.uint8)[0] == 7
    assert before[0] == 5


def test_prefault_maps_every_page_and_changes_nothing() -> None:
    arena = SharedArena.create(64 * mmap.PAGESIZE)
    arena.array(0, (arena.size,), np.uint8)[:] = np.arange(arena.size) % 251
    other = SharedArena(os.dup(arena.fd))
    before = _resident_kib(arena.fd)
    other.prefault()
    assert _resident_kib(arena.fd) - before >= 64 * mmap.PAGESIZE // 1024 - 4  # the 4 KiB: a page that was touched before
    assert np.array_equal(other.array(0, (other.size,), np.uint8), np.arange(arena.size) % 251)


def _resident_kib(fd: int) -> int:
    """Resident KiB of all mappings of a memory file in this process."""
    inode, total, ours = str(os.fstat(fd).st_ino), 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            fields = line.split()
            if "-" in fields[0] and not fields[0].endswith(":"):
                ours = fields[4] == inode
            elif ours and fields[0] == "Rss:":
                total += int(fields[1])
    return total


def test_an_arena_has_no_name_and_close_is_idempotent() -> None:
    arena = SharedArena.create(100)
    kept = arena.array(0, (8,), np.uint8)
    path = arena.path
    arena.close()
    arena.close()
    kept[:] = 3
    assert kept.tolist() == [3] * 8
    with pytest.raises(FileNotFoundError):
        SharedArena.attach(path)


def test_the_lock_excludes_and_dies_with_its_holder() -> None:
    lock = ProcessLock.create()
    child = """
import sys
from vla_rl.sim.shared_memory import ProcessLock
with ProcessLock(int(sys.argv[1])).held():
    print("held", flush=True)
    input()
"""
    command = [sys.executable, "-c", child, str(lock.fd)]
    with subprocess.Popen(command, pass_fds=[lock.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            fcntl.lockf(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.kill()
        with lock.held():
            assert holder.wait() == -signal.SIGKILL
    lock.close()
    lock.close()


@given(st.integers(0, 200), st.integers(0, 24))
def test_poison_is_found_exactly_where_nobody_wrote(written: int, word: int) -> None:
    arena = SharedArena.create(mmap.PAGESIZE)
    poison(arena.array(0, (arena.size,), np.uint8))
    block = arena.array(0, (200,), np.uint8)
    block[:written] = 1
    block[8 * word : 8 * word + 1] = 1
    untouched = [w for w in range(25) if 8 * w >= written and w != word]
    if untouched:
        with pytest.raises(PoisonError, match=f"picture .* {8 * len(untouched)} of 200 bytes"):
            require_written("picture", block)
    else:
        require_written("picture", block)
    assert int(arena.array(mmap.PAGESIZE - 8, (1,), np.uint64)[0]) == int(POISON)
