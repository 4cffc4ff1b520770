"""What crosses between a driver and its roles: calls, answers, errors; and parcels in shared memory.

A parcel is a pickle whose arrays lie behind it in one memory file, each at a multiple of 64 bytes, so that a reader maps them and copies
nothing. The file has no name: it goes with its last holder, however a process dies.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.cluster.errors import RoleFailed, RoleName
from vla_rl.sim.shared_memory import SharedArena, aligned


@dataclass(frozen=True)
class Raised:
    """A role's error as it travels."""

    pickled: bytes
    """The exception; empty where it has no pickle."""
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """An error with the traceback of where it was raised."""
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except (pickle.PicklingError, TypeError, AttributeError):
            pickled = b""
        return cls(pickled, "".join(traceback.format_exception(error)))

    def error(self, name: RoleName) -> BaseException:
        """The exception to raise in the driver, with a note that names the role and shows where it was raised."""
        if not self.pickled:
            return RoleFailed(name, self.trace)
        error: BaseException = pickle.loads(self.pickled)
        error.add_note(f"raised by {name}:\n{self.trace}")
        return error


def pack(payload: Any, name: str) -> SharedArena:
    """`payload` in a new memory file. Raises OSError when the memory is not there."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    table = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
    offsets = _offsets(table.nbytes, table[1:].tolist())
    arena = SharedArena.create(offsets[-1], name)
    arena.array(0, table.shape, np.int64)[:] = table
    for part, offset in zip(parts, offsets):
        arena.array(offset, (part.nbytes,), np.uint8)[:] = np.frombuffer(part, np.uint8)
    return arena


def unpack(arena: SharedArena) -> Any:
    """What `pack` was given; its arrays share the arena's memory and keep it mapped."""
    count = int(arena.array(0, (1,), np.int64)[0])
    table = arena.array(0, (count + 1,), np.int64)
    offsets = _offsets(table.nbytes, table[1:].tolist())
    parts = [arena.array(offset, (size,), np.uint8).data for offset, size in zip(offsets, table[1:].tolist())]
    return pickle.loads(parts[0], buffers=parts[1:])


def _offsets(start: int, sizes: Sequence[int]) -> list[int]:
    """Where each part begins, and the end of the last."""
    offsets = [aligned(start)]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size))
    return offsets


class ArenaParcel:
    """A parcel in a memory file, which this process (the driver) holds open; others reach it through this process."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena: SharedArena | None = arena

    def fetch(self) -> Any:
        """See `Parcel.fetch`."""
        return unpack(self._held())

    def release(self) -> None:
        """See `Parcel.release`; the mapping goes with the last array in it."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _held(self) -> SharedArena:
        if self._arena is None:
            raise ValueError("a parcel was asked for after it was released")
        return self._arena

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._held().path,)


def _attach(path: str) -> ArenaParcel:
    arena = SharedArena.attach(path)
    arena.close()  # the mapping stays
    return ArenaParcel(arena)
