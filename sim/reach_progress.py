"""A measure of progress for Reach (`reward.kind: progress`): the reward knows where the block is, the policy does not."""

from __future__ import annotations

import numpy as np

from vla_rl.episode import Episode, Float64
from vla_rl.sim.reach_layout import top_of

UNIT = 0.1
"""Metres that count 1: about the distance at which an episode starts."""


def closeness(episode: Episode) -> Float64:
    """float64[T + 1]: minus the distance (in `UNIT`s) of the tip to the target, before every chunk and at the end.

    Raises ValueError for an episode of another suite, or one that never started.
    """
    if episode.spec.suite != "reach" or episode.final_observation is None:
        raise ValueError(f"{episode.spec.key}: closeness is defined for episodes of reach that started")
    target = top_of(np.asarray(episode.provenance["blocks"][episode.provenance["target"]]))
    observations = [*(step.observation for step in episode.steps), episode.final_observation]
    tips_T1X = np.array([observation.state[:3] for observation in observations], np.float64)
    return -np.linalg.norm(tips_T1X - target, axis=1) / UNIT
