"""Episodes of any format by their `EpisodeInfo`: the numbers that training takes, and whole episodes.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode.
"""

from __future__ import annotations

import numpy as np

from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.files import array, open_file, subgroup
from vla_rl.datasets.hdf5 import observed_states, read_episode
from vla_rl.datasets.lerobot_read import LeRobotInfo, read_interventions, read_lerobot_episode, read_steps
from vla_rl.episode import Bool, Episode, Float32, Int64


def load_episode(info: EpisodeInfo) -> Episode:
    """A stored episode with its pictures. Raises DatasetError for a damaged file."""
    return read_lerobot_episode(info) if isinstance(info, LeRobotInfo) else read_episode(info.path, info.demo)


def load_steps(info: EpisodeInfo, labels: bool) -> tuple[Float32, Float32, Int64]:
    """float32[N, 7] clean labels (or executed actions), float32[N, 8] states before them, int64[F] control steps with pictures.

    Raises DatasetError for a damaged file.
    """
    if isinstance(info, LeRobotInfo):
        return read_steps(info, labels)
    with open_file(info.path) as file:
        demo = subgroup(file, f"data/{info.demo}")
        actions_NA = array(demo, "action_labels" if labels else "actions").astype(np.float32)
        return actions_NA, observed_states(subgroup(demo, "obs")), array(demo, "obs/frame_index")


def load_interventions(info: EpisodeInfo) -> Bool:
    """bool[N]: the actions that a person (or the scripted operator) chose; all False in datasets that do not say. Raises DatasetError."""
    if isinstance(info, LeRobotInfo):
        return read_interventions(info)
    with open_file(info.path) as file:
        return array(subgroup(file, f"data/{info.demo}"), "intervention").astype(np.bool_)


def load_actions(info: EpisodeInfo) -> Float32:
    """float32[N, 7]: the executed actions."""
    return load_steps(info, labels=False)[0]
