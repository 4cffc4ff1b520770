"""Statistics against hand numbers, scipy, and a slow numerical reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest

from vla_rl.eval.statistics import (
    clustered_bootstrap,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_difference_interval,
    paired_minimum_detectable_effect,
    trials_to_detect,
    wilson_interval,
)

counts = st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(475, 500, 92.7, 96.6), (495, 500, 97.7, 99.6), (500, 500, 99.2, 100.0), (10, 10, 72.2, 100.0), (0, 10, 0.0, 27.8)],
)
def test_wilson_gives_the_published_numbers(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, trials)
    assert (round(100 * interval.low, 1), round(100 * interval.high, 1)) == (low, high)


@settings(deadline=None)
@given(counts)
def test_wilson_equals_scipy(count: tuple[int, int]) -> None:
    successes, trials = count
    reference = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx((reference.low, reference.high), abs=1e-12)


@settings(deadline=None)
@given(counts)
def test_wilson_contains_the_rate_and_mirrors(count: tuple[int, int]) -> None:
    successes, trials = count
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    mirrored = wilson_interval(trials - successes, trials)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=1e-12)


def test_wilson_without_trials_knows_nothing_and_refuses_nonsense() -> None:
    assert wilson_interval(0, 0) == (0, 1)
    with pytest.raises(ValueError, match="successes=3 of trials=2"):
        wilson_interval(3, 2)
    with pytest.raises(ValueError, match="confidence=95"):
        wilson_interval(1, 2, confidence=95)


def test_mcnemar_by_hand() -> None:
    assert mcnemar_exact(0, 0) == 1
    assert mcnemar_exact(5, 0) == 2 / 32
    assert mcnemar_exact(1, 3) == 2 * (1 + 4) / 16


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_equals_scipy_and_is_symmetric(wins: int, losses: int) -> None:
    reference = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert mcnemar_exact(wins, losses) == pytest.approx(reference, rel=1e-9)
    assert mcnemar_exact(wins, losses) == mcnemar_exact(losses, wins)


def _score_reference(wins: int, losses: int, pairs: int, difference: float) -> float:
    """The squared score statistic with the nuisance rate found by numerical maximisation of the likelihood."""
    concordant = pairs - wins - losses

    def negative_log_likelihood(loss_rate: float) -> float:
        rates = np.array([loss_rate + difference, loss_rate, 1 - 2 * loss_rate - difference])
        observed = np.array([wins, losses, concordant])
        return -float(np.sum(observed * np.log(np.maximum(rates, 1e-300))))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    loss_rate = minimize_scalar(negative_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = pairs * (2 * loss_rate + difference - difference**2)
    return (wins - losses - pairs * difference) ** 2 / variance


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 100))
def test_tango_inverts_the_score_test(wins: int, losses: int, concordant: int) -> None:
    pairs = wins + losses + concordant
    for end in paired_difference_interval(wins, losses, pairs):
        # The bounded minimiser stops within about 1e-8 of the nuisance rate, which moves z^2 by less than 1e-3.
        assert _score_reference(wins, losses, pairs, end) == pytest.approx(1.959964**2, rel=1e-3)


def test_tango_with_one_discordant_pair() -> None:
    """Few disagreements are where Wald's interval fails; the design is Tango's (1998): 44 pairs, one loss, no win."""
    low, high = paired_difference_interval(wins=0, losses=1, pairs=44, confidence=0.9)
    assert low < -1 / 44 < high
    assert _score_reference(0, 1, 44, high) == pytest.approx(1.644854**2, rel=1e-3)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 100))
def test_tango_contains_the_estimate_and_mirrors(wins: int, losses: int, concordant: int) -> None:
    pairs = wins + losses + concordant
    low, high = paired_difference_interval(wins, losses, pairs)
    assert -1 <= low <= high <= 1
    if pairs:
        assert low - 1e-12 <= (wins - losses) / pairs <= high + 1e-12
    mirrored = paired_difference_interval(losses, wins, pairs)
    assert (-mirrored.high, -mirrored.low) == pytest.approx((low, high), abs=1e-9)


def test_bootstrap_is_seeded_and_has_no_width_when_tasks_agree() -> None:
    tasks = [[True] * 8 + [False] * 2, [True] * 3 + [False] * 7, [True] * 10]
    assert clustered_bootstrap(tasks, seed=3) == clustered_bootstrap(tasks, seed=3)
    assert clustered_bootstrap([[True, False]] * 4) == (0.5, 0.5)
    low, high = clustered_bootstrap(tasks)
    assert 0.3 <= low < np.mean([0.8, 0.3, 1.0]) < high <= 1


def test_bootstrap_of_two_tasks_by_hand() -> None:
    """Two tasks at 0 and 1: means 0, 1/2, 1 with probability 1/4, 1/2, 1/4, so the 2.5 and 97.5 % quantiles are 0 and 1."""
    assert clustered_bootstrap([[False], [True]]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="at least one episode"):
        clustered_bootstrap([[True], []])


def test_planning_numbers() -> None:
    assert trials_to_detect(0.94, 0.96) == 1861
    effect = minimum_detectable_effect(0.94, 1861)
    assert effect == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(ValueError, match="cannot be told apart"):
        trials_to_detect(0.5, 0.5)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_effect_from_a_perfect_rate_by_hand(rate: float) -> None:
    """z^2 d (1 - d) / n = d^2, so d = z^2 / (n + z^2) with z = 1.96 + 0.8416."""
    assert minimum_detectable_effect(rate, 50) == pytest.approx(2.801585**2 / (50 + 2.801585**2), rel=1e-5)


@settings(deadline=None)
@given(st.floats(0.01, 0.99), st.integers(20, 5000))
def test_more_episodes_detect_smaller_effects(rate: float, trials: int) -> None:
    assert minimum_detectable_effect(rate, 2 * trials) <= minimum_detectable_effect(rate, trials)


def test_paired_effect_by_hand() -> None:
    """w = 0.1, n = 500: (1.96 sqrt(0.1) + 0.8416 sqrt(0.1 - d^2))^2 / d^2 = 500 at d = 0.0395."""
    effect = paired_minimum_detectable_effect(50, 500)
    needed = (1.959964 * 0.1**0.5 + 0.841621 * (0.1 - effect**2) ** 0.5) ** 2 / effect**2
    assert needed == pytest.approx(500, rel=1e-4)
    assert effect == pytest.approx(0.0395, abs=1e-4)
    assert paired_minimum_detectable_effect(1, 500) == 1.0
