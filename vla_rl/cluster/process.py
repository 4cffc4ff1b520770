"""Roles in processes of this machine: calls through pipes, parcels in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import platform
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import torch

from vla_rl.cluster.backend import LOOPBACK, Member, Pending, Sealed
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleHung, RoleLost, RoleName
from vla_rl.cluster.liveness import Counts, Pulse, Vigil, Watch
from vla_rl.cluster.placement import Slot, gpu_of_seat, plan_placement
from vla_rl.cluster.process_role import CLOSE, GRACE_S, Surroundings, allow_many_files, serve
from vla_rl.cluster.wire import ArenaParcel, Raised
from vla_rl.sim.shared_memory import SharedArena

NOTICE_S = 1.0
"""How long the system may take to report the end of a process whose peers noticed it already."""
LAST_LINES = 15
"""Lines of a lost role's log that its error shows."""


class _ProcessCall:
    """A call whose answer comes through a pipe, in order."""

    def __init__(self, member: ProcessMember) -> None:
        self.member = member
        self._answered = False
        self._value: Any = None
        self._error: BaseException | None = None

    def result(self) -> Any:
        """See `Pending.result`."""
        while not self._answered:
            self.member.receive_next()
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any, error: BaseException | None) -> None:
        """The answer, or the loss of the role."""
        self._answered, self._value, self._error = True, value, error

    @property
    def is_settled(self) -> bool:
        return self._answered


class ProcessMember:
    """A role in a process of its own."""

    def __init__(self, name: RoleName, process: BaseProcess, calls: Connection, pulse: Pulse) -> None:
        self.name, self.process, self.calls = name, process, calls
        self.received_bytes = 0
        self.vigil = Vigil()
        self.pulse, self._hung = pulse, ""
        self._open: list[_ProcessCall] = []
        self.ready: Pending = self._expect()

    def call(self, method: str, *arguments: Any, beside: bool = False) -> Pending:
        """See `Member.call`; nothing is answered beside another call here."""
        if beside:
            raise ValueError(f"{method} was asked of {self.name} beside another call; only the Ray backend can do that")
        pending = self._expect()
        try:
            self.calls.send_bytes(pickle.dumps((method, arguments)))
        except (BrokenPipeError, ConnectionResetError):
            self._settle_all_lost()
        return pending

    def receive_next(self) -> None:
        """Take the next answer in, waiting for it; where the process is gone, every open call is lost."""
        try:
            message = self.calls.recv_bytes()
            self.received_bytes += len(message)
            kind, body = message[:1], pickle.loads(memoryview(message)[1:])
            if kind == b"P":
                body = Sealed(body, ArenaParcel(SharedArena(recv_handle(self.calls))))
        except (EOFError, OSError):  # it ended before, or in the middle of, its answer
            self._settle_all_lost()
            return
        call = self._open.pop(0)
        if isinstance(body, Raised):
            call.settle(None, body.error(self.name))
        else:
            call.settle(body, None)

    @property
    def is_busy(self) -> bool:
        """See `Watched.is_busy`."""
        return bool(self._open)

    def counts(self) -> Counts:
        """See `Watched.counts`."""
        return self.pulse.read()

    def end_hung(self, cause: str) -> None:
        """See `Watched.end_hung`: first with a signal at which it writes its stacks into its log, if it can."""
        number = signal.SIGKILL if self._hung else signal.SIGABRT
        self._hung = self._hung or cause
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, number)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; from any thread."""
        return bool(wait([self.process.sentinel], 0))

    def loss(self) -> RoleLost:
        """Why the process is gone. Waits for its end."""
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            cause = "killed by SIGKILL (by a person, or by the kernel because memory was short)"
        else:
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with status {code}"
        if self._hung:
            cause = self._hung
        lines = Path(self.name.log).read_text(errors="replace").splitlines() if Path(self.name.log).exists() else []
        return (RoleHung if self._hung else RoleLost)(self.name, cause, "\n".join(lines[-LAST_LINES:]))

    def _expect(self) -> _ProcessCall:
        call = _ProcessCall(self)
        self._open.append(call)
        return call

    def _settle_all_lost(self) -> None:
        self.process.kill()  # it let go of the pipe, so nobody can reach it any more
        loss = self.loss()
        calls, self._open = self._open, []
        for call in calls:
            call.settle(None, loss)


class ProcessBackend:
    """See the module's docstring."""

    host = LOOPBACK

    def __init__(self, config: ClusterConfig, run_dir: Path, spans: Path | None, preload: Sequence[str] = ()) -> None:
        """Roles print into `run_dir/logs/`, and add their spans to `spans`. `preload` is imported once, where roles are forked from."""
        self._config, self._logs, self._spans = config, run_dir / "logs", spans
        self._environment = {(slot.role, slot.rank): _environment(slot) for slot in plan_placement(config)}
        self._members: list[ProcessMember] = []
        self._watch = Watch(config, lambda: [member for member in tuple(self._members) if not member.is_over])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        allow_many_files()

    def start(self, role: str, rank: int, make: Callable[..., Any], *arguments: Any) -> ProcessMember:
        """See `Backend.start`."""
        log = self._logs / f"{role}_{rank}.log"
        threads = self._config.torch_threads or torch.get_num_threads()
        pulse = Pulse.create()
        surroundings = Surroundings(f"{role}_{rank}", log, self._spans, threads, self._environment[role, rank], pulse.path)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, os.getpid(), surroundings, make, arguments), name=f"{role} {rank}")
        process.start()
        theirs.close()
        member = ProcessMember(RoleName(role, rank, platform.node(), str(log)), process, ours, pulse)
        self._members.append(member)
        return member

    def wait_any(self, calls: Sequence[Pending]) -> list[Pending]:
        """See `Backend.wait_any`."""
        open_calls = [call for call in calls if isinstance(call, _ProcessCall)]
        while not (settled := [call for call in open_calls if call.is_settled]):
            members = {call.member.calls: call.member for call in open_calls}
            for readable in wait(list(members)):
                members[readable].receive_next()  # pyright: ignore[reportArgumentType]
        return list(settled)

    def loss_of(self, member: Member) -> RoleLost | None:
        """See `Backend.loss_of`."""
        assert isinstance(member, ProcessMember)
        member.process.join(NOTICE_S)
        return member.loss() if member.process.exitcode else None  # a role that could not be made has said why, and ended with 0

    def close(self) -> None:
        """See `Backend.close`: roles get a moment to end by themselves, and are killed after it."""
        self._watch.close()
        members, self._members = self._members, []
        for member in members:
            member.call(CLOSE)
        until = time.monotonic() + GRACE_S
        for member in reversed(members):
            member.process.join(max(0.0, until - time.monotonic()))
            member.process.kill()
            member.process.join()
            member.calls.close()
            member.pulse.close()


def _environment(slot: Slot) -> dict[str, str]:
    """A role sees the one GPU that it was given; on CPUs nothing is set."""
    return {"CUDA_VISIBLE_DEVICES": gpu_of_seat(slot.seat, os.environ.get("CUDA_VISIBLE_DEVICES"))} if slot.has_gpu else {}
