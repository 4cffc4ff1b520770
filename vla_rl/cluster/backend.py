"""How a driver talks to roles, wherever they run: start one, call a method, wait for answers.

A role is an object of an ordinary class. A backend only places it and carries messages: the name of a method, its arguments, and the
answer, which is small (ids and scalars). What is large comes back as a *parcel*: a method returns `Sealed(value, payload)`, the payload
stays where it was made, and the driver gets `Sealed(value, parcel)`, which it can hand to another role.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vla_rl.cluster.errors import RoleLost, RoleName

LOOPBACK = "127.0.0.1"
"""How roles on the driver's own machine reach it."""


class Parcel(Protocol):
    """Something large that lies where it was made; a message can carry it."""

    def fetch(self) -> Any:
        """The payload, from any role. Its arrays may share memory with other readers: do not write to them."""
        ...

    def release(self) -> None:
        """The driver needs it no more; may be called twice."""
        ...


@dataclass(frozen=True)
class Sealed:
    """An answer in two parts."""

    value: Any
    """For the driver: small."""
    payload: Any
    """For another role: large. At the driver, a `Parcel`."""


@dataclass(frozen=True)
class Held:
    """A parcel whose payload is in this process (or travels inside the message)."""

    payload: Any

    def fetch(self) -> Any:
        """See `Parcel.fetch`."""
        return self.payload

    def release(self) -> None:
        """See `Parcel.release`: memory goes with the last reference."""


class Pending(Protocol):
    """A call that was made."""

    def result(self) -> Any:
        """Wait for the answer. Raises what the role raised, with a note that names it, or RoleLost."""
        ...


class Member(Protocol):
    """A role that runs somewhere. Its methods belong to one thread of the driver."""

    ready: Pending
    """The making of the role, which is its first call."""
    received_bytes: int
    """Size of all answers that reached the driver."""

    @property
    def name(self) -> RoleName:
        """Which role, and where."""
        ...

    def call(self, method: str, *arguments: Any, beside: bool = False) -> Pending:
        """Ask for `role.method(*arguments)`; calls are answered in order.

        `beside`: answered by another thread, beside the call that runs; only backends that need it have it.
        """
        ...


class Backend(Protocol):
    """Places roles."""

    host: str
    """Address under which roles reach the driver."""

    def start(self, role: str, rank: int, make: Callable[..., Any], *arguments: Any) -> Member:
        """Start a role: `make(*arguments)` runs where it is placed. Where that rank ran before, this is its next life."""
        ...

    def wait_any(self, calls: Sequence[Pending]) -> list[Pending]:
        """Those of `calls` whose answer (or loss) is there, waiting for the first one."""
        ...

    def loss_of(self, member: Member) -> RoleLost | None:
        """Why a role is gone, or None while it lives; waits a moment for the system to notice."""
        ...

    def close(self) -> None:
        """End all roles; may be called twice."""
        ...


def gather(backend: Backend, members: Sequence[Member], calls: Sequence[Pending]) -> list[Any]:
    """The answers of all calls, in order.

    Where one goes wrong its error is raised at once, without waiting for the others, which may wait for it. If a process is gone, that
    is the error: its peers fail because of it.
    """
    waiting = list(calls)
    while waiting:
        for call in backend.wait_any(waiting):
            waiting.remove(call)
            try:
                call.result()
            except Exception as error:
                losses = [loss for member in members if (loss := backend.loss_of(member)) is not None]
                if losses:
                    raise losses[0] from error
                raise
    return [call.result() for call in calls]


def call_all(backend: Backend, members: Sequence[Member], method: str, *arguments: Any) -> list[Any]:
    """`method` on every member, at once; the answers in order."""
    return gather(backend, members, [member.call(method, *arguments) for member in members])
