"""Envs that cost nothing, for the transport benchmark: the same bytes behind our contract and behind gymnasium's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import gymnasium
import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvSpec, Look, ResetReply

RESOLUTION = 256
"""Pixels of both views."""
NO_REWARD = np.zeros(1, np.float32)


class Frames:
    """Two pictures and a state, in which only a few bytes change: the number of the step.

    The pictures are overlapping windows of one random buffer, half a row apart, so that an env costs little memory traffic.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        shape, shift = (RESOLUTION, RESOLUTION, 3), 3 * RESOLUTION // 2
        pixels = random.integers(0, 256, 3 * RESOLUTION**2 + shift, dtype=np.uint8)
        windows = (pixels[:-shift], pixels[shift:])
        self.images = {view: window.reshape(shape) for view, window in zip(VIEWS, windows)}
        self.state = random.random(STATE_DIM, dtype=np.float32)
        self._counters = [window[:8].data.cast("Q") for window in windows]

    def stamp(self, step: int) -> None:
        """Make this the observation of `step` (at least 0)."""
        for counter in self._counters:
            counter[0] = step
        self.state[0] = step


class ZeroCostEnv:
    """Our contract."""

    def __init__(
        self, config: EnvConfig, preempt_requested: Callable[[], bool], worker: int = 0, gl_turn: AbstractContextManager[None] | None = None
    ) -> None:
        self.spec = EnvSpec("zero_cost", Conventions(), VIEWS, config.resolution, {})
        self._preempt_requested = preempt_requested
        self._frames, self._step = Frames(), 0

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        """Start counting at 0."""
        self._step = 0
        return ResetReply(0, spec, self._observation())

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        """One control step, whatever the chunk's length."""
        self._step += 1
        preempted = self._preempt_requested()
        timing = {"physics": 0.0, "render": 0.0, "step": 0.0}
        return ChunkReply(0, self._observation(), actions_CA[:1], NO_REWARD, False, False, False, preempted, timing=timing)

    def close(self) -> None:
        """Nothing to free."""

    def _observation(self) -> Observation:
        self._frames.stamp(self._step)
        return Observation(self._frames.images, self._frames.state, "")


class ZeroCostGymnasium(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Gymnasium's contract."""

    def __init__(self) -> None:
        picture = gymnasium.spaces.Box(0, 255, (RESOLUTION, RESOLUTION, 3), np.uint8)
        state = gymnasium.spaces.Box(-np.inf, np.inf, (STATE_DIM,), np.float32)
        self.observation_space: gymnasium.Space[Any] = gymnasium.spaces.Dict({**dict.fromkeys(VIEWS, picture), "state": state})
        self.action_space = gymnasium.spaces.Box(-1, 1, (ACTION_DIM,), np.float32)
        self._frames, self._step = Frames(), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start counting at 0."""
        self._step = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One step."""
        self._step += 1
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> dict[str, Any]:
        self._frames.stamp(self._step)
        return {**self._frames.images, "state": self._frames.state}
