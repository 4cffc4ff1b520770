"""Places for pictures in shared memory that are lent to whoever holds the pictures, so that nobody copies them out.

A pool names a free slot with each chunk; the worker draws into it; the pool hands out arrays over that memory. The slot
is free again when the last of these arrays, and of all views of them, is gone: they share one base array, and the pool
keeps a weak reference to it. When every lent slot is held, slot `COPIED` is used, whose pictures are copied out at once.
So a picture is never overwritten while somebody holds it, and no more than `SLOTS` observations of an env stay in its arena.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from vla_rl.episode import VIEWS
from vla_rl.sim.shared_memory import SharedArena, aligned, poison, require_written

SLOTS = 4
COPIED = 0
"""The slot that is never lent."""


class PictureSlots:
    """`SLOTS` places for both views of an observation, from byte `start` of an arena on; each side of a pipe has one."""

    def __init__(self, arena: SharedArena, start: int, resolution: int) -> None:
        self.shape = (resolution, resolution, 3)
        size = aligned(math.prod(self.shape))
        self._index: dict[str, int] = {view: index for index, view in enumerate(VIEWS)}
        self._shape_VHW3 = (len(VIEWS), *self.shape)
        self._strides_VHW3 = (size, 3 * resolution, 3, 1)
        self._slot_bytes = len(VIEWS) * size
        self._start = start
        self.end = start + SLOTS * self._slot_bytes
        arena.ensure(self.end)
        self._buffer = arena.buffer
        self._places: list[dict[str, np.ndarray]] = [dict(zip(VIEWS, self._pictures(slot))) for slot in range(SLOTS)]
        self._lent: list[weakref.ref[np.ndarray] | None] = [None] * SLOTS

    def free(self) -> int:
        """A slot of which nobody holds a picture, or `COPIED`."""
        for slot in range(COPIED + 1, SLOTS):
            base = self._lent[slot]
            if base is None or base() is None:
                return slot
        return COPIED

    def write(self, slot: int, images: Mapping[str, np.ndarray]) -> None:
        """Put pictures of `shape` into a slot."""
        places = self._places[slot]
        for view, picture in images.items():
            places[view][:] = picture

    def read(self, slot: int, views: Sequence[str]) -> dict[str, np.ndarray]:
        """Pictures that the other side has put into a slot: lent, or copies if the slot is `COPIED`."""
        if slot == COPIED:
            return {view: self._places[slot][view].copy() for view in views}
        base_VHW3 = self._pictures(slot)
        self._lent[slot] = weakref.ref(base_VHW3)
        return {view: base_VHW3[self._index[view]] for view in views}

    def poison(self, slot: int) -> None:
        """Debug: mark a free slot as unwritten."""
        poison(np.frombuffer(self._buffer, np.uint8, self._slot_bytes, self._start + slot * self._slot_bytes))

    def require_written(self, slot: int, views: Sequence[str]) -> None:
        """Debug: raise PoisonError unless these views of a slot have been written."""
        for view in views:
            require_written(f"view {view}", self._places[slot][view])

    def _pictures(self, slot: int) -> np.ndarray:
        """uint8[V, H, W, 3]: the pictures of a slot, each at a multiple of a cache line."""
        return np.ndarray(self._shape_VHW3, np.uint8, self._buffer, self._start + slot * self._slot_bytes, self._strides_VHW3)
