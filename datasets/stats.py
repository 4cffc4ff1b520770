"""Statistics of a dataset: true quantiles and moments over all control steps of all episodes, not per episode.

Shape legend: see `vla_rl/episode.py`; R control steps of all episodes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.episodes import load_steps
from vla_rl.datasets.frames import FileFrames
from vla_rl.datasets.lerobot_read import LeRobotInfo
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.datasets.tally import Tally, count_values
from vla_rl.episode import VIEWS
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.telemetry.files import read_json, write_json


def compute_statistics(dataset: EpisodeDataset) -> Statistics:
    """Statistics of `observation.state` and of `action` (the labels that the dataset trains on), one row per control step.

    Quantiles are exact (linear interpolation between order statistics, as `numpy.quantile`): all rows are in memory at
    once, 15 numbers each, which is 1.2 GB for ten million control steps.
    """
    actions_RA: np.ndarray = dataset.actions_RA
    return Statistics({STATE: FeatureStats.from_values(dataset.states_RS), ACTION: FeatureStats.from_values(actions_RA)})


def dataset_statistics(infos: Sequence[EpisodeInfo], pictures: bool = False) -> dict[str, dict[str, Any]]:
    """The same of executed actions and states, in the form of LeRobot's `stats.json`, in one pass; on request of pictures too."""
    tally, frames = Tally(), FileFrames(infos)
    for number, info in enumerate(infos):
        actions_NA, states_NS, _ = load_steps(info, labels=False)
        images = info.layout.images if isinstance(info, LeRobotInfo) else names.IMAGE_FEATURES
        tally.add_rows(info.layout.state if isinstance(info, LeRobotInfo) else STATE, states_NS)
        tally.add_rows(info.layout.action if isinstance(info, LeRobotInfo) else ACTION, actions_NA)
        if pictures:
            pictures_FVHWC = frames.read_episode(number)
            for column, view in enumerate(VIEWS):
                tally.add_pictures(images[view], count_values(pictures_FVHWC[:, column]), info.num_frames)
    return tally.statistics()


def write_statistics(folder: Path, statistics: dict[str, dict[str, Any]]) -> Path:
    """Put true statistics into `meta/stats.json` of a LeRobot folder; features that were not computed keep theirs."""
    path = folder / names.STATS_PATH
    stored = read_json(path) if path.is_file() else {}
    write_json(path, stored | statistics)
    return path
