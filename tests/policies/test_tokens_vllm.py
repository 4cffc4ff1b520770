"""Real vLLM on whole Reach episodes: what it writes is what transformers writes, with every version of the weights, and after its death."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokens_setup import AUTOREGRESSIVE, PARALLEL, REASONING_CAUSAL, RESOLUTION, make_tokens

from vla_rl.config import ConfigError
from vla_rl.episode import Episode, EpisodeSpec, Observation, StepProtocol, TokenRecord
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.records import stack_records
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokens.engines import open_vllm
from vla_rl.policies.tokens.policy import TokenPolicy
from vla_rl.policies.tokens.vllm_engine import EngineLost, VllmConfig
from vla_rl.policy_actor import PolicyActor
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig, make_pool

pytestmark = pytest.mark.timeout(1800)
"""Most of the time a process comes up, which takes a minute on an idle machine and many on a busy one."""
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
FOR_VLLM = replace(REASONING_CAUSAL, language=replace(REASONING_CAUSAL.language, head_width=32))
"""vLLM's attention on a CPU has heads of 32 and more."""
ROWS = 3
SAMPLING = Exploration(method="tokens", temperature=1.3, reasoning_temperature=0.8)
PATIENT = VllmConfig(python=str(PYTHON), start_s=1500.0, answer_s=600.0)
"""No deadline is tested where the real process answers."""
GAP = 1e-4
"""Largest difference (nats) of an action's log-probability: float32 on both sides, sums in another order (`ON_POLICY_BOUNDS`)."""


@pytest.fixture(scope="module")
def policy(statistics: Statistics) -> Iterator[TokenPolicy]:
    """A policy that reasons and acts, and the vLLM process that writes for it, with weights version 0."""
    torch.set_num_threads(1)
    made = make_tokens(FOR_VLLM, statistics)
    engine = open_vllm(made, PATIENT, ROWS)
    with pytest.raises(EngineLost, match="no weights"):
        made.act(made.preprocess([_observation()]), [0])
    engine.load(made.model.language, 0)
    yield made
    engine.close()


def _observation() -> Observation:
    image = np.zeros((RESOLUTION, RESOLUTION, 3), np.uint8)
    return Observation({"image": image, "image2": image}, np.zeros(8, np.float32), "pick up the milk")


def play(policy: TokenPolicy, exploration: Exploration | None) -> list[Episode]:
    """Whole episodes of Reach from images, the policy's tokens written by its engine."""
    assert policy.engine is not None
    specs = [EpisodeSpec("reach", n % 4, f"sampled:{1_000_000 + n}", "train", StepProtocol(max_steps=9, settle_steps=0)) for n in range(4)]
    actor = PolicyActor(policy, ROWS, weights_version=policy.engine.version, exploration=exploration)
    pool = make_pool(PoolConfig(backend="serial", workers=ROWS), EnvConfig(kind="reach", resolution=RESOLUTION))
    try:
        return list(run_episodes(pool, actor, ListSource(specs), lambda spec: look_of(actor.needs)))
    finally:
        pool.close()
        actor.close()


def steps_of(episodes: list[Episode]) -> Iterator[tuple[Observation, np.ndarray, TokenRecord | None, int]]:
    for episode in episodes:
        for step in episode.steps:
            yield step.observation, step.proposed.actions_CA, step.proposed.record, step.proposed.weights_version  # type: ignore[misc]


def written_here(policy: TokenPolicy, observation: Observation) -> np.ndarray:
    """The greedy chunk of this process's own decoding."""
    engine, policy.engine = policy.engine, None
    try:
        return policy.postprocess(policy.act(policy.preprocess([observation]), [0]).actions_BCA)[0]
    finally:
        policy.engine = engine


@pytest.mark.vllm
def test_greedy_episodes_are_transformers_before_and_after_an_update(policy: TokenPolicy) -> None:
    engine = policy.engine
    assert engine is not None
    before = engine.version
    first = list(steps_of(play(policy, None)))
    with torch.no_grad():
        for parameter in policy.model.language.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    stale = policy.act(policy.preprocess([first[0][0]]), [0]).actions_BCA
    engine.load(policy.model.language, before + 1)
    second = list(steps_of(play(policy, None)))
    assert len(first) >= 8 and len(second) >= 8
    assert {version for *_, version in first} == {before} and {version for *_, version in second} == {before + 1}
    for observation, actions, _, _ in second:
        np.testing.assert_array_equal(written_here(policy, observation), actions)
    moved = policy.postprocess(policy.act(policy.preprocess([first[0][0]]), [0]).actions_BCA)[0]
    assert not np.array_equal(moved, policy.postprocess(stale)[0]), "the update changed what is written"


@pytest.mark.vllm
def test_sampled_log_probs_are_the_trainers(policy: TokenPolicy, record_property: Callable[[str, object], None]) -> None:
    steps = list(steps_of(play(policy, SAMPLING)))
    records = [record for _, _, record, _ in steps if record is not None]
    assert len(records) == len(steps) >= 8 and all(record.well_formed is not None for record in records)
    batch = policy.preprocess([observation for observation, *_ in steps])
    with torch.no_grad():
        scored = policy.log_prob(batch, stack_records(records), SAMPLING).log_prob_BC.numpy()  # type: ignore[arg-type]
    gap = float(np.abs(scored - np.stack([record.log_prob_C for record in records])).max())
    record_property("log_prob_gap", gap)
    print(f"largest log-prob gap between vLLM and the trainer: {gap:.2e} nats over {len(steps)} chunks")
    assert gap <= GAP


@pytest.mark.vllm
def test_a_killed_process_is_replaced_and_has_the_weights_before_it_answers(policy: TokenPolicy) -> None:
    engine = policy.engine
    assert engine is not None and engine.pid is not None
    observation = next(steps_of(play(policy, None)))[0]
    starts, version, dead = engine.starts, engine.version, engine.pid
    os.kill(dead, signal.SIGKILL)
    actions = policy.postprocess(policy.act(policy.preprocess([observation]), [0]).actions_BCA)[0]
    assert (engine.starts, engine.version) == (starts + 1, version) and engine.pid != dead
    np.testing.assert_array_equal(written_here(policy, observation), actions)
    with pytest.raises(ValueError, match="versions only grow"):
        engine.load(policy.model.language, version)


@pytest.mark.vllm
def test_what_vllm_refuses_is_an_error_and_not_its_end(policy: TokenPolicy) -> None:
    engine = policy.engine
    assert engine is not None
    starts = engine.starts
    too_long = torch.zeros(10_000, policy.config.language.width)
    with pytest.raises(EngineLost, match="vLLM refused a request"):
        engine.write([too_long], range(4), None, 2, None, [0])
    assert policy.act(policy.preprocess([_observation()]), [0]).actions_BCA.isfinite().all()
    assert engine.starts == starts


def test_an_interpreter_that_is_not_there(statistics: Statistics) -> None:
    with pytest.raises(EngineLost, match=r"vllm.python is 'nowhere/python', which does not exist; `make vllm` builds"):
        open_vllm(make_tokens(FOR_VLLM, statistics), VllmConfig(python="nowhere/python"), ROWS)


def test_a_process_that_keeps_dying_says_why(statistics: Statistics) -> None:
    """This interpreter has no vLLM."""
    with pytest.raises(EngineLost, match=r"started 2 times without an answer(.|\n)*No module named 'vllm'"):
        open_vllm(make_tokens(FOR_VLLM, statistics), VllmConfig(python=sys.executable, lives=2), ROWS)


def test_a_policy_that_vllm_cannot_run(statistics: Statistics) -> None:
    with pytest.raises(
        ConfigError, match="a token policy of parallel decoding; rollout engines run token policies of decoding 'autoregressive'"
    ):
        open_vllm(make_tokens(PARALLEL, statistics), VllmConfig(), ROWS)


def test_heads_that_vllm_has_no_kernel_for(statistics: Statistics) -> None:
    with pytest.raises(ConfigError, match=r"policy.language.head_width is 16; vLLM's attention on a CPU has 32, 64"):
        open_vllm(make_tokens(AUTOREGRESSIVE, statistics), VllmConfig(), ROWS)


@pytest.mark.parametrize("changes", [{"cache_gib": 0}, {"lives": 0}, {"start_s": 0.0}, {"answer_s": -1.0}])
def test_settings_that_make_no_sense(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"vllm.{next(iter(changes))} is"):
        VllmConfig(**changes)  # type: ignore[arg-type]
