"""Envs in worker processes: first-ready replies, a deadline for every wait, and workers that are replaced when they fail."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, Literal

from vla_rl.episode import ActionChunk, EpisodeSpec
from vla_rl.sim.base import EnvConfig, EnvFault, EnvReply, EnvSpec, Look
from vla_rl.sim.pool_state import EnvState, EpisodeProtocol, MakeEnv, PoolConfig, PoolStartError, require_env
from vla_rl.sim.shared_memory import ProcessLock, SharedArena
from vla_rl.sim.wire import TOKEN, Kind, Token, Wire
from vla_rl.sim.worker import CLOSE_GRACE_S, WorkerStart

_LOG = logging.getLogger(__name__)
_WATCHDOG_PERIOD_S = 0.25
"""How often deadlines are looked at (s)."""
_ABORT_GRACE_S = 2.0
"""Seconds that a hung worker may take to write its stack before it is killed outright."""
_ARENA_BYTES = 1 << 20
"""First size of an arena; it grows to the largest message."""
_NEVER = float("inf")
_STDERR = 2
"""What simulators print must not end up between the lines that a command prints for machines."""


@dataclass
class _Process:
    """One running worker and our ends of what is shared with it."""

    popen: subprocess.Popen[bytes]
    request: FileIO
    reply: FileIO
    post_mortem: FileIO
    deadline: float
    """`time.monotonic()` at which the watchdog acts; `_NEVER` while nothing is asked."""
    allowed_s: float
    """How long what is asked may take (s)."""
    hung: bool = False
    """The deadline was missed and the watchdog is ending the worker."""

    def end(self) -> int:
        """Kill it if it still runs and close the pipes; its exit status (negative: the signal)."""
        self.popen.kill()
        self.request.close()
        self.reply.close()
        return self.popen.wait()

    def last_words(self) -> str:
        """What `faulthandler` wrote; closes the file."""
        with self.post_mortem as file:
            file.seek(0)
            return file.read().decode(errors="replace").strip()


@dataclass
class _Member:
    """One env of the pool; its arena and state outlive its workers."""

    protocol: EpisodeProtocol
    wire: Wire
    process: _Process | None = None
    look: Look = field(default_factory=Look)
    """Of the last reset, which waits while a worker is starting."""
    start_failure: str = ""
    """Why the last worker could not be started."""


class ProcessPool:
    """An `EnvPool` with one worker process per env; see `vla_rl/sim/base.py` for what the methods promise.

    Pictures handed out are never overwritten while somebody holds them (`picture_slots.py`); other arrays are copies.
    A worker that raises, misses its deadline or dies while an episode runs yields one `EnvFault` and is replaced at
    once; the others do not notice. The watchdog thread ends a hung worker, which closes its pipe, so that a wait on
    `waitables()` wakes up for every kind of fault. All methods belong to one thread, except `preempt`.
    """

    def __init__(self, config: PoolConfig, env: EnvConfig, make_env: MakeEnv) -> None:
        """Start all workers and wait for the first. Raises PoolStartError if it does not come up."""
        self.num_envs = config.workers
        self._config = config
        self._resolution = env.resolution
        self._start = _pickled_start(env, make_env)
        self._gl_lock = ProcessLock.create()
        self._epoll = select.epoll()
        self._lock = threading.Lock()  # for what the watchdog, or a person's thread through `preempt`, looks at
        self._closing = threading.Event()
        self._member_of: dict[int, _Member] = {}
        self._members = [self._new_member(index) for index in range(config.workers)]
        for member in self._members:
            self._spawn(member)
        self._watchdog = threading.Thread(target=self._watch, name="env watchdog", daemon=True)
        self._watchdog.start()
        self.spec: EnvSpec = self._first_spec()

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        """See `EnvPool.reset`. Raises PoolStateError while an answer of this env is pending."""
        require_env(env, self.num_envs)
        member = self._members[env]
        member.protocol.begin_reset(spec)
        member.look = look
        if member.process is None:
            self._spawn(member)
        elif member.protocol.state is EnvState.RESETTING:
            self._send_reset(member, member.process)

    def step(self, env: int, chunk: ActionChunk) -> None:
        """See `EnvPool.step`. Raises PoolStateError unless an episode of this env waits for a chunk."""
        require_env(env, self.num_envs)
        member = self._members[env]
        with self._lock:
            member.protocol.begin_step()
            member.wire.request_preempt(False)
        self._send(member.process, member.wire.write_step(chunk.actions_CA, chunk.views), self._config.step_deadline_s)

    def ready(self, timeout_s: float) -> list[EnvReply]:
        """See `EnvPool.ready`."""
        until = time.monotonic() + timeout_s
        replies: list[EnvReply] = []
        while not replies and not self._closing.is_set():
            events = self._epoll.poll(max(0.0, until - time.monotonic()))
            if not events:
                break
            received = [self._receive(self._member_of[descriptor]) for descriptor, _ in events]
            replies = [reply for reply in received if reply is not None]
        return replies

    def waitables(self) -> list[Any]:
        """See `EnvPool.waitables`: one object that covers all workers, also those still to come."""
        return [self._epoll]

    def preempt(self, env: int) -> None:
        """See `EnvPool.preempt`; nothing happens unless a chunk is running."""
        require_env(env, self.num_envs)
        member = self._members[env]
        with self._lock:
            if member.protocol.state is EnvState.STEPPING:
                member.wire.request_preempt(True)

    def close(self) -> None:
        """See `EnvPool.close`. Workers get a moment to close their envs, and are killed after it."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watchdog.join()
        processes = [member.process for member in self._members if member.process is not None]
        for process in processes:
            with contextlib.suppress(BrokenPipeError):  # it has died already
                process.request.write(TOKEN.pack(*Token(Kind.CLOSE)))
            process.request.close()
        _wait_for([process.popen for process in processes], CLOSE_GRACE_S)
        for process in processes:
            process.end()
            process.post_mortem.close()
        for member in self._members:
            member.process = None
            member.protocol.state = EnvState.CLOSED
            member.wire.arena.close()
        self._epoll.close()
        self._gl_lock.close()

    def _new_member(self, index: int) -> _Member:
        arena = SharedArena.create(_ARENA_BYTES, f"vla-rl-env-{index}")
        return _Member(EpisodeProtocol(index, EnvState.DOWN), Wire(arena, self._resolution, self._config.debug_poison))

    def _spawn(self, member: _Member) -> None:
        """Start a worker for `member`; a queued reset is sent when it has come up."""
        if member.protocol.state is not EnvState.QUEUED:
            member.protocol.state = EnvState.STARTING
        member.wire.write_bytes(self._start)
        process = _start_worker(member, self._config, self._resolution, self._gl_lock)
        member.process = process
        self._member_of[process.reply.fileno()] = member
        self._epoll.register(process.reply, select.EPOLLIN)

    def _first_spec(self) -> EnvSpec:
        first = self._members[0]
        while first.protocol.state is EnvState.STARTING:
            self.ready(_WATCHDOG_PERIOD_S)
        if first.protocol.state is EnvState.DOWN:
            self.close()
            raise PoolStartError(f"env 0 could not be made: {first.start_failure}")
        return self.spec

    def _send_reset(self, member: _Member, process: _Process) -> None:
        message = member.wire.write_pickled(Kind.RESET, (member.protocol.spec, member.look))
        self._send(process, message, self._config.reset_deadline_s)

    def _send(self, process: _Process | None, message: bytes, allowed_s: float) -> None:
        assert process is not None, "an env whose state allows a request has a worker"
        with self._lock:
            process.allowed_s = allowed_s
            process.deadline = time.monotonic() + allowed_s
        with contextlib.suppress(BrokenPipeError):  # it has died: `ready` sees its closed pipe and reports the fault
            process.request.write(message)

    def _receive(self, member: _Member) -> EnvReply | None:
        """Read one token of a worker, or notice its end."""
        process = member.process
        assert process is not None, "only running workers are polled"
        with self._lock:
            process.deadline = _NEVER
        message = process.reply.read(TOKEN.size)
        if not message or process.hung:
            return self._lost(member, process, None)
        token = Token(*TOKEN.unpack(message))
        if token.kind == Kind.CHUNK:
            reply = member.wire.read_chunk(member.protocol.env, token)
            member.protocol.answered(reply)
            return reply
        value = member.wire.read_pickled(token)
        if token.kind == Kind.RAISED:
            return self._lost(member, process, value)
        if token.kind == Kind.STARTED:
            return self._started(member, process, value)
        value.env = member.protocol.env
        member.protocol.answered(value)
        return value

    def _started(self, member: _Member, process: _Process, spec: EnvSpec) -> None:
        self.spec = spec
        if member.protocol.state is EnvState.QUEUED:
            member.protocol.state = EnvState.RESETTING
            self._send_reset(member, process)
        else:
            member.protocol.state = EnvState.IDLE

    def _lost(self, member: _Member, process: _Process, raised: str | None) -> EnvFault | None:
        """Bury a worker that raised, hung or died and start another; the fault, if an episode is lost.

        A worker that fails while it starts is not replaced before the next reset, so that a broken machine does not spin.
        """
        protocol, state = member.protocol, member.protocol.state
        self._epoll.unregister(process.reply)
        del self._member_of[process.reply.fileno()]
        kind, message = _verdict(process, state, raised)
        member.process = None
        fault = EnvFault(protocol.env, protocol.spec, kind, message) if protocol.in_episode else None
        if state in (EnvState.STARTING, EnvState.QUEUED):
            protocol.state = EnvState.DOWN
            member.start_failure = message
        else:
            self._spawn(member)
        if fault is None and state is not EnvState.STARTING:  # the first reset, or whoever made the pool, says why there is none
            _LOG.warning("env %d, between episodes: %s", protocol.env, message)
        return fault

    def _watch(self) -> None:
        """The watchdog thread: end workers past their deadline, first with a signal that makes them write their stack."""
        while not self._closing.wait(_WATCHDOG_PERIOD_S):
            now = time.monotonic()
            with self._lock:
                late = [m.process for m in self._members if m.process is not None and m.process.deadline < now]
                for process in late:
                    process.popen.send_signal(signal.SIGKILL if process.hung else signal.SIGABRT)
                    process.deadline = _NEVER if process.hung else now + _ABORT_GRACE_S
                    process.hung = True


def _pickled_start(env: EnvConfig, make_env: MakeEnv) -> bytes:
    """Raises TypeError for a `make_env` that a worker could not import."""
    if getattr(make_env, "__module__", None) == "__main__":
        raise TypeError(f"make_env {make_env!r} is defined in the main script, which workers do not import: move it into a module")
    return pickle.dumps(WorkerStart(env, make_env))


def _start_worker(member: _Member, config: PoolConfig, resolution: int, gl_lock: ProcessLock) -> _Process:
    """A fresh interpreter, not a fork: nothing of this process (GL, CUDA, threads, `__main__`) reaches it but these files."""
    request_out, request_in = os.pipe()
    reply_out, reply_in = os.pipe()
    post_mortem = os.memfd_create("vla-rl-post-mortem")
    inherited = (request_out, reply_in, member.wire.arena.fd, post_mortem, gl_lock.fd)
    numbers = (member.protocol.env, resolution, int(config.debug_poison))
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", "vla_rl.sim.worker", *map(str, (*numbers, *inherited))],
        pass_fds=inherited,
        env=_worker_environment(config.threads_per_worker),
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        process_group=0,  # Ctrl-C goes to the pool's process alone, which decides; workers end with it
    )
    os.close(request_out)
    os.close(reply_in)
    allowed_s = config.start_deadline_s
    return _Process(
        popen,
        request=FileIO(request_in, "wb"),
        reply=FileIO(reply_out, "rb"),
        post_mortem=FileIO(post_mortem, "r+b"),
        deadline=time.monotonic() + allowed_s,
        allowed_s=allowed_s,
    )


def _worker_environment(threads: int) -> dict[str, str]:
    """This process's environment and module search path, with the thread counts of one worker unless the user set them."""
    counts = {"OMP_NUM_THREADS": str(threads), "LP_NUM_THREADS": str(threads if threads > 1 else 0)}
    return {**counts, **os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _verdict(process: _Process, state: EnvState, raised: str | None) -> tuple[Literal["raised", "hung", "died"], str]:
    """What happened to a worker that is gone, and the text of its fault; ends the process for certain."""
    status = process.end()
    last_words = process.last_words()
    if raised is not None:
        return "raised", f"the worker raised while {state.value}:\n{raised}"
    if process.hung:
        return "hung", f"no answer within {process.allowed_s:g} s while {state.value}; the worker was stopped. {last_words}"
    if status == -signal.SIGKILL:
        cause = "was killed by SIGKILL (by a person, or by the kernel because memory was short)"
    else:
        cause = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return "died", f"the worker, process {process.popen.pid}, {cause} while {state.value}. {last_words}"


def _wait_for(popens: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    until = time.monotonic() + grace_s
    for popen in popens:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.0, until - time.monotonic()))
