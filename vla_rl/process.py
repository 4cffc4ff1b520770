"""How a process of ours ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


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
