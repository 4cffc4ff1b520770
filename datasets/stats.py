"""Statistics of a dataset: true quantiles and moments over all control steps of all episodes, not per episode.

Shape legend: see `vla_rl/episode.py`; R control steps of all episodes together.
"""

from __future__ import annotations

import numpy as np

from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics


def compute_statistics(dataset: EpisodeDataset) -> Statistics:
    """Statistics of `observation.state` and of `action` (the labels that the dataset trains on), one row per control step.

    Quantiles are exact (linear interpolation between order statistics, as `numpy.quantile`): all rows are in memory at
    once, 15 numbers each, which is 1.2 GB for ten million control steps.
    """
    actions_RA: np.ndarray = dataset.actions_RA
    return Statistics({STATE: FeatureStats.from_values(dataset.states_RS), ACTION: FeatureStats.from_values(actions_RA)})
