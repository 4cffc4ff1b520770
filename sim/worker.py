"""The worker process of one env: `python -m vla_rl.sim.worker`, started by `ProcessPool` and by nobody else.

It builds its env itself, answers one request at a time, and ends when its request pipe closes: also when the pool's
process was killed, and also when the env hangs at that moment. An exception of the env is sent to the pool with its
traceback (a `UserError` as its text), and ends the worker. `faulthandler` writes the Python stack into the post-mortem
file when a signal kills it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass

from vla_rl.errors import UserError
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool_state import MakeEnv
from vla_rl.sim.shared_memory import ProcessLock, SharedArena
from vla_rl.sim.wire import TOKEN, Kind, Token, Wire

CLOSE_GRACE_S = 5.0
"""Seconds a worker whose pool is gone may take to finish what it does and close its env."""


@dataclass(frozen=True)
class WorkerStart:
    """What a worker builds, pickled in its arena when it starts."""

    env: EnvConfig
    make_env: MakeEnv


@dataclass(frozen=True)
class WorkerArguments:
    """The command line: numbers, and descriptors that the worker inherits."""

    index: int
    """Of the env in its pool."""
    resolution: int
    """Pixels of a view."""
    debug_poison: int
    """0 or 1."""
    request: int
    """Tokens from the pool."""
    reply: int
    """Tokens to the pool."""
    arena: int
    post_mortem: int
    """Where `faulthandler` writes."""
    gl_lock: int
    """A `ProcessLock`, held while a GL context is created."""


def main(command_line: list[str]) -> int:
    """Serve requests until the pool closes the pipe (status 0) or the env raises (status 1)."""
    arguments = WorkerArguments(*(int(value) for value in command_line))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the watchdog ends a hung worker with SIGABRT, for its stack
    faulthandler.enable(arguments.post_mortem)
    threading.Thread(target=_end_with_pool, args=(arguments.request,), daemon=True).start()
    wire = Wire(SharedArena(arguments.arena), arguments.resolution, bool(arguments.debug_poison))
    try:
        _serve(arguments, wire)
    except BrokenPipeError:  # the pool was closed, or its process died, while the env was being made: nobody listens
        return 1
    except UserError as error:  # its text is written for the user, who is not helped by where it was raised
        os.write(arguments.reply, wire.write_pickled(Kind.RAISED, str(error)))
        return 1
    except Exception:  # noqa: BLE001 - the boundary of the process: whatever an env raises goes to the pool, with its traceback
        os.write(arguments.reply, wire.write_pickled(Kind.RAISED, traceback.format_exc()))
        return 1
    return 0


def _serve(arguments: WorkerArguments, wire: Wire) -> None:
    """Build the env, say so, answer requests. An env that raised is not closed: it may hang, and the process ends anyway."""
    start: WorkerStart = pickle.loads(memoryview(wire.arena.buffer)[wire.payload :])
    env = start.make_env(start.env, wire.preempt_requested, arguments.index, ProcessLock(arguments.gl_lock).held())
    os.write(arguments.reply, wire.write_pickled(Kind.STARTED, env.spec))
    while message := os.read(arguments.request, TOKEN.size):
        token = Token(*TOKEN.unpack(message))
        if token.kind == Kind.CLOSE:
            break
        if token.kind == Kind.STEP:
            answer = wire.write_chunk(env.step_chunk(*wire.read_step(token)))
        else:
            answer = wire.write_pickled(Kind.PICKLED, env.reset(*wire.read_pickled(token)))
        os.write(arguments.reply, answer)
    env.close()


def _end_with_pool(request: int) -> None:
    """End this process when the pool's end of the pipe is gone for longer than a clean end takes (an env may hang)."""
    poll = select.poll()
    poll.register(request, 0)
    poll.poll()
    time.sleep(CLOSE_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
