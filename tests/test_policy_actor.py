"""When the policy's thread waits for one more env, and when it does not."""

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vla_rl import policy_actor
from vla_rl.episode import ACTION_DIM, EpisodeSpec, Float32, Observation, StepProtocol
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policy_actor import PolicyActor, worth_waiting_s

MINUTE_S = 60.0


@pytest.mark.parametrize(
    ("asked", "forward_s", "expected_s", "wanted"),
    [
        (1, 10.0, [4.0], 4.0),  # one env idle for 4 s instead of the other for 10 - 4
        (1, 10.0, [6.0], 0.0),
        (1, 10.0, [5.0], 0.0),  # a tie starts
        (2, 10.0, [4.0], 0.0),  # two idle for 4 s, for 6 s of one
        (2, 10.0, [3.0, 9.0], 3.0),  # the next one decides, not the last
        (1, 10.0, [-1.0], 0.0),  # late: nobody knows how long it takes
        (1, 10.0, [-1.0, 2.0], 2.0),
        (1, 10.0, [], 0.0),
        (0, 10.0, [1.0], 0.0),
        (4, 10.0, [1.0], 0.0),  # full
    ],
)
def test_waits_where_that_saves_more_than_it_costs(asked: int, forward_s: float, expected_s: list[float], wanted: float) -> None:
    assert worth_waiting_s(asked, 4, forward_s, expected_s) == wanted


@given(st.integers(0, 8), st.floats(0, 100), st.lists(st.floats(-100, 100), max_size=8))
def test_never_waits_longer_than_half_a_forward(asked: int, forward_s: float, expected_s: list[float]) -> None:
    assert 0 <= worth_waiting_s(asked, 8, forward_s, expected_s) <= forward_s / 2


class Clock:
    """Stands in for `time`: it moves when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class SlowPolicy:
    """A forward that takes a minute of the clock."""

    spec = PolicySpec(2, 2)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.rows: list[int] = []

    def preprocess(self, observations: Sequence[Observation]) -> Tensor:
        """One row for each; padding counts."""
        return torch.tensor([observation.state[0] for observation in observations])

    def act(self, batch: Tensor, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """As many actions as rows, a minute later."""
        self._clock.now_s += MINUTE_S
        self.rows.append(len(batch.unique()))
        return PolicyOutput(torch.zeros(len(batch), 2, ACTION_DIM))

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """The same."""
        return actions_BCA.numpy()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(policy_actor, "time", clock)
    return clock


def answers(actor: PolicyActor, count: int) -> set[int]:
    """The envs of the next `count` answers."""
    envs: set[int] = set()
    while len(envs) < count:
        envs |= {env for env, _ in actor.ready(1.0)}
    return envs


def ask(actor: PolicyActor, env: int) -> None:
    state = torch.full((8,), float(env)).numpy()
    actor.submit(env, Observation({}, state, "reach"))


def begin_episode(actor: PolicyActor, env: int, number: int) -> None:
    actor.start(env, EpisodeSpec("reach", 0, f"sampled:{1_000_000 + number}", "train", StepProtocol(max_steps=8)))


def learn_chunk_length(actor: PolicyActor, env: int, clock: Clock) -> None:
    """Two answers with a chunk of 2 s between them, long after anything else."""
    clock.now_s += MINUTE_S
    for pause_s in (2.0, 0.0):
        ask(actor, env)
        assert answers(actor, 1) == {env}
        clock.now_s += pause_s


@pytest.fixture
def policy(clock: Clock) -> SlowPolicy:
    return SlowPolicy(clock)


@pytest.fixture
def actor(policy: SlowPolicy, clock: Clock) -> Iterator[PolicyActor]:
    """It knows that chunks of envs 0 and 1 take 2 s, from two forwards for each; env 1 has just been answered."""
    with closing(PolicyActor(policy, 2)) as actor:
        for env in (0, 1):
            begin_episode(actor, env, number=env)
            learn_chunk_length(actor, env, clock)
        assert policy.rows == [1, 1, 1, 1]
        policy.rows.clear()
        yield actor


def test_env_that_is_about_to_ask_is_waited_for(actor: PolicyActor, policy: SlowPolicy) -> None:
    """Env 1 needs 2 s for a chunk; env 0 asks, and a forward takes a minute: they share it."""
    ask(actor, 0)
    actor.ready(0.0)  # the policy's thread has a request, and waits for the other one
    ask(actor, 1)
    assert answers(actor, 2) == {0, 1}
    assert policy.rows == [2]


def test_env_that_begins_an_episode_is_not_waited_for(actor: PolicyActor, policy: SlowPolicy) -> None:
    """Nobody knows how long its reset takes. (An actor that waited would do so for ever: the clock stands still.)"""
    begin_episode(actor, 1, number=2)
    ask(actor, 0)
    assert answers(actor, 1) == {0}
    assert policy.rows == [1]
