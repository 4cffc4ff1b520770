"""The actor of a session, with Reach, a fake policy, and hands that are moved by the test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from vla_rl.actors import ActorNeeds
from vla_rl.bell import Bell
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import UNDONE, Control, Driver
from vla_rl.collection.devices.base import Event, Reading
from vla_rl.collection.devices.scripted import ScriptedOperator, Switching
from vla_rl.collection.operated_actor import RECENT_ACTIONS, SCRIPT, OperatedActor
from vla_rl.collection.operators import PageOperator
from vla_rl.collection.session_state import Board
from vla_rl.collection.takes import Written, chunks_of
from vla_rl.collection.watched_pool import Picture, WatchedPool
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import VIEWS, ActionChunk, Episode, EpisodeSpec, Observation, Outcome, StepProtocol
from vla_rl.eval.results import row_of
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import ChunkReply, EnvConfig
from vla_rl.sim.pool import PoolConfig, make_pool
from vla_rl.sim.reach import ReachEnv
from vla_rl.sim.reach_expert import ReachExpert

PERIOD_S = 0.05
SPECS = [EpisodeSpec("reach", task, f"sampled:{task}", "demonstrations", StepProtocol(max_steps=40)) for task in range(3)]
STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


class StillPolicy:
    """Answers every observation, after `delay_s` in a thread of its own, with a chunk of 8 actions that move nothing."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.needs = ActorNeeds("still", views=VIEWS, chunk_length=8)
        self.asked: list[tuple[int, Observation]] = []
        self._delay_s, self._bell, self._answers = delay_s, Bell(), []

    def start(self, env: int, spec: EpisodeSpec) -> None:
        self._answers = [answer for answer in self._answers if answer[0] != env]

    def submit(self, env: int, observation: Observation) -> None:
        self.asked.append((env, observation))
        chunk = ActionChunk(np.tile(STILL, (8, 1)), weights_version=5)
        timer = threading.Timer(self._delay_s, self._answer, (env, chunk))
        timer.daemon = True
        timer.start()

    def _answer(self, env: int, chunk: ActionChunk) -> None:
        self._answers.append((env, chunk))
        self._bell.ring()

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        answers, self._answers = self._answers, []
        self._bell.silence(len(answers))
        return answers

    def waitables(self) -> list[Any]:
        return [self._bell.waitable]

    def finish(self, env: int, episode: Episode) -> None: ...

    def close(self) -> None: ...


class Hand:
    """A device that pushes upwards, and counts when it was read."""

    def __init__(self) -> None:
        self.read_s: list[float] = []
        self.grippers: list[float] = []

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        self.grippers.append(gripper)

    def read(self, env: int, observation: Observation) -> Reading:
        self.read_s.append(time.perf_counter())
        return Reading(np.array([0, 0, 0.1, 0, 0, 0, -1], np.float32), None, self.read_s[-1], seen_step=7)

    def events(self) -> Sequence[Event]:
        return ()

    def close(self) -> None: ...


class Table:
    """Two Reach envs with everything around them; `at` runs commands when an env has executed so many steps."""

    def __init__(self, policy: StillPolicy | None, paced: bool, devices: dict[str, Any], envs: int = 2, mirrors: bool = False) -> None:
        env = EnvConfig("reach", resolution=32)
        pool = make_pool(PoolConfig("serial", envs), env)
        self.pictures: list[Picture] = []
        self.pool = WatchedPool(pool, make_pool(PoolConfig("serial", envs), env) if mirrors else None, VIEWS, self.pictures.append)
        self.control = Control(envs, policy is not None)
        for name in devices:
            self.control.join(name)
        self.plan: list[tuple[int, int, Any]] = []
        self.actor = OperatedActor(
            self.control, policy, devices, PERIOD_S if paced else None, self.pool.meters, self.pool.preempt, self._obey
        )

    def at(self, env: int, step: int, command: Any) -> None:
        self.plan.append((env, step, command))

    def _obey(self) -> None:
        due = [entry for entry in self.plan if self.control.envs[entry[0]].take and self.control.envs[entry[0]].steps >= entry[1]]
        for entry in due:
            self.plan.remove(entry)
            entry[2]()

    def episodes(self, specs: Sequence[EpisodeSpec]) -> Iterator[Episode]:
        look = look_of(self.actor.needs, record_states=True)
        with closing(self.pool), closing(self.actor):
            yield from run_episodes(self.pool, self.actor, ListSource(specs), lambda spec: look)


def hands(episode: Episode) -> list[bool]:
    return np.concatenate([step.intervention_E for step in episode.steps]).tolist()


def states_of(episode: Episode) -> np.ndarray:
    return np.concatenate([step.sim_states_ED for step in episode.steps if step.sim_states_ED is not None])


def test_taking_over_in_the_middle_of_a_chunk_and_handing_back() -> None:
    """Three of the policy's eight actions, four of the operator's, then the policy with a fresh observation."""
    policy, hand = StillPolicy(), Hand()
    table = Table(policy, True, {"ada": hand}, envs=1)
    table.at(0, 3, lambda: table.control.take_over(0, "ada"))
    table.at(0, 7, lambda: table.control.hand_back(0, "ada"))
    table.at(0, 9, lambda: table.control.judge(0, "ada", Outcome.FAILURE))
    (episode,) = table.episodes(SPECS[:1])
    assert hands(episode) == [False] * 3 + [True] * 4 + [False] * 2
    assert [len(step.executed_EA) for step in episode.steps] == [3, 1, 1, 1, 1, 2], "a chunk is what was executed of it"
    assert episode.steps[0].proposed.weights_version == 5 and (episode.outcome, episode.reason) == (Outcome.FAILURE, "operator")
    first, second = (observation for _, observation in policy.asked)
    assert set(second.images) == set(VIEWS) and second.state[2] > first.state[2] + 0.003, "what the policy sees is what the operator left"
    np.testing.assert_array_equal(second.images["image"], episode.steps[5].observation.images["image"])
    log = table.actor.logs[episode.spec.key]
    assert log.seen_step == [-1] * 3 + [7] * 4 + [-1] * 2 and log.operators == ["ada"] and hand.grippers == [-1.0]


def test_a_slow_policy_never_delays_the_operator() -> None:
    """The policy thinks for half a second about env 1, while the operator acts in env 0 every 50 ms."""
    hand = Hand()
    table = Table(StillPolicy(delay_s=0.5), True, {"ada": hand})
    table.at(0, 0, lambda: table.control.take_over(0, "ada"))
    table.at(0, 16, lambda: table.control.judge(0, "ada", Outcome.SUCCESS))
    table.at(1, 8, lambda: table.control.judge(1, "ada", Outcome.FAILURE))
    episodes = {episode.spec.task: episode for episode in table.episodes(SPECS[:2])}
    assert hands(episodes[0]) == [True] * 16 and hands(episodes[1]) == [False] * 8
    gaps = np.diff(hand.read_s)
    assert gaps.mean() == pytest.approx(PERIOD_S, rel=0.1) and gaps.max() < 0.25, "half a period of the policy would show"


def test_never_faster_than_real_time() -> None:
    table = Table(StillPolicy(), True, {"ada": Hand()}, envs=1)
    table.at(0, 12, lambda: table.control.judge(0, "ada", Outcome.FAILURE))
    began = time.perf_counter()
    (episode,) = table.episodes(SPECS[:1])
    assert time.perf_counter() - began >= 11 * PERIOD_S
    periods = table.actor.logs[episode.spec.key].periods_s
    assert len(periods) == 11 and sum(periods) >= 11 * PERIOD_S - 0.01


def test_waiting_stands_still_and_mirrors_show_what_happened() -> None:
    """Without a policy nothing moves until somebody takes over; the mirror's last picture is the env's own."""
    hand = Hand()
    table = Table(None, True, {"ada": hand}, envs=1, mirrors=True)
    looked: list[int] = []

    def look_then_begin() -> None:
        looked.append(table.control.envs[0].steps)
        assert table.control.driver(0) is Driver.WAITING
        table.control.take_over(0, "ada")

    table.at(0, 0, look_then_begin)
    (episode,) = table.episodes(SPECS[:1])
    assert looked == [0] and episode.num_steps == len(hand.read_s) and episode.reason in ("predicate", "time limit")
    steps = [picture.control_step for picture in table.pictures]
    assert steps[0] == 0 and steps == sorted(steps) and len(steps) > 5
    replayed = make_pool(PoolConfig("serial", 1), EnvConfig("reach", resolution=32))
    with closing(replayed):
        replayed.reset(0, SPECS[0], look_of(ActorNeeds("x", views=VIEWS)))
        replayed.ready(1)
        replayed.step(0, ActionChunk(episode.actions_NA()[: steps[-1]]))
        (reply,) = replayed.ready(1)
    np.testing.assert_array_equal(table.pictures[-1].images["image"], reply.observation.images["image"])


def test_an_undone_take_goes_on_where_it_ended() -> None:
    """The verdict is taken back: the same actions are executed again, and the operator adds three more."""
    table = Table(None, True, {"ada": Hand()}, envs=1)
    table.at(0, 0, lambda: table.control.take_over(0, "ada"))
    table.at(0, 5, lambda: table.control.judge(0, "ada", Outcome.SUCCESS))
    table.at(0, 8, lambda: table.control.judge(0, "ada", Outcome.FAILURE))
    source = ListSource(SPECS[:1])
    look = look_of(table.actor.needs, record_states=True)
    with closing(table.pool), closing(table.actor):
        (before,) = run_episodes(table.pool, table.actor, source, lambda spec: look)
        take = table.control.undo("ada")
        table.actor.resume(SPECS[0], chunks_of(before), table.actor.logs[before.spec.key])
        table.at(0, 5, lambda: table.control.take_over(0, "ada"))
        (after,) = run_episodes(table.pool, table.actor, ListSource(SPECS[:1]), lambda spec: look)
    assert (before.num_steps, after.num_steps) == (5, 8) and take == "reach/0/sampled:0/s0#1"
    np.testing.assert_array_equal(after.actions_NA()[:5], before.actions_NA())
    states = [
        np.concatenate([step.sim_states_ED for step in episode.steps if step.sim_states_ED is not None]) for episode in (before, after)
    ]
    np.testing.assert_array_equal(states[1][:5], states[0])
    assert hands(after) == [True] * 8 and after.outcome is Outcome.FAILURE
    log = table.actor.logs[after.spec.key]
    assert log.seen_step == [7] * 8 and log.operators == ["ada", "ada"] and log.take == take, "what was known of it is still known"


def test_a_verdict_that_comes_before_an_undone_take_is_back_waits_for_all_of_it() -> None:
    """Undone and judged anew at once: nothing of the take is lost, and what its log says still belongs to its steps."""
    table = Table(None, True, {"ada": Hand()}, envs=1)
    table.at(0, 0, lambda: table.control.take_over(0, "ada"))
    table.at(0, 5, lambda: table.control.judge(0, "ada", Outcome.SUCCESS))
    look = look_of(table.actor.needs, record_states=True)
    with closing(table.pool), closing(table.actor):
        (before,) = run_episodes(table.pool, table.actor, ListSource(SPECS[:1]), lambda spec: look)
        table.control.undo("ada")
        table.actor.resume(SPECS[0], chunks_of(before), table.actor.logs[before.spec.key])
        table.at(0, 2, lambda: table.control.judge(0, "ada", Outcome.FAILURE))
        (after,) = run_episodes(table.pool, table.actor, ListSource(SPECS[:1]), lambda spec: look)
    assert (after.outcome, after.num_steps) == (Outcome.FAILURE, 5)
    np.testing.assert_array_equal(after.actions_NA(), before.actions_NA())
    assert len(table.actor.logs[after.spec.key].seen_step) == 5


def test_a_scene_that_runs_again_elsewhere_after_its_worker_died_leaves_no_take_behind() -> None:
    table = Table(None, True, {"ada": Hand()}, envs=2)
    with closing(table.pool), closing(table.actor):
        table.actor.start(1, SPECS[0])
        table.control.take_over(1, "ada")
        table.actor.start(0, SPECS[0])
        assert table.actor.spec_of(1) is None and not table.control.envs[1].take and table.control.driver(1) is Driver.WAITING
        assert table.actor.spec_of(0) == SPECS[0] and table.control.envs[0].take.endswith("#2")


def scripted_results(backend: Literal["serial", "process"], envs: int, switching: Switching) -> dict[str, tuple[list[bool], bytes]]:
    """Who acted and what was executed, by spec; the policy must not have seen privileged information."""
    policy, script = StillPolicy(), ScriptedOperator(switching, lambda spec: ReachExpert(spec, noise=0.0, seed=0))
    pool = WatchedPool(make_pool(PoolConfig(backend, envs), EnvConfig("reach", resolution=32)), None, (), lambda picture: None)
    control = Control(envs, has_policy=True)
    control.join(SCRIPT)
    actor = OperatedActor(control, policy, {SCRIPT: script}, None, pool.meters, pool.preempt)
    look = look_of(actor.needs, record_states=True)
    with closing(pool), closing(actor):
        episodes = sorted(run_episodes(pool, actor, ListSource(SPECS), lambda spec: look), key=lambda episode: episode.spec.key)
    assert all(not observation.privileged and set(observation.images) == set(VIEWS) for _, observation in policy.asked)
    return {episode.spec.key: (hands(episode), episode.actions_NA().tobytes()) for episode in episodes}


def test_the_scripted_operator_depends_on_the_spec_alone() -> None:
    """Policy for 5 to 9 steps, operator for 3 to 6, and so on, the same with one env, two, or two processes."""
    switching = Switching(policy_steps=(5, 9), operator_steps=(3, 6))
    one = scripted_results("serial", 1, switching)
    assert one == scripted_results("serial", 2, switching) == scripted_results("process", 2, switching)
    for spec in SPECS:
        who = one[spec.key][0]
        first = switching.length(spec, 0)
        assert first is not None and 5 <= first <= 9 and not any(who[:first]) and all(who[first : first + 3])


def test_a_slow_simulator_slows_time_down_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step takes 80 ms, a period 50: every action still is one control step, none is made up for, and the rate is shown."""
    step_chunk = ReachEnv.step_chunk

    def slow(self: ReachEnv, *arguments: Any) -> ChunkReply:
        until = time.perf_counter() + 0.08
        while time.perf_counter() < until:
            os.sched_yield()
        return step_chunk(self, *arguments)

    monkeypatch.setattr(ReachEnv, "step_chunk", slow)
    table = Table(None, True, {"ada": Hand()}, envs=1)
    config = CollectConfig(str(tmp_path), "reach", (0,), 1, env=EnvConfig("reach", resolution=32), operator=PageOperator("page"))
    board = Board(config, SPECS[:1], EpisodeStore(tmp_path), tmp_path / "episodes.jsonl", ())
    views: list[dict[str, Any]] = []

    def judge() -> None:
        board.changed = True
        board.publish(table.control, table.actor, 0)
        views.extend(board.snapshot["envs"])
        table.control.judge(0, "ada", Outcome.SUCCESS)

    table.at(0, 0, lambda: table.control.take_over(0, "ada"))
    table.at(0, RECENT_ACTIONS + 2, judge)
    (episode,) = table.episodes(SPECS[:1])
    assert min(table.actor.logs[episode.spec.key].periods_s) >= 0.079
    assert views[0]["slow"] and 8 < views[0]["rate"] < 12.6


def test_an_undo_takes_the_newest_card_away_and_the_light_says_nothing(tmp_path: Path) -> None:
    """A scene that failed twice, the second time by mistake; then the take that began in its place is given up."""
    table = Table(None, False, {"ada": Hand()}, envs=1)
    table.at(0, 0, lambda: table.control.take_over(0, "ada"))
    table.at(0, 2, lambda: table.control.judge(0, "ada", Outcome.FAILURE))
    (failed,) = table.episodes(SPECS[:1])
    config = CollectConfig(str(tmp_path), "reach", (0,), 1, env=EnvConfig("reach", resolution=32), operator=PageOperator("page"))
    board = Board(config, SPECS[:1], EpisodeStore(tmp_path), tmp_path / "episodes.jsonl", ())

    def shown() -> tuple[int, Any]:
        board.changed = True
        board.publish(table.control, table.actor, 0)
        return len(board.snapshot["episodes"]), board.snapshot["envs"][0]["last"]

    row = row_of(failed, condition="collect")
    for _ in range(2):
        board.ended(0, failed)
        board.written(Written(0, failed.spec, row, False, []))
    assert shown() == (2, {"outcome": "failure", "reason": "operator"})
    board.forget(0)
    board.ended(0, replace(failed, outcome=Outcome.DISCARDED, reason=UNDONE))
    assert shown() == (1, None)
