"""The episode loop over a fake pool whose replies come in any order."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.actors import ActorNeeds, Decide, SynchronousActor, no_op_actor, random_actor, replay_actor
from vla_rl.conventions import ConventionMismatch, Conventions, Gripper
from vla_rl.episode import ActionChunk, EpisodeSpec, Observation, Outcome, StepProtocol, Verdict
from vla_rl.rollout import ConnectError, ListSource, connect, look_of, run_episodes
from vla_rl.sim.base import ChunkReply, EnvFault, EnvSpec, Look, ResetReply

ENV = EnvSpec("fake", Conventions(), ("image", "image2"), 64, {})


def specs(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec("fake", 0, f"benchmark:{k}", "test", StepProtocol(max_steps=5 + 7 * k % 11)) for k in range(count)]


class FakePool:
    """Episodes that succeed or run out of time after a number of steps that the spec determines; replies are shuffled."""

    def __init__(self, num_envs: int, order: int, faults: dict[str, int] | None = None) -> None:
        self.num_envs, self.spec = num_envs, ENV
        self._random = random.Random(order)
        self._faults = dict(faults or {})
        self._pending: list[ResetReply | ChunkReply | EnvFault] = []
        self._episode: dict[int, tuple[EpisodeSpec, int]] = {}
        self.looks: list[Look] = []

    def _observation(self, spec: EpisodeSpec, t: int) -> Observation:
        truth = {"block_pos": np.full(3, float(t))} if self.looks[-1].privileged else {}
        return Observation({}, np.full(8, t, np.float32), f"prompt of {spec.key}", truth)

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        self.looks.append(look)
        self._episode[env] = (spec, 0)
        if self._faults.get(spec.init, 0) > 0:
            self._faults[spec.init] -= 1
            self._pending.append(EnvFault(env, spec, "raised", f"boom in {spec.init}"))
        else:
            self._pending.append(ResetReply(env, spec, self._observation(spec, 0), {"fixtures": spec.scene_seed}))

    def step(self, env: int, chunk: ActionChunk) -> None:
        spec, t = self._episode[env]
        good = spec.init_number % 2 == 0
        end = spec.protocol.max_steps - (1 if good else 0)
        executed = min(len(chunk.actions_CA), end - t)
        t += executed
        self._episode[env] = (spec, t)
        reward = np.zeros(executed, np.float32)
        reward[-1:] = float(good and t == end)
        over = t == end
        self._pending.append(
            ChunkReply(
                env, self._observation(spec, t), chunk.actions_CA[:executed], reward, good and over, good and over, over and not good
            )
        )

    def ready(self, timeout_s: float) -> list[ResetReply | ChunkReply | EnvFault]:
        self._random.shuffle(self._pending)
        taken, self._pending = self._pending[:2], self._pending[2:]
        return taken

    def waitables(self) -> list[object]:
        return []

    def preempt(self, env: int) -> None: ...

    def close(self) -> None: ...


def run(pool: FakePool, actor: SynchronousActor, wanted: list[EpisodeSpec]) -> dict[str, object]:
    episodes = list(run_episodes(pool, actor, ListSource(wanted), lambda spec: look_of(actor.needs)))
    assert sorted(e.spec.key for e in episodes) == sorted(s.key for s in wanted), "every spec exactly once"
    return {episode.spec.key: episode for episode in episodes}


@given(num_envs=st.integers(1, 7), count=st.integers(0, 20), order=st.integers(0, 1000))
def test_what_is_recorded_does_not_depend_on_envs_or_order(num_envs: int, count: int, order: int) -> None:
    first = run(FakePool(num_envs, order), random_actor(3), specs(count))
    second = run(FakePool(1, 0), random_actor(3), specs(count))
    for key, episode in first.items():
        other = second[key]
        np.testing.assert_array_equal(episode.actions_NA(), other.actions_NA())
        assert (episode.outcome, episode.reason, episode.num_steps) == (other.outcome, other.reason, other.num_steps)


def test_success_ends_inside_a_chunk_and_the_time_limit_truncates() -> None:
    episodes = run(FakePool(2, 0), no_op_actor(4), specs(2))
    good, late = episodes["fake/0/benchmark:0/s0"], episodes["fake/0/benchmark:1/s0"]
    assert (good.outcome, good.reason, good.num_steps) == (Outcome.SUCCESS, "predicate", 4)
    assert (late.outcome, late.reason, late.num_steps) == (Outcome.FAILURE, "time limit", 12)
    assert [len(step.executed_EA) for step in late.steps] == [4, 4, 4]
    assert late.steps[-1].truncated and not late.steps[-1].terminated
    assert [step.observation.state[0] for step in late.steps] == [0, 4, 8]
    assert late.final_observation.state[0] == 12
    assert late.provenance["fixtures"] == late.spec.scene_seed


@pytest.mark.parametrize(("faults", "outcome"), [(1, Outcome.SUCCESS), (2, Outcome.CRASH), (9, Outcome.CRASH)])
def test_a_faulty_spec_runs_again_once_and_a_crash_is_no_failure(faults: int, outcome: Outcome) -> None:
    wanted = [replace(s, init=f"benchmark:{2 * i}") for i, s in enumerate(specs(6))]
    episodes = run(FakePool(3, 1, {"benchmark:4": faults}), no_op_actor(4), wanted)
    odd_one = episodes["fake/0/benchmark:4/s0"]
    assert odd_one.outcome is outcome
    assert odd_one.provenance["earlier_faults"] == ["raised: boom in benchmark:4"] * min(faults, 2)
    assert [e.outcome for e in episodes.values() if e is not odd_one] == [Outcome.SUCCESS] * 5


def test_the_loop_never_sleeps_while_the_actor_has_not_been_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and actor here answer at once, so there is never anything to wait for."""

    def sleep(*arguments: object) -> None:
        raise AssertionError("the loop waits although the actor has answers")

    monkeypatch.setattr("vla_rl.rollout.wait", sleep)
    run(FakePool(3, 1), random_actor(3), specs(9))


def test_replay_executes_what_was_recorded_and_finishes_when_it_runs_out() -> None:
    wanted = specs(4)
    recorded = {key: e.actions_NA() for key, e in run(FakePool(2, 3), random_actor(3), wanted).items()}
    replayed = run(FakePool(3, 4), replay_actor(recorded), wanted)
    for key, episode in replayed.items():
        np.testing.assert_array_equal(episode.actions_NA(), recorded[key])
    short = {key: actions[:2] for key, actions in recorded.items()}
    for episode in run(FakePool(3, 4), replay_actor(short), wanted).values():
        assert (episode.outcome, episode.reason, episode.num_steps) == (Outcome.FAILURE, "actor finished", 2)


def test_replay_without_a_recording_names_the_spec() -> None:
    with pytest.raises(KeyError, match="no recorded actions for fake/0/benchmark:0/s0"):
        run(FakePool(1, 0), replay_actor({}), specs(1))


def test_the_env_shows_what_the_actor_needs_and_nothing_else() -> None:
    pool = FakePool(1, 0)
    actor = SynchronousActor(
        ActorNeeds("a", views=("image",), privileged=True), lambda spec: lambda o: ActionChunk(np.zeros((1, 7), np.float32))
    )
    run(pool, actor, specs(1))
    assert pool.looks == [Look(views=("image",), privileged=True)]


def test_truth_that_is_asked_for_a_reward_stays_with_the_episode_and_is_not_shown_to_the_actor() -> None:
    shown: list[Observation] = []

    def decide(observation: Observation) -> ActionChunk:
        shown.append(observation)
        return ActionChunk(np.zeros((2, 7), np.float32))

    actor = SynchronousActor(ActorNeeds("policy"), lambda spec: decide)
    (episode,) = run_episodes(FakePool(1, 0), actor, ListSource(specs(1)), lambda spec: look_of(actor.needs, privileged=True))
    assert [observation.privileged for observation in shown] == [{}] * len(episode.steps)
    assert episode.final_observation is not None
    kept = [*(step.observation for step in episode.steps), episode.final_observation]
    assert [observation.privileged["block_pos"][0] for observation in kept] == [observation.state[0] for observation in kept]


def test_parts_that_do_not_fit_are_named_at_connect() -> None:
    with pytest.raises(ConventionMismatch, match="gripper: actor p has 'open_positive', env fake has 'close_positive'"):
        connect(ENV, ActorNeeds("p", conventions=Conventions(gripper=Gripper.OPEN_POSITIVE)))
    with pytest.raises(ConventionMismatch, match="control_rate_hz: actor p has 10, env fake has 20"):
        connect(ENV, ActorNeeds("p", conventions=Conventions(control_rate_hz=10)))
    with pytest.raises(ConnectError, match="looks at depth; env fake has only image, image2"):
        connect(ENV, ActorNeeds("p", views=("image", "depth")))
    with pytest.raises(ConnectError, match="made for pictures of 224 px; env fake renders 64 px"):
        connect(ENV, ActorNeeds("p", resolution=224))


def test_the_loop_sleeps_only_when_neither_side_has_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake pool and synchronous actor always have something, so any sleep would be a delay of up to a second per chunk."""

    def sleep(waitables: list[object], timeout_s: float) -> None:
        raise AssertionError("the loop slept although something was ready")

    monkeypatch.setattr("vla_rl.rollout.wait", sleep)
    run(FakePool(3, 5), random_actor(3), specs(9))


def scripted(*chunks: ActionChunk) -> SynchronousActor:
    """Answers with these chunks, in order."""

    def make(spec: EpisodeSpec) -> Decide:
        remaining = iter(chunks)
        return lambda observation: next(remaining)

    return SynchronousActor(ActorNeeds("scripted", chunk_length=8), make)


def rows(count: int, value: float = 0.0) -> np.ndarray:
    return np.full((count, 7), value, np.float32)


def test_who_acted_and_who_ended_the_episode() -> None:
    """A policy's chunk in two parts, a look, a person's action, and the person's verdict."""
    verdict = Verdict(Outcome.DISCARDED, "operator")
    actor = scripted(
        ActionChunk(rows(2, 0.1), weights_version=3),
        ActionChunk(rows(1, 0.2), continues=True),
        ActionChunk(rows(0), views=("image",)),
        ActionChunk(rows(1, 0.3), intervention=True),
        ActionChunk(rows(0), finished=True, verdict=verdict),
    )
    (episode,) = run(FakePool(1, 0), actor, [EpisodeSpec("fake", 0, "benchmark:1", "test", StepProtocol(max_steps=50))]).values()
    assert (episode.outcome, episode.reason) == (Outcome.DISCARDED, "operator")
    assert [len(step.executed_EA) for step in episode.steps] == [3, 1], "a look leaves no trace"
    assert episode.steps[0].proposed.weights_version == 3
    np.testing.assert_array_equal(episode.steps[0].proposed.actions_CA, np.concatenate([rows(2, 0.1), rows(1, 0.2)]))
    assert episode.steps[0].observation.state[0] == 0, "the observation before the first of its actions"
    assert [step.intervention_E.tolist() for step in episode.steps] == [[False] * 3, [True]]


def test_the_simulator_has_the_last_word() -> None:
    """A verdict that comes with actions does not hide that they reached the goal."""
    actor = scripted(ActionChunk(rows(8), finished=True, verdict=Verdict(Outcome.FAILURE, "operator")))
    (episode,) = run(FakePool(1, 0), actor, [EpisodeSpec("fake", 0, "benchmark:0", "test", StepProtocol(max_steps=5))]).values()
    assert (episode.outcome, episode.reason) == (Outcome.SUCCESS, "predicate")
