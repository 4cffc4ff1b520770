"""Statistics in one pass over the data, exact: quantiles of vectors from all their rows, of pictures from counts of their 256 values.

A mean of per-episode quantiles is another number (LeRobot #4156), and so is an envelope of them.

Shape legend: see `vla_rl/episode.py`; F pictures, B values a byte can have (256), Q quantiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.episode import Int64, UInt8

QUANTILES: Mapping[str, float] = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""Those of LeRobot's `stats.json`."""
_VALUES_B = np.arange(256)


def count_values(pictures_FHWC: UInt8) -> Int64:
    """int64[3, 256]: how often each channel has each value."""
    channels = pictures_FHWC.reshape(-1, 3)
    return np.stack([np.bincount(channels[:, channel], minlength=256) for channel in range(3)]).astype(np.int64)


class Tally:
    """What has been seen of each feature: rows of vectors (kept), values of pictures (counted)."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = defaultdict(list)
        self._counts: dict[str, Int64] = {}
        self._pictures: dict[str, int] = defaultdict(int)

    def add_rows(self, feature: str, rows: np.ndarray) -> None:
        """Rows [N, D] or [N] of a vector or a number."""
        self._rows[feature].append(rows.reshape(len(rows), -1))

    def add_pictures(self, feature: str, counts_3B: Int64, pictures: int) -> None:
        """The value counts of some pictures, see `count_values`."""
        self._counts[feature] = self._counts.get(feature, np.zeros((3, 256), np.int64)) + counts_3B
        self._pictures[feature] += pictures

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Feature -> statistic -> value, in the form of LeRobot's `stats.json`: pictures have shape (3, 1, 1) and lie in [0, 1]."""
        vectors = {feature: vector_statistics(np.concatenate(parts)) for feature, parts in self._rows.items()}
        pictures = {feature: picture_statistics(counts, self._pictures[feature]) for feature, counts in self._counts.items()}
        return pictures | vectors


def vector_statistics(rows_ND: np.ndarray) -> dict[str, list[Any]]:
    """Moments, range and quantiles (`numpy.quantile`, linear) of every column."""
    values = np.asarray(rows_ND, np.float64)
    quantiles_QD = np.quantile(values, list(QUANTILES.values()), axis=0)
    named = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    named |= dict(zip(QUANTILES, quantiles_QD))
    return {name: row.tolist() for name, row in named.items()} | {"count": [len(values)]}


def picture_statistics(counts_3B: Int64, pictures: int) -> dict[str, list[Any]]:
    """The same of every colour channel, over all pixels, divided by 255; `count` is the number of pictures."""
    totals_3 = counts_3B.sum(1)
    mean_3 = counts_3B @ _VALUES_B / totals_3
    variance_3 = counts_3B @ (_VALUES_B.astype(np.float64) ** 2) / totals_3 - mean_3**2
    seen_3B = counts_3B > 0
    named = {"min": seen_3B.argmax(1), "max": 255 - seen_3B[:, ::-1].argmax(1), "mean": mean_3, "std": np.sqrt(np.maximum(variance_3, 0))}
    named |= {name: np.array([_quantile(counts, share) for counts in counts_3B]) for name, share in QUANTILES.items()}
    return {name: (row / 255).reshape(3, 1, 1).tolist() for name, row in named.items()} | {"count": [pictures]}


def _quantile(counts_B: Int64, share: float) -> float:
    """`numpy.quantile` of the values that `counts_B` counts."""
    below = np.cumsum(counts_B)
    rank = share * (below[-1] - 1)
    low, high = (int(np.searchsorted(below, order, side="right")) for order in (np.floor(rank), np.ceil(rank)))
    return low + (high - low) * (rank - np.floor(rank))
