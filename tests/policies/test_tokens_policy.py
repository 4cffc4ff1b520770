"""Token policies as policies: what is written, how likely it was, and what training sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokens_setup import AUTOREGRESSIVE, FORMS, PARALLEL, REASONING, RESOLUTION, make_tokens

from vla_rl.config import ConfigError
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.episode import ACTION_DIM, Observation
from vla_rl.policies.base import PolicyOutput, TokenBatch
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.extend import extend_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import TokenizerError
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.decoding import choose, token_log_prob
from vla_rl.policies.tokens.policy import TokenPolicy
from vla_rl.policies.tokens.reasoning import motion_text, well_formed
from vla_rl.policies.tokens.vocabulary import Vocabulary

Observe = Callable[..., list[Observation]]
SAMPLING = Exploration(method="tokens", temperature=1.3, reasoning_temperature=0.7)
CRITIC = CriticConfig(queries=2, hidden=(8,))
ROWS = 4


@pytest.fixture(params=FORMS)
def config(request: pytest.FixtureRequest) -> TokenConfig:
    return FORMS[request.param]


def record_of(output: PolicyOutput) -> TokenBatch:
    assert output.tokens_BT is not None and output.token_mask_BT is not None
    return TokenBatch(output.tokens_BT, output.token_mask_BT)


def actions_of(rows: int, config: TokenConfig, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, config.chunk_length, ACTION_DIM)).astype(np.float32)


def test_cached_decoding_is_the_uncached_one(config: TokenConfig, statistics: Statistics, observe: Observe) -> None:
    """Greedy tokens from the cache, against tokens from whole forward passes: each must be the likeliest given those before it."""
    policy = make_tokens(config, statistics)
    batch = policy.preprocess(observe(ROWS, RESOLUTION))
    with torch.no_grad():
        x_BPM, valid_BP = policy.model.embed_prefix(batch, batch.images_BVCHW)
        written = policy.write(x_BPM, valid_BP, None, None)
        reading = policy.read(x_BPM, valid_BP, written)
    assert torch.equal(policy.action_logits(reading).argmax(-1), written.actions_BN)
    if config.reasoning_tokens and not config.skip_reasoning:
        likeliest = policy.text_logits(reading).argmax(-1)
        assert torch.equal(torch.where(written.text_mask_BR, likeliest, 0), written.text_BR)


def test_the_trainer_sees_the_rollouts_log_probs_and_values_bit_for_bit(
    config: TokenConfig, statistics: Statistics, observe: Observe
) -> None:
    acting = make_tokens(replace(config, critic=CRITIC), statistics)
    training: Any = Engine(make_tokens(replace(config, critic=CRITIC), statistics), EngineConfig(device="cpu"), total_updates=1).policy
    batch = acting.preprocess(observe(ROWS, RESOLUTION))
    output = acting.act(batch, range(ROWS), SAMPLING)
    scored = training.train().log_prob(batch, record_of(output), SAMPLING)  # with gradient, through FSDP
    assert output.log_prob_BC is not None and output.value_B is not None
    assert output.log_prob_BC.shape == (ROWS, config.chunk_length)
    assert torch.equal(scored.log_prob_BC, output.log_prob_BC)
    assert torch.equal(scored.value_B, output.value_B)
    # `value` reads the prefix alone: the same sums over fewer positions.
    torch.testing.assert_close(acting.value(batch), output.value_B, atol=1e-5, rtol=1e-5)


def test_log_prob_is_what_a_slow_reference_adds_up(statistics: Statistics, observe: Observe) -> None:
    """Autoregressive with reasoning: one forward pass per token over exactly the tokens before it, no padding, no cache."""
    policy = make_tokens(FORMS["reasoning_autoregressive"], statistics)
    batch = policy.preprocess(observe(2, RESOLUTION))
    output = policy.act(batch, [3, 4], SAMPLING)
    assert output.log_prob_BC is not None
    for row in range(2):
        expected = slow_log_prob(policy, batch.select(slice(row, row + 1)), record_of(output).select(slice(row, row + 1)))
        torch.testing.assert_close(output.log_prob_BC[row], expected, atol=1e-4, rtol=1e-5)  # float32, sums in another order


def slow_log_prob(policy: TokenPolicy, batch: Any, record: TokenBatch) -> torch.Tensor:
    """float32[C] by the definition."""
    vocabulary, length = policy.vocabulary, policy.config.reasoning_tokens
    model = policy.model
    log_prob_C = torch.zeros(policy.config.chunk_length)
    with torch.no_grad():
        prefix, valid = model.embed_prefix(batch, batch.images_BVCHW)
        so_far = [*prefix[0][valid[0]]]

        def score(token: int, choices: range, temperature: float) -> float:
            hidden = model.language.model(inputs_embeds=torch.stack(so_far)[None], use_cache=False).last_hidden_state[0, -1]
            logits = model.language.get_submodule("lm_head")(hidden)[list(choices)] / temperature  # type: ignore[operator]
            return float(logits.log_softmax(-1)[choices.index(token)])

        def add(token: int) -> None:
            so_far.append(model.embed(torch.tensor([[token]]))[0, 0])

        add(vocabulary.think)
        for token in record.tokens_BT[0, :length][record.mask_BT[0, :length]].tolist():
            log_prob_C[0] += score(token, range(vocabulary.end_think + 1), SAMPLING.reasoning_temperature)
            add(token)
        add(vocabulary.act)
        for place, token in enumerate(record.tokens_BT[0, length:].tolist()):
            action = token + vocabulary.first_action
            log_prob_C[place // ACTION_DIM] += score(action, range(vocabulary.first_action, vocabulary.size), SAMPLING.temperature)
            add(action)
    return log_prob_C


def test_a_rows_tokens_depend_on_its_own_seed_alone(config: TokenConfig, statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(config, statistics)
    observations = observe(ROWS, RESOLUTION)
    forward = policy.act(policy.preprocess(observations), [5, 6, 7, 8], SAMPLING)
    backward = policy.act(policy.preprocess(observations[::-1]), [8, 7, 6, 5], SAMPLING)
    other = policy.act(policy.preprocess(observations), [15, 16, 17, 18], SAMPLING)
    assert forward.tokens_BT is not None and backward.tokens_BT is not None and other.tokens_BT is not None
    assert torch.equal(forward.tokens_BT, backward.tokens_BT.flip(0))
    assert torch.equal(forward.actions_BCA, backward.actions_BCA.flip(0))
    assert (forward.tokens_BT != other.tokens_BT).any(1).all()


def test_without_exploration_seeds_do_not_matter(config: TokenConfig, statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(config, statistics)
    batch = policy.preprocess(observe(ROWS, RESOLUTION))
    first, second = policy.act(batch, range(ROWS)), policy.act(batch, range(ROWS, 2 * ROWS))
    assert torch.equal(first.actions_BCA, second.actions_BCA)
    assert first.log_prob_BC is None and first.tokens_BT is None
    assert policy.postprocess(first.actions_BCA).shape == (ROWS, config.chunk_length, ACTION_DIM)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    draws = 20_000
    uniform = torch.rand(draws, 1, generator=torch.Generator().manual_seed(0))
    tokens = choose(logits.expand(draws, 1, 4), 1.6, uniform)[:, 0]
    share = torch.bincount(tokens, minlength=4) / draws
    expected = (logits / 1.6).softmax(-1)
    assert (share - expected).abs().max() < 4 * (0.25 / draws) ** 0.5, "four standard errors of a share"
    log_prob, entropy = token_log_prob(logits.expand(4, 4), torch.arange(4), 1.6)
    torch.testing.assert_close(log_prob, expected.log())
    assert float(entropy[0]) == pytest.approx(-float((expected * expected.log()).sum()))


def test_a_number_at_the_very_end_of_the_distribution_still_chooses_a_token() -> None:
    logits = torch.full((1, 1, 7), -3.0)
    for uniform in (0.0, 1.0 - 2**-24):
        assert 0 <= int(choose(logits, 1.0, torch.tensor([[uniform]]))) <= 6
    certain = torch.tensor([[[-1e4, 0.0, -1e4]]])
    for uniform in (0.0, 0.5, 1.0 - 2**-24):
        assert int(choose(certain, 1.0, torch.tensor([[uniform]]))) == 1


def test_sft_loss_is_the_cross_entropy_of_real_actions(statistics: Statistics, observe: Observe) -> None:
    """Hand-made: for every real action of every row, minus the log-probability of its 7 bins; weights count."""
    policy = make_tokens(PARALLEL, statistics)
    mask = np.array([[True, True, True], [True, False, False], [True, True, False]])
    batch = policy.preprocess(observe(3, RESOLUTION), actions_of(3, PARALLEL), mask)
    batch.weight_B = torch.tensor([1.0, 2.0, 0.5])
    assert batch.actions_BCA is not None
    tokens_BN, _ = policy.actions.encode(batch.actions_BCA)
    greedy = Exploration(method="tokens")
    record = TokenBatch(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))
    log_prob_BC = policy.log_prob(batch, record, greedy).log_prob_BC
    expected = -(log_prob_BC * torch.from_numpy(mask) * batch.weight_B[:, None]).sum()
    sums = policy.sft_loss(batch, [1, 2, 3])
    torch.testing.assert_close(sums.loss_sum, expected, atol=1e-3, rtol=1e-5)
    assert float(sums.count) == (3 * 1.0 + 1 * 2.0 + 2 * 0.5) * ACTION_DIM
    parts = [sums.metrics[f"loss_{name}"] for name in ("translation", "rotation", "gripper")]
    torch.testing.assert_close(sum(parts), sums.loss_sum.detach(), atol=1e-3, rtol=1e-5)


def test_cutting_a_batch_changes_no_sum(config: TokenConfig, statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(config, statistics).train()
    mask = np.ones((4, config.chunk_length), bool)
    mask[1, 1:] = False
    batch = policy.preprocess(observe(4, RESOLUTION), actions_of(4, config), mask)
    whole = policy.sft_loss(batch, range(4))
    parts = [policy.sft_loss(batch.select(slice(start, start + 2)), range(start, start + 2)) for start in (0, 2)]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum, atol=1e-3, rtol=1e-5)
    assert sum(float(part.count) for part in parts) == float(whole.count) == mask.sum() * ACTION_DIM


def test_everything_learns(config: TokenConfig, statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(replace(config, skip_reasoning=False), statistics).train()
    policy.sft_loss(policy.preprocess(observe(2, RESOLUTION), actions_of(2, config)), [1, 2]).loss_sum.backward()
    still = [name for name, parameter in policy.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not still


def test_reasoning_says_what_the_chunk_does(statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(REASONING, statistics)
    actions = np.zeros((2, 3, ACTION_DIM), np.float32)
    actions[0, :, 0], actions[0, :, 2], actions[0, :, 6] = 0.5, -0.4, 1.0
    actions[1, 0, 1], actions[1, :, 6] = 0.9, -1.0
    mask = np.array([[True, True, True], [True, False, False]])
    assert [motion_text(chunk, real) for chunk, real in zip(actions, mask)] == ["front bottom close", "left open"]
    batch = policy.preprocess(observe(2, RESOLUTION), actions, mask)
    assert batch.reasoning_BR is not None and batch.reasoning_mask_BR is not None
    words = policy.processor.tokenizer.tokenizer
    for text, tokens, real in zip(("front bottom close", "left open"), batch.reasoning_BR, batch.reasoning_mask_BR):
        *said, end = tokens[real].tolist()
        assert words.decode(said).strip() == text and end == policy.vocabulary.end_think
    assert well_formed(batch.reasoning_BR, batch.reasoning_mask_BR, policy.vocabulary).all()


def test_a_reasoning_without_room_names_its_own_setting(statistics: Statistics, observe: Observe) -> None:
    """Start token, three directions, the gripper, and the end: six."""
    policy = make_tokens(replace(REASONING, reasoning_tokens=5), statistics)
    actions = np.full((1, 3, ACTION_DIM), 0.5, np.float32)
    with pytest.raises(TokenizerError, match="needs 6 tokens and there are reasoning_tokens=5; raise reasoning_tokens to at least 6"):
        policy.preprocess(observe(1, RESOLUTION), actions)
    assert make_tokens(REASONING, statistics).preprocess(observe(1, RESOLUTION), actions).reasoning_BR is not None


def test_the_form_of_reasoning() -> None:
    vocabulary = Vocabulary(text=10, actions=4)
    end = vocabulary.end_think
    tokens = torch.tensor([[3, end, 0], [3, 4, 5], [end, 0, 0]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    assert well_formed(tokens, mask, vocabulary).tolist() == [True, False, False], "closed; never closed; closed without a word"


def test_skipping_the_reasoning_writes_none_and_counts_none(statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(FORMS["skipped"], statistics)
    batch = policy.preprocess(observe(ROWS, RESOLUTION))
    output = policy.act(batch, range(ROWS), SAMPLING)
    assert output.tokens_BT is not None and output.log_prob_BC is not None
    assert (output.tokens_BT[:, 0] == policy.vocabulary.end_think).all()
    assert output.tokens_BT.shape[1] == 1 + policy.actions.length
    with torch.no_grad():
        x_BPM, valid_BP = policy.model.embed_prefix(batch, batch.images_BVCHW)
        written = policy.write(x_BPM, valid_BP, None, None)
        reading = policy.read(x_BPM, valid_BP, written)
        log_prob_BN, _ = token_log_prob(policy.action_logits(reading), output.tokens_BT[:, 1:], SAMPLING.temperature)
    expected = log_prob_BN.unflatten(1, (-1, ACTION_DIM)).sum(-1)
    torch.testing.assert_close(output.log_prob_BC, expected, atol=1e-5, rtol=1e-5)


def test_the_wrong_exploration_is_an_error_with_the_right_one(statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(PARALLEL, statistics)
    batch = policy.preprocess(observe(1, RESOLUTION))
    with pytest.raises(ConfigError, match=r"exploration.method is 'flow_sde'.*set exploration.method to 'tokens'"):
        policy.act(batch, [0], Exploration())


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (AUTOREGRESSIVE, {"prefix_attention": "bidirectional"}, "set prefix_attention to 'causal'"),
        (PARALLEL, {"executed_horizon": 9}, "executed_horizon is 9"),
        (PARALLEL, {"reasoning_tokens": 1}, "reasoning_tokens is 1"),
        (PARALLEL, {"skip_reasoning": True}, "there is nothing to skip"),
        (PARALLEL, {"critic": CriticConfig(reads="expert")}, "set it to 'prefix'"),
    ],
)
def test_contradictions_are_refused(base: TokenConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(base, **changes)


def test_fast_needs_autoregressive_decoding() -> None:
    with pytest.raises(ConfigError, match="set decoding to 'autoregressive'"):
        replace(PARALLEL, action_tokens=replace(PARALLEL.action_tokens, kind="fast"))


def test_a_critic_is_added_and_a_noise_head_is_refused(statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(PARALLEL, statistics)
    batch = policy.preprocess(observe(2, RESOLUTION))
    with_critic = extend_policy(policy, CRITIC, None, seed=0)
    assert torch.equal(with_critic.act(batch, [1, 2]).actions_BCA, policy.act(batch, [1, 2]).actions_BCA)
    assert with_critic.value(batch).shape == (2,)
    with pytest.raises(ValueError, match="needs a policy with a critic"):
        policy.value(batch)
    with pytest.raises(ConfigError, match="a noise head is for flows, and the initial policy's family is 'tokens'"):
        extend_policy(policy, None, NoiseHeadConfig(), seed=0)


def test_no_expert_to_train(statistics: Statistics) -> None:
    with pytest.raises(ConfigError, match="no action expert; allowed: all, lora"):
        make_tokens(PARALLEL, statistics).parameter_names("expert")


def test_a_saved_policy_writes_bit_for_bit_as_before(config: TokenConfig, statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    policy = make_tokens(config, statistics)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.config == config
    batch = policy.preprocess(observe(2, RESOLUTION))
    ours, theirs = (made.act(batch, [1, 2], SAMPLING) for made in (policy, loaded))
    assert ours.tokens_BT is not None and theirs.tokens_BT is not None
    assert torch.equal(ours.tokens_BT, theirs.tokens_BT) and torch.equal(ours.actions_BCA, theirs.actions_BCA)


def test_a_policy_that_denoises_nothing_takes_one_seed_per_row(statistics: Statistics, observe: Observe) -> None:
    policy = make_tokens(PARALLEL, statistics)
    batch = policy.preprocess(observe(2, RESOLUTION), actions_of(2, PARALLEL), np.ones((2, PARALLEL.chunk_length), bool))
    with pytest.raises(ValueError, match="4 noise seeds for a batch of 2 rows; token policies denoise nothing"):
        policy.sft_loss(batch, range(4))


def test_the_smallest_temperature_gives_numbers() -> None:
    """Its distribution is all but certain: log-probability 0 for the likeliest token, a finite one for all others, entropy 0."""
    logits_BNW = torch.tensor([[[-40.0, 0.0, 40.0]]])
    for token, expected in ((2, 0.0), (1, -4e5), (0, -8e5)):
        log_prob_BN, entropy_BN = token_log_prob(logits_BNW, torch.tensor([[token]]), 1e-4)
        assert log_prob_BN.item() == pytest.approx(expected) and entropy_BN.item() == 0
