"""An env pool that a person can look into, without slowing it down.

Control steps render nothing. Beside each env of the pool, a mirror env in another worker executes the same actions, a little
later and as many at once as have come together, and draws what it then sees: simulation is exact, so its pictures are those of
the env itself. How many pictures a second there are is what the machine can give; the control rate does not depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_rl.episode import ActionChunk, EpisodeSpec, Float32, UInt8
from vla_rl.sim.base import ChunkReply, EnvPool, EnvReply, Look, ResetReply


@dataclass(frozen=True)
class Picture:
    """What a mirror saw."""

    env: int
    take: int
    """Which reset of the env it belongs to, counted from 1."""
    control_step: int
    """Actions that had been executed when it was so."""
    images: dict[str, UInt8]
    executed_s: float
    """When the newest of these actions had been executed in the env itself (s, `time.perf_counter`)."""


@dataclass
class EnvMeter:
    """What an env has done in its running episode."""

    take: int = 0
    executed: int = 0
    """Control steps."""
    gripper: float = -1.0
    """The last gripper command that was executed."""
    physics_s: float = 0.0
    """Of the last reply."""


@dataclass
class _Mirror:
    take: int = 0
    """Which reset it shows; 0: none yet."""
    spec: EpisodeSpec | None = None
    """A reset that it still has to do."""
    busy: bool = False
    executed: int = 0
    pending: deque[tuple[Float32, float]] = field(default_factory=deque[tuple[Float32, float]])
    """Actions that the env has executed and it has not, with when."""
    sent_s: float = 0.0


class WatchedPool:
    """An `EnvPool` around another one that counts what is executed and, with mirrors, shows it.

    mirrors: a pool with as many envs, or None. show: called with each picture, in the thread of the loop.
    """

    def __init__(self, pool: EnvPool, mirrors: EnvPool | None, views: tuple[str, ...], show: Callable[[Picture], None]) -> None:
        self.num_envs, self.spec = pool.num_envs, pool.spec
        self.meters = [EnvMeter() for _ in range(pool.num_envs)]
        self._pool, self._mirror_pool, self._views, self._show = pool, mirrors, views, show
        self._mirrors = [_Mirror() for _ in range(pool.num_envs)]

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        """See `EnvPool.reset`."""
        self._pool.reset(env, spec, look)
        self.meters[env] = EnvMeter(self.meters[env].take + 1)
        mirror = self._mirrors[env]
        mirror.spec = spec
        mirror.pending.clear()

    def step(self, env: int, chunk: ActionChunk) -> None:
        """See `EnvPool.step`."""
        self._pool.step(env, chunk)

    def ready(self, timeout_s: float) -> list[EnvReply]:
        """See `EnvPool.ready`; also lets the mirrors follow."""
        replies = self._pool.ready(timeout_s)
        for reply in replies:
            if isinstance(reply, ChunkReply):
                self._count(reply)
        if self._mirror_pool is not None:
            self._follow(self._mirror_pool)
        return replies

    def waitables(self) -> list[Any]:
        """See `EnvPool.waitables`."""
        mirrors = [] if self._mirror_pool is None else self._mirror_pool.waitables()
        return [*self._pool.waitables(), *mirrors]

    def preempt(self, env: int) -> None:
        """See `EnvPool.preempt`."""
        self._pool.preempt(env)

    def close(self) -> None:
        """Close both pools."""
        self._pool.close()
        if self._mirror_pool is not None:
            self._mirror_pool.close()

    def _count(self, reply: ChunkReply) -> None:
        meter = self.meters[reply.env]
        meter.executed += len(reply.executed_EA)
        meter.physics_s = reply.timing.get("physics", 0.0)
        if len(reply.executed_EA):
            meter.gripper = float(reply.executed_EA[-1, 6])
            self._mirrors[reply.env].pending.append((reply.executed_EA, time.perf_counter()))

    def _follow(self, pool: EnvPool) -> None:
        """Take what the mirrors have drawn, and give them what has happened since."""
        for reply in pool.ready(0.0):
            mirror = self._mirrors[reply.env]
            mirror.busy = False
            if isinstance(reply, ResetReply | ChunkReply):
                mirror.executed += len(reply.executed_EA) if isinstance(reply, ChunkReply) else 0
                if mirror.spec is None:
                    images = dict(reply.observation.images)
                    self._show(Picture(reply.env, mirror.take, mirror.executed, images, mirror.sent_s))
            else:  # the mirror was lost: the take goes on unseen, and the next one is shown again
                mirror.take = 0
        for env, mirror in enumerate(self._mirrors):
            if not mirror.busy:
                self._send(pool, env, mirror)

    def _send(self, pool: EnvPool, env: int, mirror: _Mirror) -> None:
        if mirror.spec is not None:
            mirror.take, mirror.executed, mirror.sent_s = self.meters[env].take, 0, time.perf_counter()
            pool.reset(env, mirror.spec, Look(views=self._views))
            mirror.spec, mirror.busy = None, True
        elif mirror.pending and mirror.take == self.meters[env].take:
            actions = np.concatenate([actions for actions, _ in mirror.pending])
            mirror.sent_s = mirror.pending[-1][1]
            mirror.pending.clear()
            pool.step(env, ActionChunk(actions))
            mirror.busy = True
