"""All roles in this process: a call is a call. The twin against which the other backends are tested."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from vla_rl.cluster.backend import LOOPBACK, Held, Member, Pending, Sealed
from vla_rl.cluster.errors import RoleLost, RoleName


@dataclass(frozen=True)
class _Answer:
    """A call that has returned already."""

    value: Any

    def result(self) -> Any:
        return self.value


class InlineMember:
    """A role in this process; what it raises comes out of `call` itself."""

    def __init__(self, name: RoleName, role: Any) -> None:
        self.name, self.role = name, role
        self.ready: Pending = _Answer(None)
        self.received_bytes = 0

    def call(self, method: str, *arguments: Any, beside: bool = False) -> Pending:
        """See `Member.call`."""
        answer = getattr(self.role, method)(*arguments)
        return _Answer(Sealed(answer.value, Held(answer.payload)) if isinstance(answer, Sealed) else answer)


class InlineBackend:
    """See the module's docstring."""

    host = LOOPBACK

    def __init__(self) -> None:
        self._roles = ExitStack()

    def start(self, role: str, rank: int, make: Callable[..., Any], *arguments: Any) -> InlineMember:
        """See `Backend.start`."""
        made = make(*arguments)
        self._roles.callback(made.close)
        return InlineMember(RoleName(role, rank, platform.node(), ""), made)

    def wait_any(self, calls: Sequence[Pending]) -> list[Pending]:
        """See `Backend.wait_any`: everything has been answered."""
        return list(calls)

    def loss_of(self, member: Member) -> RoleLost | None:
        """See `Backend.loss_of`: this process is here."""

    def close(self) -> None:
        """See `Backend.close`: the last that was started ends first."""
        self._roles.close()
