"""A reward that a run of seconds can learn: how far the actions push along x."""

from __future__ import annotations

import numpy as np

from vla_rl.episode import Episode, Float32


def along_x(episode: Episode) -> Float32:
    """float32[N]: the first number of every executed action, in [-1, 1]."""
    return np.concatenate([step.executed_EA[:, 0] for step in episode.steps]).astype(np.float32)
