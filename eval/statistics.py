"""Intervals, paired tests and planning numbers for success rates.

Everything here is a pure function of counts or of boolean outcomes. Rates are fractions in [0, 1],
intervals are two-sided with a confidence of 0.95 unless told otherwise.

Notation of a paired comparison of runs A and B over the same specs:
    wins      A failed and B succeeded        losses  A succeeded and B failed
    n         all pairs                       difference = rate(B) - rate(A) = (wins - losses) / n
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A closed interval of rates, or of differences of rates."""

    low: float
    high: float


def _check_counts(successes: int, trials: int) -> None:
    if trials < 0 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} of trials={trials}: need 0 <= successes <= trials")


def _quantile(confidence: float) -> float:
    """The two-sided normal quantile, 1.96 for a confidence of 0.95."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1, for example 0.95")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a rate (Wilson 1927, without continuity correction).

    No trials give the whole of [0, 1]. Raises ValueError for impossible counts.
    """
    _check_counts(successes, trials)
    if trials == 0:
        return Interval(0.0, 1.0)
    z = _quantile(confidence)
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At the ends the formula gives exactly 0 and 1, up to rounding.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low, high)


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact p-value of McNemar's test: are wins and losses equally likely?

    Under the null hypothesis wins are Binomial(wins + losses, 1/2); the p-value doubles the smaller tail, at most 1.
    """
    if wins < 0 or losses < 0:
        raise ValueError(f"wins={wins} and losses={losses} must not be negative")
    discordant = wins + losses
    tail = sum(comb(discordant, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def paired_difference_interval(wins: int, losses: int, pairs: int, confidence: float = 0.95) -> Interval:
    """Tango's score interval of rate(B) - rate(A) over pairs (Tango, Statistics in Medicine 17, 1998, 891-908).

    It inverts the score test of "the difference is d" with the nuisance parameter at its maximum-likelihood value
    under d, so that it is right for few pairs and for zero discordant ones. No pairs give [-1, 1].
    """
    if wins < 0 or losses < 0 or wins + losses > pairs:
        raise ValueError(f"wins={wins} and losses={losses} of pairs={pairs}: need wins + losses <= pairs, none negative")
    if pairs == 0:
        return Interval(-1.0, 1.0)
    z = _quantile(confidence)
    estimate = (wins - losses) / pairs
    low = _bisect(lambda d: _tango_score(wins, losses, pairs, d) - z, -1.0, estimate)
    high = _bisect(lambda d: _tango_score(wins, losses, pairs, d) + z, estimate, 1.0)
    return Interval(low, high)


def _tango_score(wins: int, losses: int, pairs: int, difference: float) -> float:
    """The score statistic, approximately N(0, 1) when the true difference is `difference`; it falls as that grows."""
    numerator = wins - losses - pairs * difference
    a = 2 * pairs
    b = -wins - losses + (2 * pairs - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    loss_rate = (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = pairs * (2 * loss_rate + difference * (1 - difference))
    if variance <= 0:
        return 0.0 if numerator == 0 else float("inf") if numerator > 0 else float("-inf")
    return numerator / sqrt(variance)


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """The zero of a falling function between two points, or the end that is nearest to it."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(80):  # 80 halvings of at most 2 reach the resolution of a float64
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def clustered_bootstrap(
    outcomes_by_task: Sequence[Sequence[bool]], seed: int = 0, draws: int = 10_000, confidence: float = 0.95
) -> Interval:
    """Percentile interval of the mean of task rates, resampling whole tasks with replacement.

    Episodes of one task succeed and fail together, so the task is the unit that is drawn. It answers "how would the
    suite's mean move had the tasks been others of their kind", and is wider than an interval over pooled episodes.
    The same seed gives the same interval. Raises ValueError without tasks or with a task without episodes.
    """
    if not outcomes_by_task or not all(len(outcomes) for outcomes in outcomes_by_task):
        raise ValueError("the bootstrap needs at least one task, and at least one episode in each task")
    rates_T = np.array([np.mean(outcomes) for outcomes in outcomes_by_task])
    generator = np.random.default_rng(seed)
    chosen_DT = generator.integers(len(rates_T), size=(draws, len(rates_T)))
    means_D = rates_T[chosen_DT].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means_D, [tail, 1 - tail])
    return Interval(float(low), float(high))


def trials_to_detect(first: float, second: float, power: float = 0.8, significance: float = 0.05) -> int:
    """Episodes per run, unpaired, with which a two-sided test tells two rates apart with the given power.

    n = (z_significance + z_power)^2 (p1 q1 + p2 q2) / (p1 - p2)^2 (Fleiss, Statistical Methods for Rates and
    Proportions). From 0.94 to 0.96 it takes 1,861.
    """
    if first == second:
        raise ValueError(f"two equal rates ({first}) cannot be told apart by any number of episodes")
    z = NormalDist().inv_cdf(1 - significance / 2) + NormalDist().inv_cdf(power)
    variance = first * (1 - first) + second * (1 - second)
    return ceil(z * z * variance / (first - second) ** 2)


def minimum_detectable_effect(rate: float, trials: int, power: float = 0.8, significance: float = 0.05) -> float:
    """The smallest difference from `rate` that `trials` unpaired episodes per run detect with the given power.

    It is the smaller of the detectable rise and the detectable fall (near 1 only a fall is possible); 1.0 if
    nothing is detectable. Inverts `trials_to_detect`.
    """
    if trials < 1 or not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} must lie in [0, 1] and trials={trials} must be at least 1")
    z = NormalDist().inv_cdf(1 - significance / 2) + NormalDist().inv_cdf(power)

    def undetected(effect: float, other: float) -> float:
        return z * sqrt((rate * (1 - rate) + other * (1 - other)) / trials) - effect

    rise = _first_detectable(lambda d: undetected(d, rate + d), 1 - rate)
    fall = _first_detectable(lambda d: undetected(d, rate - d), rate)
    return min(rise, fall)


def _first_detectable(undetected: Callable[[float], float], largest: float) -> float:
    if largest <= 0 or undetected(largest) > 0:
        return 1.0
    return _bisect(undetected, 1e-12, largest)  # at 0 itself a rate of 0 or 1 has no variance, which is no detection


def paired_minimum_detectable_effect(discordant: int, pairs: int, power: float = 0.8, significance: float = 0.05) -> float:
    """The smallest difference that McNemar's test on `pairs` pairs detects, given how many of them disagree.

    Inverts n = (z_significance sqrt(w) + z_power sqrt(w - d^2))^2 / d^2 with w the discordant share (Connett, Smith
    and McHugh, Statistics in Medicine 6, 1987). With few discordant pairs not even their whole share is
    detectable; then it is 1.0.
    """
    _check_counts(discordant, pairs)
    if pairs == 0:
        return 1.0
    share = discordant / pairs
    z_significance, z_power = NormalDist().inv_cdf(1 - significance / 2), NormalDist().inv_cdf(power)

    def undetected(effect: float) -> float:
        needed = z_significance * sqrt(share) + z_power * sqrt(max(0.0, share - effect * effect))
        return needed / sqrt(pairs) - effect

    return _first_detectable(undetected, share)
