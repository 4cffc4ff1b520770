"""The actor of a session: in each environment the policy, an operator, or nobody, as `Control` says.

Real time: one action per control period and environment, never earlier, so that what is recorded is what a person could follow;
a loop that is too slow makes the simulation slower, never the data faster. Free: as fast as possible, with whole chunks of the
policy (no person is there). A policy's forward runs in its own thread (`PolicyActor`), so it never delays an operator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_rl.actors import Actor, ActorNeeds
from vla_rl.collection.alarm import Alarm
from vla_rl.collection.control import BY_OPERATOR, Control, Driver
from vla_rl.collection.devices.base import Device
from vla_rl.collection.devices.scripted import ScriptedOperator
from vla_rl.collection.watched_pool import EnvMeter
from vla_rl.episode import ACTION_DIM, ActionChunk, Episode, EpisodeSpec, Float32, Observation, Verdict

SCRIPT = "script"
"""Name of the scripted operator among operators."""
RECENT_ACTIONS = 20
"""Over so many actions the achieved rate is measured."""
_NO_ACTIONS = np.zeros((0, ACTION_DIM), np.float32)


@dataclass
class TakeLog:
    """What the dataset keeps of who acted and what was seen, one entry per control step."""

    seen_step: list[int] = field(default_factory=list[int])
    """Control step of the picture that the operator saw when choosing the action; -1 where the policy acted or it is unknown."""
    periods_s: list[float] = field(default_factory=list[float])
    """Seconds between two actions in a row (empty when running free)."""
    latency_s: list[float] = field(default_factory=list[float])
    """From the key press to the executed action, for each action that a new key press shaped."""
    operators: list[str] = field(default_factory=list[str])
    """Who took over, in order."""
    env: int = 0
    """Where it ran."""
    take: str = ""
    """Names this try at the scene."""


@dataclass
class _Seat:
    """What the actor knows about one environment."""

    spec: EpisodeSpec
    observation: Observation | None = None
    """Waits for an answer; None while the env executes one."""
    driver: Driver = Driver.WAITING
    """Who acted when it was last looked at."""
    chunk: ActionChunk | None = None
    """The policy's chunk, of which rows from `used` on are left."""
    used: int = 0
    asked: bool = False
    """The policy owes an answer."""
    stale: bool = False
    """What it owes is no longer wanted: an operator has acted since."""
    idle_steps: int = 0
    """Control steps since the operator last moved."""
    due_s: float = 0.0
    """When the next action may be sent (real time)."""
    acted_s: float | None = None
    """When the last action was sent; None: at the beginning and after a rest."""
    in_flight: int = 0
    """Actions that the env was told to execute and has not answered for."""
    seen_step: int | None = -1
    """Picture behind them; None while an undone take is executed again, whose log says it already."""
    pressed_s: float | None = None
    """Key press behind them."""
    replay: deque[ActionChunk] = field(default_factory=deque[ActionChunk])
    """What an undone take had executed, to be executed again."""
    log: TakeLog = field(default_factory=TakeLog)


class OperatedActor:
    """An `Actor` for sessions; see the module's text.

    policy: who acts where no person does, or None. devices: by operator's name; the session adds operators that come.
    period_s: a control period, in real time; None runs free. meters: of the pool that the loop runs (`WatchedPool.meters`).
    idle_steps: after so many control steps without motion of the operator, time stands still until the next motion; None: it
    never does.
    obey: called at every look, carries out the commands that have come. operator_views: rendered before and after an operator's
    actions too, for learners that look at every chunk's observation.
    """

    def __init__(
        self,
        control: Control,
        policy: Actor | None,
        devices: dict[str, Device],
        period_s: float | None,
        meters: list[EnvMeter],
        preempt: Callable[[int], None],
        obey: Callable[[], None] = lambda: None,
        idle_steps: int | None = None,
        operator_views: tuple[str, ...] = (),
    ) -> None:
        script = devices.get(SCRIPT)
        self._script = script if isinstance(script, ScriptedOperator) else None
        own = ActorNeeds("operator", chunk_length=1)
        self.needs = replace(policy.needs if policy is not None else own, privileged=self._script is not None)
        self.alarm = Alarm()
        self.logs: dict[str, TakeLog] = {}
        """Logs of the finished takes by `EpisodeSpec.key`, until somebody takes them out."""
        self._control, self._policy, self._devices, self._period_s = control, policy, devices, period_s
        self._meters, self._preempt, self._obey = meters, preempt, obey
        self._idle_steps, self._operator_views = idle_steps, operator_views
        self._seats: dict[int, _Seat] = {}
        self._resumed: dict[str, tuple[str, deque[ActionChunk], TakeLog]] = {}
        self._takes = 0

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """See `Actor.start`."""
        if self._policy is not None:
            self._policy.start(env, spec)
        for lost in [seat for seat, other in self._seats.items() if other.spec == spec]:  # its worker died: the spec runs again, here
            del self._seats[lost]
            self._control.ended(lost)
        self._takes += 1
        fresh = (f"{spec.key}#{self._takes}", deque[ActionChunk](), TakeLog())
        take, replay, log = self._resumed.pop(spec.key, fresh)
        self._seats[env] = _Seat(spec, replay=replay, log=log)
        self._control.started(env, take)
        if self._script is not None:
            self._script.begin(env, spec)

    def submit(self, env: int, observation: Observation) -> None:
        """See `Actor.submit`."""
        seat = self._seats[env]
        seat.observation = observation
        self._note_executed(env, seat)

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """See `Actor.ready`."""
        self.alarm.silence()
        self._obey()
        self._hear_policy()
        answers: list[tuple[int, ActionChunk]] = []
        for env, seat in self._seats.items():
            self._follow_control(env, seat)
            chunk = self._answer(env, seat)
            if chunk is not None:
                seat.observation, seat.in_flight = None, len(chunk.actions_CA)
                answers.append((env, chunk))
        self._set_alarm()
        return answers

    def waitables(self) -> list[Any]:
        """See `Actor.waitables`."""
        return [self.alarm.waitable, *([] if self._policy is None else self._policy.waitables())]

    def finish(self, env: int, episode: Episode) -> None:
        """See `Actor.finish`."""
        seat = self._seats.pop(env)
        self._note_executed(env, seat)
        self.logs[episode.spec.key] = replace(seat.log, env=env, take=self._control.envs[env].take)
        self._control.ended(env)
        if self._policy is not None:
            self._policy.finish(env, episode)

    def close(self) -> None:
        """See `Actor.close`."""
        if self._policy is not None:
            self._policy.close()
        for device in self._devices.values():
            device.close()
        self.alarm.close()

    def resume(self, spec: EpisodeSpec, chunks: Iterable[ActionChunk], log: TakeLog) -> None:
        """When `spec` starts next, it is the take of `log` again, and begins by executing what it had executed."""
        self._resumed[spec.key] = log.take, deque(chunks), log

    def period_s(self, env: int) -> float | None:
        """Mean of the last actions' distances in time in `env` (s); None: too few, or running free."""
        recent = self._seats[env].log.periods_s[-RECENT_ACTIONS:] if env in self._seats else []
        return sum(recent) / len(recent) if len(recent) == RECENT_ACTIONS else None

    def gripper_closes(self, env: int) -> bool:
        """Whether the last executed action in `env` closed the gripper."""
        return self._meters[env].gripper > 0

    def spec_of(self, env: int) -> EpisodeSpec | None:
        """What runs in `env`."""
        return self._seats[env].spec if env in self._seats else None

    def _follow_control(self, env: int, seat: _Seat) -> None:
        """Notice that somebody else acts now: drop the rest of a chunk, give the device the gripper as it is."""
        if self._script is not None and not seat.replay:
            self._switch_script(env)
        driver = self._control.driver(env)
        if driver is seat.driver:
            return
        if seat.driver is Driver.POLICY:
            seat.chunk, seat.stale = None, seat.asked
            if seat.in_flight > 1:
                self._preempt(env)
        if driver is Driver.OPERATOR:
            holder = self._control.envs[env].holder
            seat.log.operators.append(holder)
            seat.idle_steps = 0
            self._devices[holder].take(env, seat.spec, self._meters[env].gripper)
        seat.driver = driver

    def _switch_script(self, env: int) -> None:
        assert self._script is not None
        wants, has = self._script.wants_control(env), self._control.envs[env].holder == SCRIPT
        if wants and not has:
            self._control.take_over(env, SCRIPT)
        elif has and not wants:
            self._control.hand_back(env, SCRIPT)

    def _answer(self, env: int, seat: _Seat) -> ActionChunk | None:
        """What the env does next; None: nothing yet."""
        if seat.observation is None:
            return None
        verdict = self._control.verdict(env)
        if verdict is not None and not (seat.replay and verdict.reason == BY_OPERATOR):  # a take is judged with all that it had
            return _ending(verdict)
        if seat.replay:
            return self._again(seat)
        if seat.driver is Driver.POLICY:
            return self._policy_answer(env, seat, seat.observation)
        if seat.driver is Driver.OPERATOR and self._is_due(seat):
            return self._operator_answer(env, seat, seat.observation)
        return None

    def _again(self, seat: _Seat) -> ActionChunk:
        seat.seen_step = None
        return seat.replay.popleft()

    def _operator_answer(self, env: int, seat: _Seat, observation: Observation) -> ActionChunk | None:
        device = self._devices[self._control.envs[env].holder]
        reading = device.read(env, observation)
        active = reading.moves or float(reading.action_A[6]) * self._meters[env].gripper < 0
        seat.idle_steps = 0 if active else seat.idle_steps + 1
        if self._idle_steps is not None and seat.idle_steps > self._idle_steps:
            self._rest(seat)
            return None
        seat.pressed_s, seat.seen_step = reading.pressed_s, reading.seen_step
        self._note_sent(seat)
        label_CA = None if reading.label_A is None else reading.label_A[None]
        return ActionChunk(reading.action_A[None], labels_CA=label_CA, intervention=reading.by_operator, views=self._operator_views)

    def _policy_answer(self, env: int, seat: _Seat, observation: Observation) -> ActionChunk | None:
        assert self._policy is not None, "only a session with a policy lets it drive"
        if seat.chunk is None:
            return self._ask_policy(env, seat, observation)
        if not self._is_due(seat):
            return None
        rows = self._rows_now(env, len(seat.chunk.actions_CA) - seat.used)
        part = _part(seat.chunk, seat.used, seat.used + rows, self._operator_views)
        seat.used += rows
        if seat.used == len(seat.chunk.actions_CA):
            seat.chunk = None
            part = replace(part, views=None)
        seat.seen_step = -1
        self._note_sent(seat)
        return part

    def _ask_policy(self, env: int, seat: _Seat, observation: Observation) -> ActionChunk | None:
        """Give the policy the observation, or first have the env show what the policy looks at."""
        assert self._policy is not None
        if seat.asked:
            return None
        views = self._policy.needs.views
        if any(view not in observation.images for view in views):
            return ActionChunk(_NO_ACTIONS, views=views)
        self._policy.submit(env, replace(observation, privileged={}))
        seat.asked, seat.stale = True, False
        return None

    def _rows_now(self, env: int, left: int) -> int:
        """How many of the chunk's remaining rows are sent at once."""
        if self._period_s is not None:
            return 1
        until_switch = None if self._script is None else self._script.steps_left(env)
        return left if until_switch is None else min(left, until_switch)

    def _hear_policy(self) -> None:
        """Take the policy's answers; one that was asked for before the operator took over is dropped."""
        if self._policy is None:
            return
        for env, chunk in self._policy.ready(0.0):
            seat = self._seats.get(env)
            if seat is None or not seat.asked:
                continue
            if not seat.stale and self._control.driver(env) is Driver.POLICY:
                seat.chunk, seat.used = chunk, 0
            seat.asked = seat.stale = False

    def _is_due(self, seat: _Seat) -> bool:
        return self._period_s is None or time.perf_counter() >= seat.due_s

    def _note_sent(self, seat: _Seat) -> None:
        """An action is on its way: when the next one is due, and how long it has been since the last one.

        Periods are counted from the first action, so that a late action does not delay those after it; a whole missed period is
        not made up for.
        """
        if self._period_s is None:
            return
        now_s = time.perf_counter()
        next_s = seat.due_s + self._period_s
        seat.due_s = next_s if next_s > now_s else now_s + self._period_s
        if seat.acted_s is not None:
            seat.log.periods_s.append(now_s - seat.acted_s)
        seat.acted_s = now_s

    def _rest(self, seat: _Seat) -> None:
        """Time stands still: look again in a period."""
        seat.acted_s = None
        seat.due_s = time.perf_counter() + (self._period_s or 0.0)

    def _note_executed(self, env: int, seat: _Seat) -> None:
        """The env has answered: count what it executed."""
        executed = self._meters[env].executed - self._control.envs[env].steps
        self._control.stepped(env, executed)
        if self._script is not None and executed:
            self._script.stepped(env, executed)
        if seat.seen_step is not None:
            seat.log.seen_step += [seat.seen_step] * executed
        seat.in_flight = 0
        if seat.pressed_s is not None:
            seat.log.latency_s.append(time.perf_counter() - seat.pressed_s)
            seat.pressed_s = None

    def _set_alarm(self) -> None:
        """Wake the loop when the next action is due."""
        if self._period_s is None:
            return
        acting = [
            seat.due_s
            for seat in self._seats.values()
            if seat.observation is not None
            and (seat.driver is Driver.OPERATOR or (seat.driver is Driver.POLICY and seat.chunk is not None))
        ]
        self.alarm.set(min(acting, default=None))


def _ending(verdict: Verdict) -> ActionChunk:
    return ActionChunk(_NO_ACTIONS, finished=True, verdict=verdict)


def _part(chunk: ActionChunk, start: int, stop: int, views: tuple[str, ...]) -> ActionChunk:
    """Rows `start` to `stop` of a chunk, recorded as one with the rows before them; `views` are shown after them."""
    labels_CA: Float32 | None = None if chunk.labels_CA is None else chunk.labels_CA[start:stop]
    return replace(chunk, actions_CA=chunk.actions_CA[start:stop], labels_CA=labels_CA, continues=start > 0, views=views)
