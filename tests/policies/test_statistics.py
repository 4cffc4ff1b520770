"""Statistics of features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics, StatisticsError


def test_values_by_hand() -> None:
    values = np.stack([np.arange(101.0), np.full(101, 3.0)], 1)
    stats = FeatureStats.from_values(values)
    assert (stats.min, stats.max, stats.mean) == ((0.0, 3.0), (100.0, 3.0), (50.0, 3.0))
    assert (stats.q01, stats.q99, stats.count) == ((1.0, 3.0), (99.0, 3.0), 101)
    assert stats.std == pytest.approx((np.sqrt((101**2 - 1) / 12), 0.0))


def test_saved_statistics_come_back_with_the_same_hash(tmp_path: Path, statistics: Statistics) -> None:
    statistics.save(tmp_path / "stats.json")
    loaded = Statistics.load(tmp_path / "stats.json")
    assert loaded == statistics
    assert loaded.sha256 == statistics.sha256


def test_hash_sees_every_number(statistics: Statistics) -> None:
    values = statistics.to_dict()
    values[STATE]["q99"][3] += 1e-12
    assert Statistics.from_dict(values).sha256 != statistics.sha256


def test_missing_quantiles_are_named(statistics: Statistics) -> None:
    values = statistics.to_dict()
    del values[ACTION]["q01"], values[ACTION]["q99"]
    with pytest.raises(StatisticsError, match=r"statistics of 'action' lack q01, q99.*compute_statistics"):
        Statistics.from_dict(values)


def test_statistics_that_fit_no_feature_are_named(statistics: Statistics) -> None:
    with pytest.raises(StatisticsError, match="do not exist: action"):
        statistics.require_only([STATE])
    with pytest.raises(StatisticsError, match=r"no statistics for feature 'observation\.stat'"):
        statistics.feature("observation.stat", 8)
    with pytest.raises(StatisticsError, match=r"'observation\.state' have 8 dimensions, the feature has 7"):
        statistics.feature(STATE, 7)


def test_unequal_or_infinite_numbers_are_refused() -> None:
    good = FeatureStats.from_values(np.zeros((3, 2)))
    with pytest.raises(StatisticsError, match="equal lengths"):
        FeatureStats(good.min, good.max, good.mean, good.std, good.q01, (0.0,), 3)
    with pytest.raises(StatisticsError, match="finite"):
        FeatureStats.from_values(np.array([[np.nan]]))
    with pytest.raises(StatisticsError, match="N >= 1"):
        FeatureStats.from_values(np.zeros((0, 2)))
