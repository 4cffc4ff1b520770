"""A policy that explores: records, log-probabilities and values agree between rollout and trainer; heads are added explicitly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl.config import ConfigError
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.episode import Observation
from vla_rl.policies.base import LossSums, PolicyOutput, TransitionBatch
from vla_rl.policies.checkpoint import CheckpointError, load_policy, load_weights, save_policy
from vla_rl.policies.critic import Critic, CriticConfig
from vla_rl.policies.extend import HEADS, extend_policy
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.flow_stochastic import Exploration, recorded_steps
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.pi0.policy import Pi0Policy

Observe = Callable[..., list[Observation]]
METHODS = [
    Exploration("flow_sde", "one", noise_level=0.3),
    Exploration("flow_sde", "all", noise_level=0.3),
    Exploration("flow_noise", "all"),
    Exploration("flow_noise", "last", noise_over="chunk"),
    Exploration("flow_sde", "all", likelihood="matching", matching_draws=3),
]
IDS = ["flow_sde-one", "flow_sde-all", "flow_noise-all", "flow_noise-last-chunk", "matching"]


def explorer(policy: FlowPolicy, reads: str = "prefix", detach: bool = True) -> FlowPolicy:
    """The policy with both heads and weights that make every input matter."""
    extended = extend_policy(policy, CriticConfig(reads=reads, detach=detach, hidden=(16,)), NoiseHeadConfig(hidden=(16,)), seed=1)  # type: ignore[arg-type]
    assert isinstance(extended, FlowPolicy)
    generator = torch.Generator().manual_seed(0)
    for parameter in extended.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return extended


def record_of(output: PolicyOutput) -> TransitionBatch:
    assert output.x_t_BKCA is not None and output.x_next_BKCA is not None and output.denoise_index_BK is not None
    return TransitionBatch(output.x_t_BKCA, output.x_next_BKCA, output.denoise_index_BK)


@pytest.mark.parametrize("exploration", METHODS, ids=IDS)
@pytest.mark.parametrize("reads", ["prefix", "expert"])
def test_the_trainer_sees_the_rollouts_log_probs_and_values_bit_for_bit(
    policy: FlowPolicy, observe: Observe, exploration: Exploration, reads: str
) -> None:
    acting = explorer(policy, reads)
    training: Any = Engine(explorer(policy, reads), EngineConfig(device="cpu"), total_updates=1).policy.train()
    batch = acting.preprocess(observe(6))
    output = acting.act(batch, range(6), exploration)
    scored = training.log_prob(batch, record_of(output), exploration)  # with gradient, through FSDP
    assert output.log_prob_BC is not None and output.value_B is not None
    assert torch.equal(scored.log_prob_BC, output.log_prob_BC)
    assert torch.equal(scored.value_B, output.value_B)
    assert torch.equal(acting.value(batch), output.value_B)
    assert scored.log_prob_BC.requires_grad and scored.value_B.requires_grad
    assert scored.log_prob_BC.shape == scored.entropy_BC.shape == (6, policy.config.chunk_length)
    steps = recorded_steps(exploration, policy.config.denoise_steps)
    assert scored.velocity_BKCA.shape == (6, steps, policy.config.chunk_length, policy.config.model_action_dim)


def test_a_row_explores_alike_in_any_batch_of_one_shape(policy: FlowPolicy, observe: Observe) -> None:
    acting, observations = explorer(policy), observe(6)
    among = acting.act(acting.preprocess(observations), range(6), METHODS[0])
    moved = acting.act(acting.preprocess(observations[::-1]), list(range(6))[::-1], METHODS[0])
    for name in ("actions_BCA", "x_t_BKCA", "x_next_BKCA", "denoise_index_BK", "log_prob_BC", "value_B"):
        assert torch.equal(getattr(among, name), getattr(moved, name).flip(0)), name


def test_without_exploration_the_heads_change_nothing(policy: FlowPolicy, observe: Observe) -> None:
    batch = policy.preprocess(observe(3))
    plain, extended = policy.act(batch, range(3)), extend_policy(policy, CriticConfig(), NoiseHeadConfig(), seed=0).act(batch, range(3))
    assert torch.equal(plain.actions_BCA, extended.actions_BCA)
    assert extended.value_B is None and extended.x_t_BKCA is None


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("reads", ["prefix", "expert"])
def test_the_value_loss_trains_the_critic_and_only_if_asked_the_policy(tiny: Pi0Policy, observe: Observe, reads: str, detach: bool) -> None:
    acting = explorer(tiny, reads, detach)
    acting.value(acting.preprocess(observe(3))).sum().backward()
    reached = {name for name, parameter in acting.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    heads = {name for name in reached if name.startswith("critic.")}
    assert heads == {name for name, _ in acting.named_parameters() if name.startswith("critic.")}
    assert (reached == heads) == detach


def test_the_value_depends_on_images_prompt_and_state(tiny: Pi0Policy, observe: Observe) -> None:
    for reads in ("prefix", "expert"):
        acting = explorer(tiny, reads)
        batch = acting.preprocess(observe(2))
        value = acting.value(batch)
        assert not torch.equal(value, acting.value(replace(batch, images_BVCHW=batch.images_BVCHW.flip(1))))
        assert not torch.equal(value, acting.value(replace(batch, tokens_BL=batch.tokens_BL.flip(1))))
        assert not torch.equal(value, acting.value(replace(batch, state_BS=batch.state_BS + 1)))


def test_masked_tokens_have_no_say() -> None:
    critic = Critic(CriticConfig(queries=2, hidden=(8,)), token_width=4, state_dims=3)
    torch.nn.init.normal_(critic.query_QM)
    tokens, mask, state = torch.randn(5, 6, 4), torch.ones(5, 6, dtype=torch.bool), torch.randn(5, 3)
    mask[:, 4:] = False
    changed = tokens.clone()
    changed[:, 4:] = 100.0
    assert torch.equal(critic(tokens, mask, state), critic(changed, mask, state))
    torch.testing.assert_close(critic(tokens[:, :4], mask[:, :4], state), critic(tokens, mask, state), atol=1e-6, rtol=0)  # other sums


def test_new_queries_are_the_mean_over_tokens() -> None:
    critic = Critic(CriticConfig(queries=1, hidden=()), token_width=4, state_dims=1)
    tokens, state = torch.randn(3, 5, 4), torch.zeros(3, 1)
    pooled = torch.nn.functional.layer_norm(tokens, (4,)).mean(1)
    last = critic.layers[0]
    assert isinstance(last, torch.nn.Linear)
    expected = torch.cat((pooled, state), 1) @ last.weight[0]
    torch.testing.assert_close(critic(tokens, torch.ones(3, 5, dtype=torch.bool), state), expected, atol=1e-6, rtol=0)  # float32


def test_shapes_that_contradict_each_other_are_refused() -> None:
    critic = Critic(CriticConfig(), token_width=4, state_dims=3)
    with pytest.raises(ValueError, match=r"\[3, 5, 4\].*\[3, 4\]"):
        critic(torch.zeros(3, 5, 4), torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 3))
    with pytest.raises(ConfigError, match=r"critic\.queries is 0"):
        CriticConfig(queries=0)
    with pytest.raises(ConfigError, match=r"noise_head\.hidden"):
        NoiseHeadConfig(hidden=(8, 0))


def test_heads_are_saved_with_the_policy_and_never_invented_by_the_loader(tiny: Pi0Policy, observe: Observe, tmp_path: Path) -> None:
    acting = explorer(tiny)
    save_policy(acting, tmp_path / "rl")
    loaded = load_policy(tmp_path / "rl")
    assert loaded.config == acting.config
    batch = acting.preprocess(observe(2))
    assert torch.equal(loaded.value(batch), acting.value(batch))
    save_policy(tiny, tmp_path / "sft")
    with pytest.raises(CheckpointError, match=r"missing[\s\S]*critic\.query_QM"):
        load_weights(acting, tmp_path / "sft" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"surplus[\s\S]*critic\.query_QM"):
        load_weights(tiny, tmp_path / "rl" / "model.safetensors")


def test_extending_keeps_weights_and_depends_on_the_seed_alone(tiny: Pi0Policy) -> None:
    first = extend_policy(tiny, CriticConfig(), NoiseHeadConfig(), seed=3)
    again, other = (extend_policy(tiny, CriticConfig(), NoiseHeadConfig(), seed=seed) for seed in (3, 4))
    weights = tiny.state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert name.startswith(HEADS) or torch.equal(weight, weights[name])
    assert not torch.equal(first.critic.layers[0].weight, other.critic.layers[0].weight)  # type: ignore[union-attr, index]
    kept = extend_policy(first, CriticConfig(), None, seed=9)
    assert torch.equal(kept.critic.layers[0].weight, first.critic.layers[0].weight)  # type: ignore[union-attr, index]
    assert kept.noise_head is None
    with pytest.raises(ConfigError, match="the initial policy has one of another config"):
        extend_policy(first, CriticConfig(queries=7), None, seed=0)


def test_a_value_without_a_critic_says_how_to_get_one(tiny: Pi0Policy, observe: Observe) -> None:
    with pytest.raises(ValueError, match="a policy with a critic"):
        tiny.value(tiny.preprocess(observe(1)))


def test_log_prob_gradient_reaches_expert_and_noise_head(tiny: Pi0Policy, observe: Observe) -> None:
    engine = Engine(explorer(tiny), EngineConfig(device="cpu", lr=1e-3), total_updates=1)
    preprocess: Any = engine.policy.preprocess
    batch = preprocess(observe(4))
    record = record_of(engine.infer(lambda policy: policy.act(batch, range(4), METHODS[2])))
    before = {name: weight.clone() for name, weight in engine.named_weights()}

    def loss(policy: FlowPolicy, rows: slice) -> LossSums:
        scored = policy.log_prob(batch.select(rows), record.select(rows), METHODS[2])
        return LossSums(-scored.log_prob_BC.sum(), torch.tensor(2.0), {})

    engine.forward_backward([slice(0, 2), slice(2, 4)], loss, lambda rows: 2.0)
    engine.optim_step()
    moved = {name.split(".")[1] if name.startswith("model.") else name.split(".")[0] for name, weight in engine.named_weights()
             if not torch.equal(weight, before[name])}  # fmt: skip
    assert {"expert", "noise_head", "vision", "language"} <= moved
