"""How a process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATE_THREAD = """
import atexit, sys, threading
from vla_rl.process import end_process

def count():  # one write each: print() writes the line end separately, and another thread's text may come between
    sys.stdout.write("thread ")
    sys.stdout.flush()

atexit.register(lambda: sys.stdout.write("exit handler "))
threading.Thread(target=count).start()
sys.stdout.write("unflushed ")
end_process({status})
"""


@pytest.mark.parametrize("status", [0, 2])
def test_threads_handlers_buffers_and_status_are_kept(status: int) -> None:
    done = subprocess.run([sys.executable, "-c", LATE_THREAD.format(status=status)], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert sorted(done.stdout.split()) == ["exit", "handler", "thread", "unflushed"]


def test_the_interpreter_is_not_finalized() -> None:
    """Finalization is what aborts a process whose gloo threads still hold tensors: a daemon thread in a destructor never gets to see it."""
    witness = "class Witness:\n    def __del__(self):\n        print('finalized', flush=True)\n\nwitness = Witness()\n"
    ended = subprocess.run([sys.executable, "-c", witness], capture_output=True, text=True, check=True)
    assert ended.stdout == "finalized\n"
    code = witness + "from vla_rl.process import end_process\nend_process(0)\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == ""
