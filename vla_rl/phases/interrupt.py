"""Ctrl-C: the first one asks a phase to end with a checkpoint, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vla_rl.process import INTERRUPTED, ctrl_c_leaves_a_mark

__all__ = ["INTERRUPTED", "Interrupt"]
SAME_KEYPRESS_S = 1.0
"""Two SIGINTs this close are one Ctrl-C: torchrun passes on what the terminal has already sent to every process."""


class Interrupt:
    """Between `with Interrupt() as interrupt:` and its end, SIGINT and SIGTERM only set `requested`."""

    def __init__(self) -> None:
        self.requested = False
        """Whether the phase shall end after the update it is in."""
        self._first_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Inside, Ctrl-C breaks off the block at once (as KeyboardInterrupt would) and counts as the first one."""
        with ctrl_c_leaves_a_mark() as pressed:
            try:
                yield
            except KeyboardInterrupt:
                self._request()
            except Exception:
                if not pressed:
                    raise
                self._request()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested and time.monotonic() - self._first_s > SAME_KEYPRESS_S
        if again and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        if not self.requested:
            self._request()

    def _request(self) -> None:
        self.requested = True
        self._first_s = time.monotonic()
        os.write(2, b"\ninterrupted: this update ends, then a checkpoint is written; Ctrl-C again ends at once\n")
