"""Small envs without a simulator for tests of the pools; importable in workers (see `conftest.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvSpec, EpisodeOver, Look, ResetReply

PATTERN_BYTES = 251
"""A prime, so that rows of a picture differ."""


class CountingEnv:
    """Pictures, state and rewards are a function of (scene seed, control step); succeeds at step `scene_seed % 13 + 3`."""

    def __init__(
        self, config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None]
    ) -> None:
        self.config = config
        self.preempt_requested = preempt_requested
        self.spec = EnvSpec("counting", Conventions(), VIEWS, config.resolution, {"made_by": "tests"})
        self.episode: EpisodeSpec | None = None
        self.look = Look()
        self.t = 0

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        self.episode, self.look, self.t = spec, look, 0
        return ResetReply(0, spec, self.observation(look.views), {"seed": spec.scene_seed}, {"reset": 0.5})

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        if self.episode is None:
            raise EpisodeOver("no episode")
        frames, states, executed = {}, [], []
        success = preempted = False
        for action in actions_CA:
            if self.preempt_requested():
                preempted = True
                break
            if self.look.record_every and self.t % self.look.record_every == 0:
                frames[self.t] = self.observation(VIEWS)
            states.append(np.full(5, self.t, np.float64))
            executed.append(np.clip(action, -1, 1))
            self.t += 1
            success = self.t >= self.length
            if success or self.t >= self.episode.protocol.max_steps:
                break
        truncated = not success and self.t >= self.episode.protocol.max_steps
        reward_E = np.zeros(len(executed), np.float32)
        reward_E[-1:] = success
        return ChunkReply(
            env=0,
            observation=self.observation(VIEWS if truncated else self.look.views if views is None else views),
            executed_EA=np.asarray(executed, np.float32).reshape(-1, 7),
            reward_E=reward_E,
            success=success,
            terminated=success,
            truncated=truncated,
            preempted=preempted,
            frames=frames,
            sim_states_ED=np.array(states) if self.look.record_states else None,
            robot_states_ER=np.zeros((len(executed), 16)) if self.look.record_states else None,
            timing={"physics": 0.25, "render": 0.5, "step": 1.0},
        )

    def close(self) -> None:
        self.episode = None

    @property
    def length(self) -> int:
        assert self.episode is not None
        return self.episode.scene_seed % 13 + 3

    def observation(self, views: tuple[str, ...]) -> Observation:
        assert self.episode is not None
        side = self.config.resolution
        numbers = np.arange(side * side * 3, dtype=np.uint64) * (self.t + 1) + self.episode.scene_seed
        images = {view: ((numbers + index) % PATTERN_BYTES).astype(np.uint8).reshape(side, side, 3) for index, view in enumerate(views)}
        state = np.arange(8, dtype=np.float32) + self.t
        privileged = {"block_pos": np.full(3, self.t + 0.5)} if self.look.privileged else {}
        return Observation(images, state, f"count to {self.length}", privileged)


class PatientEnv(CountingEnv):
    """Executes one action, then waits until the pool preempts the chunk; the prompt `run` makes it an ordinary env."""

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        assert self.episode is not None
        if self.episode.prompt == "run":
            return super().step_chunk(actions_CA, views)
        first = super().step_chunk(actions_CA[:1], views)
        while not self.preempt_requested():
            os.sched_yield()
        first.preempted = True
        return first


def raise_at_start(
    config: EnvConfig, preempt_requested: Callable[[], bool], worker: int, gl_turn: AbstractContextManager[None]
) -> CountingEnv:
    """A simulator that cannot be built."""
    raise RuntimeError("no GL on this machine")
