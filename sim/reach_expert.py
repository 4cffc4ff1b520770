"""A scripted expert for Reach: straight to the block, from privileged positions."""

from __future__ import annotations

import numpy as np

from vla_rl.episode import ACTION_DIM, EpisodeSpec, Observation
from vla_rl.sim.experts.noise import ActionNoise
from vla_rl.sim.reach_layout import target_of

_GAIN = 50.0
"""Action units per metre of distance: full speed until 2 cm before the target."""


class ReachExpert:
    """Acts in one episode; `act` must be called once per control step, in order."""

    def __init__(self, spec: EpisodeSpec, noise: float, seed: int, burst_rate: float = 0.0, speed: float = 1.0) -> None:
        """noise: standard deviation of what is added to each translation (action units). See `ActionNoise` for bursts.
        speed: largest action it means to take along an axis, in (0, 1].

        Raises SpecError for a task or goal that Reach does not have.
        """
        self._target = f"{target_of(spec)}_block_pos"
        self._noise = ActionNoise(noise, burst_rate, seed)
        self._speed = speed

    def act(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """(action float32[7] to execute, label float32[7] as meant), from `observation.privileged` alone."""
        offset = observation.privileged[self._target] - observation.privileged["robot0_eef_pos"]
        label = np.zeros(ACTION_DIM, np.float32)
        label[:3] = self._speed * np.clip(_GAIN * offset, -1, 1)
        label[6] = -1.0
        return self._noise.perturb(label), label
