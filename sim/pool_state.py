"""What both pools share: their configuration, the protocol of one env as a state machine, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum
from typing import Literal, Protocol

from vla_rl.episode import EpisodeSpec
from vla_rl.errors import UserError
from vla_rl.sim.base import ChunkReply, Env, EnvConfig, EnvFault, EnvReply


class MakeEnv(Protocol):
    """Builds an env. `ProcessPool` calls it in the worker, so it must be importable there: a function or class of a module."""

    def __call__(
        self, config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None], /
    ) -> Env:
        """preempt_requested: whether the running chunk is to stop. worker: index among the workers of this machine.

        gl_turn: to be held while the process's GL context is created, which must happen here and not in a reset:
        drivers have deadlocked when several processes did so at once.
        """
        ...


@dataclass(frozen=True)
class PoolConfig:
    """How many envs run, where, and how long each answer may take."""

    backend: Literal["process", "serial"] = "process"
    """`process`: one worker process per env. `serial`: all envs in this process, one after the other, the same bits."""
    workers: int = 2
    """Number of envs; at least 1."""
    start_deadline_s: float = 300.0
    """Seconds a worker may take to import, wait for its turn to create a GL context, and build its env; above 0."""
    reset_deadline_s: float = 180.0
    """Seconds a reset may take, settling included; above 0. Only `process` can enforce a deadline."""
    step_deadline_s: float = 120.0
    """Seconds a chunk may take; above 0. Only `process` can enforce a deadline."""
    threads_per_worker: int = 1
    """Threads that numerical libraries and the software renderer of one worker may use; at least 1 (`process` only)."""
    debug_poison: bool = False
    """Fill shared memory with a pattern after each read and check that it is gone at the next one (`process` only, slower)."""

    def __post_init__(self) -> None:
        if self.backend not in ("process", "serial"):
            raise ValueError(f"backend {self.backend!r} must be 'process' or 'serial'")
        if self.workers < 1:
            raise ValueError(f"workers {self.workers} must be at least 1, one per env")
        if self.threads_per_worker < 1:
            raise ValueError(f"threads_per_worker {self.threads_per_worker} must be at least 1")
        for field in fields(self):
            if field.name.endswith("_s") and not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} {getattr(self, field.name)} must be above 0 seconds")


class EnvState(Enum):
    """Where one env of a pool stands."""

    STARTING = "starting"
    """Its worker is being made."""
    QUEUED = "queued"
    """A reset was asked for and waits until the worker is up."""
    IDLE = "idle"
    """No episode yet."""
    RESETTING = "resetting"
    """A reset was asked for and not answered yet."""
    OBSERVED = "observed"
    """An episode runs and the env waits for a chunk."""
    STEPPING = "stepping"
    """A chunk was asked for and not answered yet."""
    ENDED = "ended"
    """The episode ended: by success, the time limit, or a fault."""
    DOWN = "down"
    """Its worker could not be started; a reset tries again."""
    CLOSED = "closed"
    """The pool was closed."""


class PoolStateError(RuntimeError):
    """A call that the state of the env does not allow."""

    def __init__(self, call: str, env: int, state: EnvState, spec: EpisodeSpec | None, allowed: tuple[EnvState, ...]) -> None:
        episode = spec.key if spec is not None else "none"
        super().__init__(
            f"{call} of env {env} (state {state.value}, episode {episode}): allowed only when {', '.join(s.value for s in allowed)}; "
            "wait for the pending reply, or reset the env first"
        )


class PoolStartError(UserError):
    """The first env of a pool could not be made: the text says why, with the worker's traceback if it has no text for users."""


_RESETTABLE = (EnvState.STARTING, EnvState.IDLE, EnvState.OBSERVED, EnvState.ENDED, EnvState.DOWN)
_IN_EPISODE = (EnvState.QUEUED, EnvState.RESETTING, EnvState.OBSERVED, EnvState.STEPPING)


class EpisodeProtocol:
    """The state machine of one env: which calls are legal, and what each reply makes of the state."""

    def __init__(self, env: int, state: EnvState) -> None:
        self.env = env
        self.state = state
        self.spec: EpisodeSpec | None = None
        """The episode that runs, or ran last."""

    @property
    def in_episode(self) -> bool:
        """Whether an episode is lost if the env fails now."""
        return self.state in _IN_EPISODE

    def begin_reset(self, spec: EpisodeSpec) -> None:
        """A reset is asked for. Raises PoolStateError while an answer is pending, and after `close`."""
        self._require("reset", _RESETTABLE)
        self.spec = spec
        self.state = EnvState.QUEUED if self.state in (EnvState.STARTING, EnvState.DOWN) else EnvState.RESETTING

    def begin_step(self) -> None:
        """A chunk is asked for. Raises PoolStateError unless an episode waits for one."""
        self._require("step", (EnvState.OBSERVED,))
        self.state = EnvState.STEPPING

    def answered(self, reply: EnvReply) -> None:
        """A reset or a chunk was answered."""
        ended = isinstance(reply, EnvFault) or (isinstance(reply, ChunkReply) and (reply.terminated or reply.truncated))
        self.state = EnvState.ENDED if ended else EnvState.OBSERVED

    def _require(self, call: str, allowed: tuple[EnvState, ...]) -> None:
        if self.state not in allowed:
            raise PoolStateError(call, self.env, self.state, self.spec, allowed)


def require_env(env: int, num_envs: int) -> None:
    """Raise IndexError unless `env` is an index of the pool."""
    if not 0 <= env < num_envs:
        raise IndexError(f"env {env} must be in 0 to {num_envs - 1}: the pool has {num_envs}")
