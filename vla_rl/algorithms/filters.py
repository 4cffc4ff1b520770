"""Which groups are trained on, and how many more to sample: pure decisions, the same in whatever order episodes end.

Shape legend: G episodes of a group.

A group whose episodes all succeed, or all fail, has no group advantage. `refill` puts one new group at the end of the list of specs for
each rejected one: the number to issue is then the smallest m with m = wanted + rejected among the first m, whoever finishes first.
So no surplus is sampled and thrown away, nothing depends on timing, and the state to checkpoint is the outcomes in spec order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from vla_rl.config import ConfigError

Rejected = Literal["refill", "mask", "drop"]


class Verdict(str, Enum):
    """What a group is worth to the learner."""

    KEPT = "kept"
    """Its success rate lies within the bounds."""
    TOO_HARD = "too_hard"
    """Below the lower bound."""
    TOO_EASY = "too_easy"
    """Above the upper bound."""
    INCOMPLETE = "incomplete"
    """Fewer than two of its episodes ended without a crash: nothing to compare."""


@dataclass(frozen=True)
class GroupFilter:
    """Which groups of equal scenes are trained on."""

    lowest_success: float = 0.1
    """Smallest success rate that is kept, in [0, 1]; 0 keeps groups that always fail."""
    highest_success: float = 0.9
    """Largest success rate that is kept, in [0, 1]; 1 keeps groups that always succeed."""
    rejected: Rejected = "refill"
    """`refill`: left out, and a new group is sampled for each, up to `max_groups_factor`. `drop`: left out, the batch is smaller.
    `mask`: stays in the batch with weight 0 in sum and divisor, so that minibatches keep their shapes (the critic sees nothing of it)."""
    max_groups_factor: float = 3.0
    """`refill` samples at most this many times the wanted groups in a step; at least 1. The batch is then partial, and kept."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest_success <= self.highest_success <= 1:
            raise ConfigError(
                f"group.filter.lowest_success is {self.lowest_success} and highest_success is {self.highest_success}; "
                "they must satisfy 0 <= lowest_success <= highest_success <= 1"
            )
        if not self.max_groups_factor >= 1:
            raise ConfigError(f"group.filter.max_groups_factor is {self.max_groups_factor}; allowed: at least 1")


@dataclass(frozen=True)
class SamplingPlan:
    """Where a step's sampling stands; all indices are positions in spec order."""

    issue: int
    """Groups that the step should have handed out by now, in all."""
    complete: bool
    """Every issued group has ended: the step can be trained on."""
    train: tuple[int, ...]
    """Groups that enter the batch (with `mask`, the rejected ones too)."""
    masked: tuple[int, ...]
    """Those of `train` whose weight is 0."""
    counts: dict[str, int]
    """Ended groups by `Verdict`, and `missing`: how many kept groups the batch lacks of the wanted number."""


def judge(success_G: Sequence[bool], group_filter: GroupFilter) -> Verdict:
    """The verdict on a group from the episodes that ended without a crash; bounds are inclusive."""
    if len(success_G) < 2:
        return Verdict.INCOMPLETE
    rate = sum(success_G) / len(success_G)
    if rate < group_filter.lowest_success:
        return Verdict.TOO_HARD
    return Verdict.TOO_EASY if rate > group_filter.highest_success else Verdict.KEPT


def plan_sampling(verdicts: Sequence[Verdict | None], wanted: int, group_filter: GroupFilter) -> SamplingPlan:
    """What to do next, from the verdicts of the issued groups in spec order (None: still running).

    Start with `[None] * wanted`; whenever a group ends, ask again, and issue specs until there are `issue` groups.
    """
    ended = [verdict for verdict in verdicts if verdict is not None]
    kept = tuple(index for index, verdict in enumerate(verdicts) if verdict is Verdict.KEPT)
    rejected = tuple(index for index, verdict in enumerate(verdicts) if verdict not in (None, Verdict.KEPT))
    issue = wanted
    if group_filter.rejected == "refill":
        issue = min(wanted + len(rejected), int(round(wanted * group_filter.max_groups_factor, 6)))  # 100 times 1.15 is 115
    masked = rejected if group_filter.rejected == "mask" else ()
    counts = {verdict.value: ended.count(verdict) for verdict in Verdict} | {"missing": wanted - len(kept)}
    return SamplingPlan(
        issue=issue,
        complete=len(ended) == len(verdicts) >= issue,
        train=tuple(sorted((*kept, *masked))),
        masked=masked,
        counts=counts,
    )
