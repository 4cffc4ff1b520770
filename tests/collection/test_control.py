"""Who is in control: rules that hold whatever keys two operators press, in any order, while pages close and takes end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vla_rl.collection.control import BY_OPERATOR, SKIPPED, UNDONE, AbsenceRule, Control, Driver, Refused
from vla_rl.episode import Outcome

ENVS = st.integers(0, 2)
OPERATORS = st.sampled_from(["ada", "bob"])
OUTCOMES = st.sampled_from([Outcome.SUCCESS, Outcome.FAILURE, Outcome.DISCARDED])


class TwoOperators(RuleBasedStateMachine):
    """Three environments, two people; the loop's part is played by rules too."""

    def __init__(self) -> None:
        super().__init__()
        self.control = Control(3, has_policy=True, absence=AbsenceRule(wait_s=5, then="hand_back"))
        self.now_s = 0.0
        self.takes = 0
        self.to_resume: list[str] = []
        """Takes whose verdict was undone after they had ended, with the operator: they start again."""
        self.outcomes: dict[str, int] = {}

    def _try(self, env: int, call: object, *arguments: object) -> bool:
        """Carry out a command: it changes no other env, and nothing at all if it is refused."""
        before = [repr(state) for state in self.control.envs]
        try:
            call(*arguments)  # type: ignore[operator]
        except Refused:
            assert [repr(state) for state in self.control.envs] == before, "a refused command changes nothing"
            return False
        changed = {place for place, state in enumerate(self.control.envs) if repr(state) != before[place]}
        assert changed <= {env}, f"a command for env {env} changed {changed}"
        return True

    @rule(operator=OPERATORS)
    def join(self, operator: str) -> None:
        self.control.join(operator)

    @rule(operator=OPERATORS)
    def leave(self, operator: str) -> None:
        held = [state.take for state in self.control.envs if state.holder == operator]
        self.control.leave(operator, self.now_s)
        waiting = [state.take for state in self.control.envs if state.holder == operator and state.driver is Driver.WAITING]
        assert waiting == held, "what an absent operator holds stands still and is not lost"

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.control.expire(self.now_s)
        assert all(s.absent_since is None or self.now_s - s.absent_since < 5 for s in self.control.envs)

    @rule(env=ENVS, operator=OPERATORS)
    def take_over(self, env: int, operator: str) -> None:
        holder, take = self.control.envs[env].holder, self.control.envs[env].take
        done = self._try(env, self.control.take_over, env, operator)
        allowed = operator in self.control.present and holder in ("", operator) and take and self.control.verdict(env) is None
        assert done == bool(allowed)
        if done:
            assert (self.control.driver(env), self.control.envs[env].holder) == (Driver.OPERATOR, operator)

    @rule(env=ENVS, operator=OPERATORS)
    def hand_back(self, env: int, operator: str) -> None:
        held = self.control.envs[env].holder == operator and operator in self.control.present
        assert self._try(env, self.control.hand_back, env, operator) == held

    @rule(env=ENVS, operator=OPERATORS, outcome=OUTCOMES)
    def judge(self, env: int, operator: str, outcome: Outcome) -> None:
        if self._try(env, self.control.judge, env, operator, outcome):
            assert self.control.verdict(env) is not None and self.control.driver(env) is Driver.WAITING

    @rule(env=ENVS, operator=OPERATORS)
    def skip(self, env: int, operator: str) -> None:
        self._try(env, self.control.skip, env, operator)

    @rule(operator=OPERATORS)
    def undo(self, operator: str) -> None:
        running = {state.take for state in self.control.envs}
        try:
            take = self.control.undo(operator)
        except Refused:
            return
        if take not in running:
            assert take in self.outcomes, "only a take that ended comes back"
            self.to_resume.append(take)

    @precondition(lambda self: any(not state.take for state in self.control.envs))
    @rule()
    def loop_starts_a_take(self) -> None:
        env = next(place for place, state in enumerate(self.control.envs) if not state.take)
        if self.to_resume:
            take = self.to_resume.pop(0)
            del self.outcomes[take]
            self.control.started(env, take)
            assert self.control.driver(env) is Driver.WAITING and self.control.envs[env].holder, "it waits for the person who undid"
        else:
            self.takes += 1
            self.control.started(env, f"take {self.takes}")
            assert self.control.driver(env) is Driver.POLICY

    @rule(env=ENVS, steps=st.integers(1, 8))
    def loop_steps(self, env: int, steps: int) -> None:
        if self.control.envs[env].take and self.control.driver(env) is not Driver.WAITING:
            self.control.stepped(env, steps)

    @rule(env=ENVS)
    def loop_ends_what_is_judged(self, env: int) -> None:
        if self.control.verdict(env) is not None:
            self._end(env)

    @rule(env=ENVS)
    def simulator_ends_a_take(self, env: int) -> None:
        """Success or the time limit comes with an action, also in the same step as a verdict."""
        if self.control.envs[env].take:
            self._end(env)

    def _end(self, env: int) -> None:
        take = self.control.envs[env].take
        self.outcomes[take] = self.outcomes.get(take, 0) + 1
        self.control.ended(env)

    @invariant()
    def every_take_ends_once(self) -> None:
        assert all(count == 1 for count in self.outcomes.values())

    @invariant()
    def nobody_drives_without_right(self) -> None:
        for env, state in enumerate(self.control.envs):
            driver = self.control.driver(env)
            if driver is Driver.OPERATOR:
                assert state.holder in self.control.present and state.absent_since is None
            if driver is Driver.POLICY:
                assert not state.holder and state.verdict is None
            if not state.take or state.verdict is not None:
                assert driver is Driver.WAITING


TestTwoOperators = TwoOperators.TestCase
TestTwoOperators.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def running(has_policy: bool = True, **absence: object) -> Control:
    control = Control(2, has_policy, AbsenceRule(**absence))  # type: ignore[arg-type]
    control.join("ada")
    for env in range(2):
        control.started(env, f"first {env}")
        control.stepped(env, 3)
    return control


def test_taking_over_one_leaves_the_other_to_the_policy() -> None:
    control = running()
    control.take_over(0, "ada")
    assert (control.driver(0), control.driver(1)) == (Driver.OPERATOR, Driver.POLICY)
    control.hand_back(0, "ada")
    assert control.driver(0) is Driver.POLICY and not control.envs[0].holder


def test_a_second_operator_is_refused_with_the_holders_name() -> None:
    control = running()
    control.join("bob")
    control.take_over(0, "ada")
    with pytest.raises(Refused, match="env 0 is held by ada"):
        control.take_over(0, "bob")
    with pytest.raises(Refused, match="env 0 is held by ada"):
        control.judge(0, "bob", Outcome.FAILURE)


@pytest.mark.parametrize(
    ("then", "driver", "holder", "ends"),
    [("hand_back", Driver.POLICY, "", False), ("discard", Driver.WAITING, "", True), ("wait", Driver.WAITING, "ada", False)],
)
def test_an_absent_operators_env_waits_and_then_follows_the_rule(then: str, driver: Driver, holder: str, ends: bool) -> None:
    control = running(wait_s=10, then=then)
    control.take_over(0, "ada")
    control.leave("ada", 100)
    control.expire(109)
    assert control.driver(0) is Driver.WAITING and control.envs[0].holder == "ada"
    control.expire(110)
    assert (control.driver(0), control.envs[0].holder, control.verdict(0) is not None) == (driver, holder, ends)


def test_who_comes_back_in_time_goes_on() -> None:
    control = running(wait_s=10)
    control.take_over(0, "ada")
    control.leave("ada", 100)
    control.join("ada")
    control.expire(1000)
    assert control.envs[0].holder == "ada" and control.driver(0) is Driver.WAITING, "it waits until the hand is back on the keys"
    control.take_over(0, "ada")
    assert control.driver(0) is Driver.OPERATOR


def test_undo_brings_the_take_back_and_gives_up_the_next_one() -> None:
    control = running()
    control.judge(0, "ada", Outcome.FAILURE)
    assert control.verdict(0) is not None and control.verdict(0).reason == BY_OPERATOR  # type: ignore[union-attr]
    control.ended(0)
    control.started(0, "second")
    assert control.undo("ada") == "first 0"
    assert control.verdict(0) is not None and control.verdict(0).reason == UNDONE  # type: ignore[union-attr]
    control.ended(0)
    control.started(0, "first 0")
    assert control.envs[0].holder == "ada" and control.driver(0) is Driver.WAITING
    with pytest.raises(Refused, match="no verdict of yours"):
        control.undo("ada")


def test_undo_before_the_loop_has_acted_is_as_if_nothing_had_been_pressed() -> None:
    control = running()
    control.take_over(0, "ada")
    control.judge(0, "ada", Outcome.DISCARDED)
    assert control.undo("ada") == "first 0"
    assert control.verdict(0) is None and control.envs[0].holder == "ada"


def test_nothing_happened_yet_is_no_outcome_but_can_be_skipped() -> None:
    control = Control(1, has_policy=False)
    control.join("ada")
    control.started(0, "first")
    with pytest.raises(Refused, match="nothing has happened in env 0 yet, so it is no success"):
        control.judge(0, "ada", Outcome.SUCCESS)
    control.skip(0, "ada")
    assert control.verdict(0) is not None and control.verdict(0).reason == SKIPPED  # type: ignore[union-attr]


def test_without_a_policy_the_next_take_waits_for_its_operator() -> None:
    control = running(has_policy=False)
    assert control.driver(0) is Driver.WAITING
    control.take_over(0, "ada")
    control.ended(0)
    control.started(0, "second")
    assert control.driver(0) is Driver.WAITING and control.envs[0].holder == "ada"
