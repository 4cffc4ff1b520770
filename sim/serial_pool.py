"""Envs in this process, one after the other: the twin of `ProcessPool` for tests and debuggers."""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from vla_rl.episode import ActionChunk, EpisodeSpec
from vla_rl.sim.base import ChunkReply, Env, EnvConfig, EnvFault, EnvReply, Look, ResetReply
from vla_rl.sim.pool_state import EnvState, EpisodeProtocol, MakeEnv, PoolConfig, require_env


class SerialPool:
    """An `EnvPool` without processes; see `vla_rl/sim/base.py` for what the methods promise.

    `ready` executes everything that was asked for, in the order in which it was asked. An env that raises yields an
    `EnvFault` and is made anew; deadlines, hangs and deaths need a process of their own and are not caught here.
    The first env is made at once, the others at their first reset.
    """

    def __init__(self, config: PoolConfig, env: EnvConfig, make_env: MakeEnv) -> None:
        self.num_envs = config.workers
        self._make_env = make_env
        self._env_config = env
        self._protocols = [EpisodeProtocol(index, EnvState.IDLE) for index in range(config.workers)]
        self._preempted = [False] * config.workers
        self._lock = threading.Lock()  # `preempt` may come from a person's thread
        self._pending: deque[tuple[int, Callable[[Env], ResetReply | ChunkReply]]] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._envs: dict[int, Env] = {}
        self.spec = self._env(0).spec

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        """See `EnvPool.reset`. Raises PoolStateError while an answer of this env is pending."""
        require_env(env, self.num_envs)
        self._protocols[env].begin_reset(spec)
        self._ask(env, lambda simulator: simulator.reset(spec, look))

    def step(self, env: int, chunk: ActionChunk) -> None:
        """See `EnvPool.step`. Raises PoolStateError unless an episode of this env waits for a chunk."""
        require_env(env, self.num_envs)
        with self._lock:
            self._protocols[env].begin_step()
            self._preempted[env] = False
        self._ask(env, lambda simulator: simulator.step_chunk(chunk.actions_CA, chunk.views))

    def ready(self, timeout_s: float) -> list[EnvReply]:
        """See `EnvPool.ready`; executes what is pending. There is nothing to wait for: `timeout_s` is not used up."""
        replies = [self._execute(*self._pending.popleft()) for _ in range(len(self._pending))]
        if replies:
            self._bell.recv(1)
        return replies

    def waitables(self) -> list[Any]:
        """See `EnvPool.waitables`: readable while something is pending."""
        return [self._bell]

    def preempt(self, env: int) -> None:
        """See `EnvPool.preempt`; nothing happens unless a chunk is running."""
        require_env(env, self.num_envs)
        with self._lock:
            if self._protocols[env].state is EnvState.STEPPING:
                self._preempted[env] = True

    def close(self) -> None:
        """See `EnvPool.close`."""
        for protocol in self._protocols:
            protocol.state = EnvState.CLOSED
        self._pending.clear()
        while self._envs:
            self._envs.popitem()[1].close()
        self._bell.close()
        self._ringer.close()

    def _env(self, index: int) -> Env:
        if index not in self._envs:
            self._envs[index] = self._make_env(self._env_config, lambda: self._preempted[index], index, contextlib.nullcontext())
        return self._envs[index]

    def _ask(self, env: int, call: Callable[[Env], ResetReply | ChunkReply]) -> None:
        if not self._pending:
            self._ringer.send(b"!")
        self._pending.append((env, call))

    def _execute(self, env: int, call: Callable[[Env], ResetReply | ChunkReply]) -> EnvReply:
        protocol = self._protocols[env]
        try:
            reply: EnvReply = call(self._env(env))
            reply.env = env
        except Exception:  # noqa: BLE001 - as in a worker: whatever an env raises is reported as a fault, with its traceback
            reply = EnvFault(env, protocol.spec, "raised", f"the env raised while {protocol.state.value}:\n{traceback.format_exc()}")
            self._discard(env)
        protocol.answered(reply)
        return reply

    def _discard(self, env: int) -> None:
        """Give up an env that raised; it may be too broken to close."""
        broken = self._envs.pop(env, None)
        with contextlib.suppress(Exception):
            if broken is not None:
                broken.close()
