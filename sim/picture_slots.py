"""Places for pictures in shared memory that are lent to whoever holds the pictures, so that nobody copies them out.

A pool names a free slot with each chunk; the worker draws into it; the pool hands out arrays over that memory. The slot
is free again when the last of these arrays, and of all views of them, is gone: they share one base array, and the pool
keeps a weak reference to it. When every lent slot is held, slot `COPIED` is used, whose pictures are copied out at once.
So a picture is never overwritten while somebody holds it, and no more than `SLOTS` observations of an env stay in its arena.
"""

from __future__ import annotations

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

    def __init__(self, start: int, resolution: int) -> None:
        self.shape = (resolution, resolution, 3)
        self._start = start
        self._picture_bytes = resolution * resolution * 3
        self._slot_bytes = len(VIEWS) * aligned(self._picture_bytes)
        self._bases: list[weakref.ref[np.ndarray] | None] = [None] * SLOTS
        self.end = start + SLOTS * self._slot_bytes

    def free(self) -> int:
        """A slot of which nobody holds a picture, or `COPIED`."""
        for slot in range(COPIED + 1, SLOTS):
            base = self._bases[slot]
            if base is None or base() is None:
                return slot
        return COPIED

    def write(self, arena: SharedArena, slot: int, images: Mapping[str, np.ndarray]) -> None:
        """Put pictures of `shape` into a slot."""
        base = self._base(arena, slot)
        for view, picture in images.items():
            self._picture(base, view)[:] = picture

    def read(self, arena: SharedArena, slot: int, views: Sequence[str]) -> dict[str, np.ndarray]:
        """Pictures that the other side has put into a slot: lent, or copies if the slot is `COPIED`."""
        base = self._base(arena, slot)
        images = {view: self._picture(base, view) for view in views}
        if slot == COPIED:
            return {view: picture.copy() for view, picture in images.items()}
        self._bases[slot] = weakref.ref(base)
        return images

    def poison(self, arena: SharedArena, slot: int) -> None:
        """Debug: mark a free slot as unwritten."""
        poison(self._base(arena, slot))

    def require_written(self, arena: SharedArena, slot: int, views: Sequence[str]) -> None:
        """Debug: raise PoisonError unless these views of a slot have been written."""
        base = self._base(arena, slot)
        for view in views:
            require_written(f"view {view}", self._picture(base, view))

    def _base(self, arena: SharedArena, slot: int) -> np.ndarray:
        return np.frombuffer(arena.buffer, np.uint8, self._slot_bytes, self._start + slot * self._slot_bytes)

    def _picture(self, base: np.ndarray, view: str) -> np.ndarray:
        start = VIEWS.index(view) * aligned(self._picture_bytes)
        return base[start : start + self._picture_bytes].reshape(self.shape)
