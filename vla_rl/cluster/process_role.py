"""A role in a process of its own: makes its object, answers calls one after the other, and ends when its driver does."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from vla_rl.cluster.backend import Sealed
from vla_rl.cluster.liveness import beat_for_ever
from vla_rl.cluster.wire import Raised, pack
from vla_rl.process import end_process
from vla_rl.telemetry.pulse import mark_progress
from vla_rl.telemetry.spans import open_span_log, write_spans

CLOSE = "close"
"""The method whose call ends the process."""
GRACE_S = 10.0
"""How long a role may take to end by itself when it is asked to."""
ORPHAN_GRACE_S = 1.0
"""The same when its driver is gone: nobody will read what it makes."""


@dataclass(frozen=True)
class Surroundings:
    """What a role's process sets up before its object is made."""

    role: str
    log: Path
    """Gets everything that the process prints."""
    spans: Path | None
    """Gets its spans."""
    torch_threads: int
    environment: dict[str, str]
    """Variables to set."""
    pulse: str
    """Where it counts its signs of life (`liveness.Pulse`)."""


def serve(calls: Connection, driver: int, surroundings: Surroundings, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The life of the process. `driver` is the process that holds the other end of `calls`."""
    _settle_in(surroundings)
    threading.Thread(target=_end_with_driver, args=(calls.fileno(),), daemon=True).start()
    try:
        role = _answer(calls, driver, surroundings.role, lambda: (make(*arguments), None))
        while role is not None and _serve_one(calls, driver, surroundings.role, role):
            pass
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody is there to be answered
        end_process(1)
    end_process(0)


def _serve_one(calls: Connection, driver: int, name: str, role: Any) -> bool:
    """Answer one call; False if it was the last one."""
    method, arguments = pickle.loads(calls.recv_bytes())
    mark_progress()
    value = getattr(role, method)
    _answer(calls, driver, name, lambda: (role, value(*arguments)))
    return method != CLOSE


def _answer(calls: Connection, driver: int, name: str, work: Callable[[], tuple[Any, Any]]) -> Any:
    """Send what `work` answers (the second of its pair), or raised; returns the first, or None where it raised."""
    try:
        kept, value = work()
        write_spans()
        arena = pack(value.payload, f"vla-rl-parcel-{name}") if isinstance(value, Sealed) else None
        message = pickle.dumps(value.value if isinstance(value, Sealed) else value)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the driver gets whatever a role raises
        calls.send_bytes(b"E" + pickle.dumps(Raised.of(error)))
        return None
    calls.send_bytes((b"V" if arena is None else b"P") + message)
    if arena is not None:
        send_handle(calls, arena.fd, driver)
        arena.close()
    return kept


def _settle_in(surroundings: Surroundings) -> None:
    os.environ.update(surroundings.environment)
    allow_many_files()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the watch ends a dead-locked role with SIGABRT, for its stack
    surroundings.log.parent.mkdir(parents=True, exist_ok=True)
    with open(surroundings.log, "ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process of the terminal, and the driver decides
    import torch

    torch.set_num_threads(surroundings.torch_threads)
    beat_for_ever(surroundings.pulse)
    open_span_log(surroundings.spans, surroundings.role)


def allow_many_files() -> None:
    """Every parcel is an open file, in the driver and where it is mapped: use as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_driver(descriptor: int) -> None:
    """End this process soon after the driver's end of the pipe is gone, also where a role computes or hangs."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)
