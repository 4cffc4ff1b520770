"""What can happen to a role that runs somewhere else."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.errors import UserError


@dataclass(frozen=True)
class RoleName:
    """Which role, for messages."""

    role: str
    """`trainer` or `worker`."""
    rank: int
    """Number among its kind, from 0."""
    node: str
    """Host name or address of the machine."""
    log: str
    """File on that machine with what the role printed; empty where it shares the driver's output."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank} on {self.node}" + (f" (log: {self.log})" if self.log else "")


class RoleLost(UserError):
    """A role's process is gone: killed, out of memory, or its machine is."""

    def __init__(self, name: RoleName, cause: str, last_words: str = "") -> None:
        self.name, self.cause = name, cause
        words = f"\nIts last lines:\n{last_words}" if last_words else ""
        super().__init__(f"{name} was lost: {cause}. Start the same command again to go on from the last checkpoint.{words}")


class RoleHung(RoleLost):
    """A role lived and did nothing, or could not be reached; it was killed."""


class RoleFailed(RuntimeError):
    """A role raised something that does not travel between processes; the text holds its traceback."""

    def __init__(self, name: RoleName, trace: str) -> None:
        self.name = name
        super().__init__(f"{name} raised:\n{trace}")
