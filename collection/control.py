"""Who is in control of each environment: a state machine without clock, network or simulator.

    a person's commands ──┐                      ┌──► driver(env): who acts next
                          ├──► Control (state) ──┤
    what the loop reports ┘                      └──► verdict(env): the take shall end, and how

An environment is driven by the policy, by the operator who holds it, or it waits. Whatever a person does in one environment
changes no other. The loop asks `driver` and `verdict` before every action, so control can change at any control step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from vla_rl.episode import Outcome, Verdict
from vla_rl.errors import UserError

BY_OPERATOR = "operator"
"""Reason of an outcome that a person decided."""
SKIPPED, LEFT, UNDONE, CLOSED = "operator: next scene", "operator left", "undo", "session closed"
"""Reasons of takes that end without a word about how they went."""


class Driver(str, Enum):
    """Who acts next in an environment."""

    POLICY = "policy"
    OPERATOR = "operator"
    WAITING = "waiting"
    """Nobody: time stands still there."""


class Refused(UserError):
    """A command that the state does not allow; the text says why and what can be done."""


@dataclass(frozen=True)
class AbsenceRule:
    """What happens in an environment whose operator went away (closed the page, lost the network)."""

    wait_s: float = 30.0
    """Seconds that it waits for the operator to come back; at least 0."""
    then: Literal["wait", "hand_back", "discard"] = "hand_back"
    """Afterwards: `hand_back` lets the policy go on (without one, the take waits for anybody), `discard` ends the take,
    `wait` keeps it for this operator."""

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ValueError(f"wait_s is {self.wait_s}, must be at least 0 seconds")


@dataclass
class EnvControl:
    """The state of one environment."""

    driver: Driver = Driver.WAITING
    holder: str = ""
    """The operator that nobody else can take it from; empty: nobody."""
    take: str = ""
    """Key of the running episode; empty between two."""
    steps: int = 0
    """Control steps that the take has executed."""
    verdict: Verdict | None = None
    """How the take shall end; the loop carries it out before the next action."""
    absent_since: float | None = None
    """When the holder went away (s, any clock that `leave` and `expire` share)."""


@dataclass
class _Judged:
    """The last verdict of an operator, which can be undone."""

    env: int
    take: str
    resumes: bool = False
    """It was undone, and the take is on its way back."""


@dataclass
class Control:
    """Who holds which environment. `has_policy`: whether somebody drives where no person does."""

    num_envs: int
    has_policy: bool
    absence: AbsenceRule = field(default_factory=AbsenceRule)
    envs: list[EnvControl] = field(init=False)
    present: set[str] = field(init=False, default_factory=set[str])
    _judged: dict[str, _Judged] = field(init=False, default_factory=dict[str, _Judged])

    def __post_init__(self) -> None:
        self.envs = [EnvControl() for _ in range(self.num_envs)]

    def driver(self, env: int) -> Driver:
        """Who acts next in `env`."""
        return self.envs[env].driver

    def verdict(self, env: int) -> Verdict | None:
        """How the take in `env` shall end now; None: it goes on."""
        return self.envs[env].verdict

    # -- what the loop reports

    def started(self, env: int, take: str) -> None:
        """A take begins. The policy drives it, or it waits: for its holder, if it is a take that was undone or there is no policy."""
        state = self.envs[env]
        owner = next((name for name, judged in self._judged.items() if judged.resumes and judged.take == take), "")
        if owner:
            del self._judged[owner]
        holder = owner or ("" if self.has_policy else state.holder)
        driver = Driver.POLICY if self.has_policy and not owner else Driver.WAITING
        self.envs[env] = EnvControl(driver, holder, take, absent_since=state.absent_since if holder and holder == state.holder else None)

    def stepped(self, env: int, steps: int) -> None:
        """`steps` more control steps were executed in `env`."""
        self.envs[env].steps += steps

    def ended(self, env: int) -> None:
        """The take in `env` is over, by a verdict, by success or by the time limit."""
        state = self.envs[env]
        state.take, state.verdict, state.driver, state.steps = "", None, Driver.WAITING, 0

    # -- what a person commands; each raises Refused

    def join(self, operator: str) -> None:
        """An operator is here (again, or with a page that was loaded anew); environments it holds wait for it to go on."""
        self.present.add(operator)
        for state in self.envs:
            if state.holder == operator:
                state.absent_since, state.driver = None, Driver.WAITING

    def leave(self, operator: str, now_s: float) -> None:
        """An operator went away: its environments wait."""
        self.present.discard(operator)
        for state in self.envs:
            if state.holder == operator:
                state.absent_since = now_s
                state.driver = Driver.WAITING

    def expire(self, now_s: float) -> None:
        """Apply the rule to environments whose operator has been away for long enough."""
        for state in self.envs:
            if state.absent_since is None or self.absence.then == "wait" or now_s - state.absent_since < self.absence.wait_s:
                continue
            if self.absence.then == "discard" and state.take and state.verdict is None:
                state.verdict = Verdict(Outcome.DISCARDED, LEFT)
            self._release(state)

    def take_over(self, env: int, operator: str) -> None:
        """`operator` drives `env` from the next control step on; the rest of a running chunk is dropped."""
        state = self._allowed(env, operator)
        self._require_take(env)
        state.holder, state.driver = operator, Driver.OPERATOR

    def hand_back(self, env: int, operator: str) -> None:
        """The policy drives `env` again; without a policy it waits, free for anybody."""
        state = self._allowed(env, operator)
        if state.holder != operator:
            raise Refused(f"env {env} is not in your hands; take over first")
        self._release(state)

    def judge(self, env: int, operator: str, outcome: Outcome) -> None:
        """End the take in `env` with an outcome that a person decides."""
        state = self._allowed(env, operator)
        self._require_take(env)
        if not state.steps and outcome is not Outcome.DISCARDED:
            raise Refused(f"nothing has happened in env {env} yet, so it is no {outcome.value}; discard it or go to the next scene")
        state.verdict = Verdict(outcome, BY_OPERATOR)
        state.driver = Driver.WAITING
        self._judged[operator] = _Judged(env, state.take)

    def skip(self, env: int, operator: str) -> None:
        """Leave this scene for later and go to the next one; nothing of the take is kept."""
        state = self._allowed(env, operator)
        self._require_take(env)
        state.verdict = Verdict(Outcome.DISCARDED, SKIPPED)
        state.driver = Driver.WAITING

    def drives(self, env: int, operator: str) -> bool:
        """Whether it is this operator who acts next in `env`."""
        return self._allowed(env, operator).driver is Driver.OPERATOR

    def last_judged(self, operator: str) -> tuple[int, str]:
        """Where the operator's last verdict ended a take, and the take's key. Raises Refused when there is nothing to undo."""
        judged = self._last_judged(operator)
        return judged.env, judged.take

    def can_be_undone(self, take: str) -> bool:
        """Whether the verdict about a take is the last one of an operator."""
        return any(judged.take == take for judged in self._judged.values())

    def undo(self, operator: str) -> str:
        """Take back the operator's last verdict: its take goes on where it ended. Returns the take's key.

        The take that has begun in its place is given up. Raises Refused when there is nothing to undo, or another operator is there.
        """
        judged = self._last_judged(operator)
        state = self.envs[judged.env]
        if state.take == judged.take:  # the loop has not carried it out yet: the take simply goes on
            state.verdict = None
            del self._judged[operator]
            return judged.take
        if state.holder not in ("", operator):
            raise Refused(f"env {judged.env} is held by {state.holder} now, so your take cannot go on there")
        judged.resumes = True
        if state.take:
            state.verdict = Verdict(Outcome.DISCARDED, UNDONE)
            state.driver = Driver.WAITING
        return judged.take

    def close(self) -> None:
        """End every running take; none of them counts."""
        for state in self.envs:
            if state.take and state.verdict is None:
                state.verdict = Verdict(Outcome.DISCARDED, CLOSED)

    def _release(self, state: EnvControl) -> None:
        state.holder, state.absent_since = "", None
        free = self.has_policy and state.take and state.verdict is None
        state.driver = Driver.POLICY if free else Driver.WAITING

    def _allowed(self, env: int, operator: str) -> EnvControl:
        """The state of `env`, which this operator may change."""
        self._require_present(operator)
        if not 0 <= env < self.num_envs:
            raise Refused(f"there is no env {env}; this session has 0 to {self.num_envs - 1}")
        state = self.envs[env]
        if state.holder not in ("", operator):
            raise Refused(f"env {env} is held by {state.holder}; it is free again when {state.holder} hands it back")
        return state

    def _last_judged(self, operator: str) -> _Judged:
        self._require_present(operator)
        judged = self._judged.get(operator)
        if judged is None or judged.resumes:
            raise Refused("there is no verdict of yours to undo; only the last one can be undone, once")
        return judged

    def _require_present(self, operator: str) -> None:
        if operator not in self.present:
            raise Refused(f"operator {operator!r} is not here; open the page first")

    def _require_take(self, env: int) -> None:
        state = self.envs[env]
        if not state.take:
            raise Refused(f"env {env} is between two takes; wait a moment")
        if state.verdict is not None:
            raise Refused(f"the take in env {env} is ending as {state.verdict.outcome.value}; undo it, or wait for the next one")
