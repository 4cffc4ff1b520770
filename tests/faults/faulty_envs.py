"""Envs that break on demand: an episode's prompt says how and when."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from toy_envs import CountingEnv

from vla_rl.episode import EpisodeSpec
from vla_rl.errors import UserError
from vla_rl.sim.base import ChunkReply, EnvConfig, Look, ResetReply


class FaultyEnv(CountingEnv):
    """Ordinary, except for the prompts below."""

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        if spec.prompt == "raise in reset":
            raise ZeroDivisionError("the objects could not be placed")
        if spec.prompt == "hang in reset":
            never_return()
        if spec.prompt == "killed between episodes":
            reply = super().reset(spec, look)
            reply.provenance = {"pid": os.getpid()}
            return reply
        return super().reset(spec, look)

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        assert self.episode is not None
        if self.episode.prompt == "raise in step":
            raise FloatingPointError("the simulation became unstable")
        if self.episode.prompt == "hang in step":
            never_return()
        if self.episode.prompt == "deaf":
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            never_return()
        if self.episode.prompt == "killed in the middle of a chunk":
            super().step_chunk(actions_CA[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        if self.episode.prompt == "exit":
            os._exit(3)
        return super().step_chunk(actions_CA, views)


def wrong_machine(
    config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None]
) -> FaultyEnv:
    raise UserError("no GL here; install libegl1")


def never_return() -> None:
    """What a deadlock in a driver looks like from outside."""
    threading.Event().wait()


def broken_second_worker(
    config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None]
) -> FaultyEnv:
    """Only env 0 can be made."""
    if worker == 1:
        raise RuntimeError("no GL for worker 1")
    return FaultyEnv(config, preempt_requested, worker, gl_turn)


def dies_holding_the_gl_turn(
    config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None]
) -> FaultyEnv:
    """Env 1 is killed while it creates its GL context; the others have to wait their turn."""
    with gl_turn:
        if worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return FaultyEnv(config, preempt_requested, worker, gl_turn)
