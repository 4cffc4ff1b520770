"""Rewards per control step, and user functions that go wrong in every way they can."""

import math
import sys
import threading
import types
from dataclasses import replace

import numpy as np
import pytest

from vla_rl.algorithms.rewards import RewardError, RewardSettings, episode_rewards, load_function
from vla_rl.config import ConfigError
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome, TokenRecord

SPEC = EpisodeSpec("libero_object", 0, "sampled:1000003", "train")


def episode(lengths: list[int], outcome: Outcome) -> Episode:
    observation = Observation({}, np.zeros(8, np.float32), "")
    steps = []
    for length in lengths:
        zeros = np.zeros((length, 7), np.float32)
        steps.append(ChunkStep(observation, ActionChunk(zeros), zeros, zeros, zeros[:, 0], np.zeros(length, bool), False, False, False))
    return Episode(SPEC, steps, None, outcome)


WON, LOST = episode([3, 2], Outcome.SUCCESS), episode([3, 2], Outcome.FAILURE)


def rows(rewards) -> list[list[float]]:
    assert all(row.dtype == np.float32 for row in rewards)
    return [[round(float(x), 6) for x in row] for row in rewards]


def test_success_pays_once_at_the_last_step():
    assert rows(episode_rewards(WON, RewardSettings())) == [[0, 0, 0], [0, 1]]
    assert rows(episode_rewards(LOST, RewardSettings())) == [[0, 0, 0], [0, 0]]


def test_an_empty_last_chunk_does_not_swallow_the_success():
    assert rows(episode_rewards(episode([2, 0], Outcome.SUCCESS), RewardSettings())) == [[0, 1], []]
    assert rows(episode_rewards(episode([0], Outcome.FAILURE), RewardSettings())) == [[]]
    assert episode_rewards(episode([], Outcome.FAILURE), RewardSettings()) == []


def test_step_penalty_is_per_executed_control_step():
    assert rows(episode_rewards(WON, RewardSettings("success_minus_steps", 0.25))) == [[-0.25] * 3, [-0.25, 0.75]]


def reasoned(forms: list[bool | None], lengths: list[int], outcome: Outcome) -> Episode:
    """Chunks of a token policy that reasoned in the right form, or not, or of one that does not reason."""
    made = episode(lengths, outcome)
    nothing = np.zeros(1, np.int64)
    for step, form in zip(made.steps, forms, strict=True):
        step.proposed = replace(step.proposed, record=TokenRecord(nothing, nothing > 0, np.zeros(1, np.float32), form))
    return made


def test_the_form_of_the_reasoning_pays_its_share_of_the_chunks_that_ran():
    settings = RewardSettings(format_coefficient=0.4)
    assert rows(episode_rewards(reasoned([True, False], [3, 2], Outcome.SUCCESS), settings)) == [[0, 0, 0], [0, 1.2]]
    assert rows(episode_rewards(reasoned([True, True], [3, 2], Outcome.FAILURE), settings)) == [[0, 0, 0], [0, 0.4]]
    assert rows(episode_rewards(reasoned([True, False], [3, 0], Outcome.FAILURE), settings)) == [[0, 0, 0.4], []]


@pytest.mark.parametrize("silent", [WON, reasoned([None, None], [3, 2], Outcome.SUCCESS)])
def test_a_form_that_does_not_exist_is_not_rewarded(silent: Episode):
    with pytest.raises(RewardError, match="the policy writes no reasoning whose form could be judged"):
        episode_rewards(silent, RewardSettings(format_coefficient=0.4))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", made)
    return made


def settings(kind="function", name="reward", **values) -> RewardSettings:
    return RewardSettings(kind, function=f"my_rewards:{name}", **values)


def test_progress_pays_each_chunks_change_at_its_end(module):
    module.measure = lambda episode: [0.0, 0.5, 0.25]
    rewards = episode_rewards(LOST, settings("progress", "measure", progress_coefficient=2.0))
    assert rows(rewards) == [[0, 0, 1.0], [0, -0.5]]
    assert rows(episode_rewards(WON, settings("progress", "measure"))) == [[0, 0, 0.5], [0, 0.75]]


def test_a_users_function_is_asked_per_step(module):
    module.reward = lambda episode: [10 * step for step in range(episode.num_steps)]
    assert rows(episode_rewards(LOST, settings())) == [[0, 10, 20], [30, 40]]


def fails(episode):
    raise KeyError("cup")


def exits(episode):
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda e: [1.0, 2.0], r"returned shape \[2\] for .*libero_object.*; it must be \[5\]: one number per control step"),
        (lambda e: np.zeros((5, 1)), r"returned shape \[5, 1\]"),
        (lambda e: [0, 0, math.nan, 0, 0], r"returned nan at index 2"),
        (lambda e: None, r"returned (None|shape)"),
        (lambda e: "high", r"returned 'high' .*not numbers"),
        (fails, r"raised KeyError: 'cup' for "),
        (exits, r"raised SystemExit: 3"),
    ],
)
def test_wrong_answers_are_explained(module, function, message):
    module.reward = function
    with pytest.raises(RewardError, match=rf"my_rewards:reward' {message}"):
        episode_rewards(LOST, settings())


def test_a_progress_measure_has_one_more_value_than_chunks(module):
    module.measure = lambda episode: [0.0, 1.0]
    with pytest.raises(RewardError, match=r"it must be \[3\]: one number per chunk and one for the end"):
        episode_rewards(LOST, settings("progress", "measure"))


def test_a_function_that_hangs_is_named_with_the_place(module):
    release = threading.Event()

    def waits_for_ever(episode):
        release.wait()

    module.reward = waits_for_ever
    try:
        with pytest.raises(RewardError, match=r"(?s)took more than reward.time_limit_s = 0.2 s for .*waits_for_ever"):
            episode_rewards(LOST, settings(time_limit_s=0.2))
    finally:
        release.set()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reward", r"'reward'; it must be 'module:name'"),
        ("no_such_module:reward", r"module 'no_such_module' cannot be imported"),
        ("my_rewards:rewrad", r"no function 'rewrad'; did you mean 'reward'\?"),
        ("my_rewards:number", r"no function 'number'"),
    ],
)
def test_functions_that_are_not_there(module, path, message):
    module.reward, module.number = (lambda episode: []), 3
    with pytest.raises(RewardError, match=message):
        load_function(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "progress"}, "reward.kind is 'progress', which needs reward.function"),
        ({"function": "a:b"}, "reward.function is 'a:b', but reward.kind 'success' does not call it"),
        ({"privileged": True}, "reward.privileged is true, but reward.kind 'success' calls no function"),
        ({"step_penalty": -0.1}, r"reward.step_penalty is -0\.1; allowed: at least 0"),
        ({"progress_coefficient": 0}, "reward.progress_coefficient is 0; allowed: above 0"),
        ({"time_limit_s": 0}, "reward.time_limit_s is 0; allowed: above 0"),
    ],
)
def test_contradicting_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RewardSettings(**values)
