"""How a process of ours ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C (128 + SIGINT), as shells report it."""


@contextmanager
def ctrl_c_leaves_a_mark() -> Iterator[list[int]]:
    """Inside, Ctrl-C raises KeyboardInterrupt as by default, and adds to the list.

    Libraries that guard their imports swallow the exception, and fail later with another one (a "circular import"); the mark tells why.
    """
    pressed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def end_process(status: int) -> NoReturn:
    """End this process with a status: wait for threads, run the exit handlers, flush, and skip the interpreter's finalization.

    A thread of gloo that drops the tensors of the last collective asks for the interpreter's lock. When finalization has begun,
    CPython 3.12 ends such a thread inside its C++ destructor, which aborts the process (SIGABRT): about one trainer rank in ten died so
    after a training that had succeeded. The steps are those by which `multiprocessing` ends the processes that it forks.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
