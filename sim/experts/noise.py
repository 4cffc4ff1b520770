"""Mistakes for a demonstrator: what is executed differs from what is meant.

Independent Gaussian noise is forgotten by the controller within a few steps. A policy's own mistakes last as long as
its chunk, so bursts push in one direction for several steps and let the expert show how to come back.
"""

from __future__ import annotations

import numpy as np

BURST_STEPS = (3, 8)
"""Shortest and longest burst (control steps)."""


class ActionNoise:
    """Deterministic from its seed; one instance per episode."""

    def __init__(self, std: float, burst_rate: float, seed: int) -> None:
        self.std = std
        self.burst_rate = burst_rate
        self.random = np.random.default_rng(seed)
        self.burst = np.zeros(3)
        self.remaining = 0

    def perturb(self, action: np.ndarray) -> np.ndarray:
        """float32[7]: `action` with noise on its translation, clipped to [-1, 1]; rotation and gripper stay."""
        if self.std == 0 and self.burst_rate == 0:
            return action
        executed = action.copy()
        executed[:3] += self.std * self.random.standard_normal(3) + self._push()
        return np.clip(executed, -1, 1).astype(np.float32)

    def _push(self) -> np.ndarray:
        """The present burst's translation (action units), zero between bursts."""
        if self.remaining == 0 and self.random.random() < self.burst_rate:
            direction = self.random.standard_normal(3)
            self.burst = self.random.uniform(0.5, 1.0) * direction / np.linalg.norm(direction)
            self.remaining = int(self.random.integers(BURST_STEPS[0], BURST_STEPS[1] + 1))
        if self.remaining == 0:
            return np.zeros(3)
        self.remaining -= 1
        return self.burst
