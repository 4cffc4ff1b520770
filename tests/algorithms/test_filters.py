"""Group filters and refills: what the configured filter says, whatever the order in which groups end."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.filters import GroupFilter, Verdict, judge, plan_sampling
from vla_rl.config import ConfigError

KEPT, HARD, EASY = Verdict.KEPT, Verdict.TOO_HARD, Verdict.TOO_EASY


@pytest.mark.parametrize("successes", range(9))
def test_groups_of_8_with_bounds_of_a_tenth(successes: int):
    # SimpleVLA-RL: keep 0.1 <= rate <= 0.9, which of 8 is 1 to 7
    verdict = judge([True] * successes + [False] * (8 - successes), GroupFilter())
    assert verdict is (HARD if successes == 0 else EASY if successes == 8 else KEPT)


def test_bounds_are_inclusive_and_can_keep_everything():
    half = GroupFilter(lowest_success=0.5, highest_success=0.5)
    assert [judge(g, half) for g in ([True, False], [True, True], [False, False])] == [KEPT, EASY, HARD]
    everything = GroupFilter(lowest_success=0.0, highest_success=1.0)
    assert judge([True, True], everything) is KEPT and judge([False, False], everything) is KEPT


def test_crashed_episodes_leave_a_partial_group_or_none():
    assert judge([True, False, False], GroupFilter()) is KEPT
    assert judge([True], GroupFilter()) is judge([], GroupFilter()) is Verdict.INCOMPLETE


def test_refill_by_hand():
    refill = GroupFilter(rejected="refill", max_groups_factor=2.0)
    plan = plan_sampling([None, None, None], 3, refill)
    assert (plan.issue, plan.complete, plan.train) == (3, False, ())
    plan = plan_sampling([None, HARD, KEPT], 3, refill)
    assert (plan.issue, plan.complete) == (4, False)
    plan = plan_sampling([EASY, HARD, KEPT, KEPT, None], 3, refill)
    assert (plan.issue, plan.complete, plan.train) == (5, False, (2, 3))
    plan = plan_sampling([EASY, HARD, KEPT, KEPT, KEPT], 3, refill)
    assert (plan.issue, plan.complete, plan.train, plan.masked) == (5, True, (2, 3, 4), ())
    assert plan.counts == {"kept": 3, "too_hard": 1, "too_easy": 1, "incomplete": 0, "missing": 0}


def test_a_partial_batch_is_kept_where_the_budget_ends():
    plan = plan_sampling([EASY, HARD, KEPT, EASY], 2, GroupFilter(max_groups_factor=2.0))
    assert (plan.issue, plan.complete, plan.train) == (4, True, (2,))
    assert plan.counts["missing"] == 1


def test_the_most_groups_are_not_lost_to_the_rounding_of_a_float() -> None:
    """100 times 1.15 is 114.99999999999999 in floating point."""
    assert plan_sampling([EASY] * 100, 100, GroupFilter(rejected="refill", max_groups_factor=1.15)).issue == 115


def test_mask_and_drop_do_not_refill():
    verdicts = [EASY, KEPT, HARD, KEPT]
    mask = plan_sampling(verdicts, 4, GroupFilter(rejected="mask"))
    assert (mask.issue, mask.complete, mask.train, mask.masked) == (4, True, (0, 1, 2, 3), (0, 2))
    drop = plan_sampling(verdicts, 4, GroupFilter(rejected="drop"))
    assert (drop.issue, drop.complete, drop.train, drop.masked) == (4, True, (1, 3), ())


@settings(deadline=None, max_examples=60)
@given(
    outcomes=st.lists(st.sampled_from(list(Verdict)), min_size=40, max_size=40),
    wanted=st.integers(1, 8),
    workers=st.integers(1, 6),
    factor=st.sampled_from([1.0, 1.5, 5.0]),
    seed=st.integers(0, 1000),
)
def test_the_batch_does_not_depend_on_who_finishes_first(outcomes, wanted, workers, factor, seed):
    """Play a step with a random order of endings: the same groups are sampled as in spec order, none is thrown away."""
    group_filter = GroupFilter(max_groups_factor=factor)

    def play(order: random.Random | None) -> tuple[int, tuple[int, ...]]:
        verdicts: list[Verdict | None] = []
        while True:
            plan = plan_sampling(verdicts, wanted, group_filter)
            if plan.complete:
                return len(verdicts), plan.train
            running = [index for index, verdict in enumerate(verdicts) if verdict is None]
            while len(verdicts) < plan.issue and len(running) < workers:
                running.append(len(verdicts))
                verdicts.append(None)
            ends = running[0] if order is None else order.choice(running)
            verdicts[ends] = outcomes[ends]

    issued, train = play(None)
    assert play(random.Random(seed)) == (issued, train)
    kept = [index for index, verdict in enumerate(outcomes[:issued]) if verdict is KEPT]
    assert list(train) == kept and len(kept) <= wanted
    assert len(kept) == wanted or issued == int(wanted * factor)


def test_contradicting_bounds_are_refused():
    with pytest.raises(ConfigError, match=r"lowest_success is 0.9 and highest_success is 0.1"):
        GroupFilter(0.9, 0.1)
    with pytest.raises(ConfigError, match=r"max_groups_factor is 0.5; allowed: at least 1"):
        GroupFilter(max_groups_factor=0.5)
