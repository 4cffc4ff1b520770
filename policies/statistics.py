"""Statistics of a dataset's features: what normalisation needs, fixed before training and hashed.

`datasets/stats.py` computes them over all frames (true quantiles); processors read them; checkpoints carry them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.errors import UserError
from vla_rl.telemetry.files import read_json, write_json

STATE = "observation.state"
"""LeRobot's key of `Observation.state`."""
ACTION = "action"
"""LeRobot's key of the actions."""
_VECTORS = ("min", "max", "mean", "std", "q01", "q99")


class StatisticsError(UserError):
    """Statistics that are incomplete, contradictory, or do not fit the features they are used for."""


@dataclass(frozen=True)
class FeatureStats:
    """Per-dimension statistics of one feature, in the units of the environment.

    Ours are complete; published checkpoints may lack what their normalisation does not need (None).
    """

    min: tuple[float, ...] | None
    """Smallest value of each dimension."""
    max: tuple[float, ...] | None
    """Largest value."""
    mean: tuple[float, ...]
    """Mean over all frames."""
    std: tuple[float, ...]
    """Population standard deviation over all frames."""
    q01: tuple[float, ...] | None
    """True 1 % quantile over all frames (never a mean of per-episode quantiles)."""
    q99: tuple[float, ...] | None
    """True 99 % quantile over all frames."""
    count: int | None
    """Number of frames."""

    def __post_init__(self) -> None:
        known = [name for name in _VECTORS if getattr(self, name) is not None]
        for name in known:
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        lengths = {name: len(getattr(self, name)) for name in known}
        if len(set(lengths.values())) != 1:
            raise StatisticsError(f"statistics of one feature must have equal lengths, got {lengths}")
        wrong = [name for name in known if not np.all(np.isfinite(getattr(self, name)))]
        if wrong:
            raise StatisticsError(f"statistics must be finite, got { {name: getattr(self, name) for name in wrong} }")

    @property
    def dims(self) -> int:
        """Number of dimensions."""
        return len(self.mean)

    def vector(self, name: str) -> np.ndarray:
        """One statistic as float64[dims]. Raises StatisticsError where it is not known."""
        values = getattr(self, name)
        if values is None:
            known = ", ".join(vector for vector in _VECTORS if getattr(self, vector) is not None)
            raise StatisticsError(f"the normalisation needs {name!r}, and the statistics have only {known}; use another normalisation")
        return np.array(values, np.float64)

    @classmethod
    def from_values(cls, values_ND: np.ndarray) -> FeatureStats:
        """Statistics of all rows of float[N, D]. Raises StatisticsError when there are none."""
        values = np.asarray(values_ND, np.float64)
        if values.ndim != 2 or len(values) == 0:
            raise StatisticsError(f"statistics need float[N, D] with N >= 1, got shape {values.shape}")
        q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
        rows = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0), "q01": q01, "q99": q99}
        return cls(**{name: tuple(row.tolist()) for name, row in rows.items()}, count=len(values))

    @classmethod
    def from_dict(cls, feature: str, values: Mapping[str, Any], required: Sequence[str] = (*_VECTORS, "count")) -> FeatureStats:
        """Read a feature's entry of LeRobot's `stats.json`; further keys (q10, q50, ...) are not used.

        Raises StatisticsError naming the feature and what is missing of `required`; other statistics may be absent.
        """
        missing = [name for name in required if name not in values]
        if missing:
            raise StatisticsError(
                f"statistics of {feature!r} lack {', '.join(missing)} (they have {', '.join(sorted(values)) or 'nothing'}); "
                "compute them over all frames (`datasets.stats.compute_statistics`)"
            )
        vectors = {name: _vector(values.get(name)) for name in _VECTORS}
        count = values.get("count")
        return cls(**vectors, count=None if count is None else int(np.asarray(count).reshape(-1)[0]))  # pyright: ignore[reportArgumentType]


def _vector(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(np.asarray(values, np.float64).reshape(-1).tolist())


@dataclass(frozen=True)
class Statistics:
    """Statistics by feature name (LeRobot's keys)."""

    features: Mapping[str, FeatureStats]
    """Feature name -> its statistics."""

    def feature(self, name: str, dims: int) -> FeatureStats:
        """The statistics of `name`. Raises StatisticsError when they are absent or have other than `dims` dimensions."""
        if name not in self.features:
            raise StatisticsError(
                f"no statistics for feature {name!r}; there are statistics for {', '.join(sorted(self.features)) or 'nothing'}"
            )
        stats = self.features[name]
        if stats.dims != dims:
            raise StatisticsError(f"statistics of {name!r} have {stats.dims} dimensions, the feature has {dims}")
        return stats

    def require_only(self, known: Sequence[str]) -> None:
        """Raise StatisticsError for statistics that name no feature of `known`: they would be silently inert."""
        surplus = sorted(set(self.features) - set(known))
        if surplus:
            raise StatisticsError(f"statistics name features that do not exist: {', '.join(surplus)}; features are {', '.join(known)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in LeRobot's `stats.json` form (`count` as a list of one); what is not known is left out."""
        return {
            name: {key: list(value) if isinstance(value, tuple) else [value] for key, value in asdict(stats).items() if value is not None}
            for name, stats in sorted(self.features.items())
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]], complete: bool = True) -> Statistics:
        """Inverse of `to_dict`; also reads LeRobot's `meta/stats.json`. `complete` False needs mean and standard deviation only."""
        required = (*_VECTORS, "count") if complete else ("mean", "std")
        return cls({name: FeatureStats.from_dict(name, entry, required) for name, entry in values.items()})

    @property
    def sha256(self) -> str:
        """Hash of every number, for checkpoints and episodes."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write JSON atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote (or LeRobot's `stats.json`)."""
        return cls.from_dict(read_json(path))
