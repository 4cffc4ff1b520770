"""Ctrl-C once, twice, and while something else has the word."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from vla_rl.phases.interrupt import INTERRUPTED, Interrupt


def interrupt_self() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_only_asks() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        interrupt_self()
        assert interrupt.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_one_keypress_may_arrive_twice() -> None:
    with Interrupt() as interrupt:
        interrupt_self()
        interrupt_self()
        assert interrupt.requested


def test_a_long_block_is_broken_off_and_training_may_still_save() -> None:
    reached = []
    with Interrupt() as interrupt:
        with interrupt.breaking():
            interrupt_self()
            time.sleep(60)
            reached.append("the end of the block")
        assert interrupt.requested
        assert reached == []
        interrupt_self()  # the same keypress


def test_a_block_that_swallows_it_and_fails_is_broken_off_too() -> None:
    """As libraries do that guard their imports; an error without Ctrl-C stays one."""
    with Interrupt() as interrupt:
        with pytest.raises(ImportError), interrupt.breaking():
            raise ImportError
        assert not interrupt.requested
        with interrupt.breaking():
            with contextlib.suppress(KeyboardInterrupt):
                interrupt_self()
                time.sleep(60)
            raise ImportError("partially initialized module")
        assert interrupt.requested


@pytest.mark.faults
def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    code = """
import signal
from vla_rl.phases import interrupt
interrupt.SAME_KEYPRESS_S = 0.0
with interrupt.Interrupt() as asked:
    print("ready", flush=True)
    while not asked.requested:
        signal.pause()
    print("requested", flush=True)
    while True:
        signal.pause()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "requested\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == INTERRUPTED
    assert "Ctrl-C again ends at once" in child.stderr.read()
