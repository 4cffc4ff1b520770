"""Settings and fixtures that hold for every test."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from hypothesis import settings

os.environ.setdefault("MUJOCO_GL", "egl")  # robosuite reads it once, at its first import in the process

settings.register_profile("busy", deadline=None)  # a busy machine is no wrong answer
settings.load_profile("busy")


@pytest.fixture
def files_of_4_kib() -> Callable[[], AbstractContextManager[None]]:
    """`with files_of_4_kib():` the kernel refuses to grow a file beyond 4 KiB, as a full disk or a quota does (EFBIG in place of ENOSPC).

    Not for longer than the block: pytest's own output may be a file.
    """

    @contextmanager
    def limit() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limit
