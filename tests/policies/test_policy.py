"""The `Policy` contract, kept by tiny policies of the families that denoise actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError
from vla_rl.episode import ACTION_DIM, Observation
from vla_rl.policies.base import Batch, PolicySpec
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import family, make_policy, policy_spec
from vla_rl.policies.flow import row_noise
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config
from vla_rl.policies.pi0.model import Pi0Model
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.statistics import Statistics

Observe = Callable[..., list[Observation]]


def training_batch(policy: FlowPolicy, observe: Observe, rows: int = 6) -> Batch:
    generator = np.random.default_rng(1)
    actions = generator.uniform(-1, 1, (rows, policy.config.chunk_length, ACTION_DIM)).astype(np.float32)
    mask = np.arange(policy.config.chunk_length) < generator.integers(1, policy.config.chunk_length + 1, (rows, 1))
    return policy.preprocess(observe(rows), actions, mask)


def randomize(policy: torch.nn.Module) -> None:
    """Random weights everywhere: a fresh policy's output layer and adaptive gates are zero, so that it ignores its inputs."""
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def test_act_is_deterministic_given_its_seeds(policy: FlowPolicy, observe: Observe) -> None:
    batch = policy.preprocess(observe(4))
    first, again = policy.act(batch, [1, 2, 3, 4]).actions_BCA, policy.act(batch, [1, 2, 3, 4]).actions_BCA
    assert torch.equal(first, again)
    assert not torch.equal(first, policy.act(batch, [1, 2, 3, 5]).actions_BCA)
    assert policy.postprocess(first).shape == (4, policy.spec.chunk_length, ACTION_DIM)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy)
    observations = observe(8)
    among = policy.act(policy.preprocess(observations), range(8)).actions_BCA
    alone = policy.act(policy.preprocess(observations[3:4]), [3]).actions_BCA
    torch.testing.assert_close(among[3], alone[0], atol=2e-5, rtol=0)  # matrix products of other shapes sum in other orders
    padded = [observations[3], *[observations[0]] * 7]
    same_shape = policy.act(policy.preprocess(padded), [3, *[0] * 7]).actions_BCA
    moved = policy.act(policy.preprocess([*[observations[5]] * 7, observations[3]]), [*[9] * 7, 3]).actions_BCA
    assert torch.equal(same_shape[0], moved[7]), "equal batch shapes must give equal bits"


def test_actions_depend_on_every_input(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy)
    batch = policy.preprocess(observe(1))
    base = policy.act(batch, [0]).actions_BCA
    changes = {
        "agent view": {"images_BVCHW": batch.images_BVCHW * torch.tensor([0.5, 1.0]).reshape(1, 2, 1, 1, 1)},
        "wrist view": {"images_BVCHW": batch.images_BVCHW * torch.tensor([1.0, 0.5]).reshape(1, 2, 1, 1, 1)},
        "prompt": {"tokens_BL": batch.tokens_BL + batch.token_mask_BL.long()},
    }
    if policy.config.family != "pi05":  # which reads it from the prompt
        changes["state"] = {"state_BS": batch.state_BS + 1}
    for name, change in changes.items():
        assert (policy.act(replace(batch, **change), [0]).actions_BCA - base).abs().max() > 1e-4, name


def test_padding_of_the_prompt_is_not_read(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy)
    batch = policy.preprocess(observe(2))
    other = replace(batch, tokens_BL=torch.where(batch.token_mask_BL, batch.tokens_BL, 5))
    assert torch.equal(policy.act(batch, [0, 1]).actions_BCA, policy.act(other, [0, 1]).actions_BCA)


def test_loss_equals_a_slow_loop_over_real_actions(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy)
    batch = replace(training_batch(policy, observe), weight_B=torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0]))
    assert batch.actions_BCA is not None
    assert batch.action_mask_BC is not None
    assert batch.weight_B is not None
    numbers = row_noise(range(6), tuple(batch.actions_BCA.shape[1:]), 4, torch.device("cpu"))  # type: ignore[arg-type]
    time = policy.flow.sample_time(numbers.uniform_B)
    x_BCA = policy.flow.path(batch.actions_BCA, numbers.noise_BCA, time)
    velocity = policy.velocity(policy.encode(batch), batch, x_BCA, time).detach()
    sign = -1.0 if policy.config.family == "groot" else 1.0  # its velocity points from noise to actions
    total, count, gripper = 0.0, 0.0, 0.0
    for row in range(6):
        for step in range(policy.config.chunk_length):
            if batch.action_mask_BC[row, step]:
                for dim in range(ACTION_DIM):
                    target = sign * (numbers.noise_BCA[row, step, dim] - batch.actions_BCA[row, step, dim])
                    error = float(batch.weight_B[row] * (velocity[row, step, dim] - target) ** 2)
                    total, count = total + error, count + float(batch.weight_B[row])
                    gripper += error if dim == 6 else 0.0
    sums = policy.sft_loss(batch, range(6))
    assert float(sums.loss_sum.detach()) == pytest.approx(total, rel=1e-4)
    assert float(sums.count) == pytest.approx(count)
    assert float(sums.metrics["loss_gripper"]) == pytest.approx(gripper, rel=1e-4)
    assert sum(sums.metrics.values()) == pytest.approx(float(sums.loss_sum.detach()), rel=1e-5)


def test_micro_batches_sum_to_the_batch(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy.train())
    batch = training_batch(policy, observe)
    whole = policy.sft_loss(batch, range(6))
    parts = [policy.sft_loss(batch.select(slice(i, i + 2)), range(i, i + 2)) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum, rtol=1e-5, atol=0)
    assert sum(part.count for part in parts) == whole.count


def test_several_draws_are_the_mean_over_strata_of_time(policy: FlowPolicy, observe: Observe) -> None:
    """Three draws against three passes of their own, each with the time of its third of the distribution written out."""
    randomize(policy.eval())
    batch = training_batch(policy, observe, rows=2)
    seeds = [11, 12, 21, 22, 31, 32]
    errors: list[float] = []
    for draw in range(3):
        shape = (policy.config.chunk_length, policy.config.model_action_dim)
        numbers = row_noise(seeds[2 * draw : 2 * draw + 2], shape, policy.augment_numbers(), policy.device)
        time_B = policy.flow.sample_time((draw + numbers.uniform_B) / 3)
        x_BCA = policy.flow.path(batch.actions_BCA, numbers.noise_BCA, time_B)
        velocity_BCA = policy.velocity(policy.encode(batch), batch, x_BCA, time_B)
        error_BCD = (velocity_BCA - policy.flow.target(batch.actions_BCA, numbers.noise_BCA))[..., :ACTION_DIM].square()
        errors.append(float((error_BCD.detach() * batch.action_mask_BC[..., None]).sum()))
    sums, single = policy.sft_loss(batch, seeds), policy.sft_loss(batch, seeds[:2])
    assert float(sums.loss_sum.detach()) == pytest.approx(sum(errors) / 3, rel=1e-5)  # float32 sums in another order
    assert float(sums.count) == float(single.count), "the divisor counts actions, not draws"
    assert float(single.loss_sum.detach()) != pytest.approx(errors[0], rel=1e-3), "one draw has the whole range of times"


def test_seeds_that_rows_cannot_share_are_refused(policy: FlowPolicy, observe: Observe) -> None:
    with pytest.raises(ValueError, match="5 noise seeds for a batch of 2 rows"):
        policy.sft_loss(training_batch(policy, observe, rows=2), range(5))


def test_images_shift_in_training_only(tiny: Pi0Policy, observe: Observe) -> None:
    randomize(tiny)
    batch = training_batch(tiny, observe)
    still = tiny.eval().sft_loss(batch, range(6)).loss_sum
    shifted = tiny.train().sft_loss(batch, range(6)).loss_sum
    assert not torch.equal(still, shifted)
    unshifted = replace(tiny.config, shift_pixels=0)
    tiny.config = unshifted
    assert torch.equal(tiny.sft_loss(batch, range(6)).loss_sum, still)


def test_every_trainable_parameter_gets_a_gradient_and_no_other(policy: FlowPolicy, observe: Observe) -> None:
    randomize(policy)
    policy.train().sft_loss(training_batch(policy, observe), range(6)).loss_sum.backward()
    trainable = set(policy.parameter_names("all"))
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) == (name in trainable), name
    expert = policy.parameter_names("expert")
    assert 0 < len(expert) < len(trainable)
    assert not any("vision" in name or "language" in name or "projector" in name for name in expert)
    wanted = {"action_head"} if policy.config.family == "groot" else {"expert", "action_in_proj", "action_out_proj"}
    assert {name.split(".")[1] for name in expert} >= wanted


def test_a_few_updates_fit_one_batch(policy: FlowPolicy, observe: Observe) -> None:
    """An output that ignores x_t cannot go below 1, the variance of the noise in the target."""
    policy.train()
    batch = training_batch(policy, observe, rows=1).select(torch.zeros(8, dtype=torch.long))
    batch = replace(batch, action_mask_BC=torch.ones(8, policy.config.chunk_length, dtype=torch.bool))  # less noise in the loss
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for update in range(40):
        sums = policy.sft_loss(batch, range(update * 8, update * 8 + 8))
        loss = sums.loss_sum / sums.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.85, losses


def test_weights_depend_on_the_seed_alone(statistics: Statistics) -> None:
    config = PI0_PRESETS["tiny"]
    spec = policy_spec(config, resolution=64)
    first = make_policy(config, statistics, spec, seed=1).state_dict()
    torch.manual_seed(77)
    second = make_policy(config, statistics, spec, seed=1).state_dict()
    other = make_policy(config, statistics, spec, seed=2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_presets_are_tiny_or_published() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Pi0Model(config, views=2).parameters()) for name, config in PI0_PRESETS.items()}
    assert 2e6 <= sizes["tiny"] <= 6e6
    assert 2e6 <= sizes["tiny_pi05"] <= 6e6
    assert sizes["pi0_base"] > 3e9
    assert sizes["pi05_base"] > 3e9


def test_unknown_family_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'pi5' is unknown; did you mean 'pi05'\?"):
        family("pi5")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pi0Config(executed_horizon=9), "executed_horizon is 9, it must be 1 to chunk_length, which is 8"),
        (lambda: Pi0Config(denoise_steps=0), "denoise_steps is 0"),
        (lambda: Pi0Config(expert=TransformerConfig(depth=2)), r"language\.depth is 3 and expert\.depth is 2"),
        (lambda: Pi0Config(family="pi05"), "normalization must be 'quantiles' or 'min_max'"),
        (lambda: Pi0Config(shift_pixels=-1), "shift_pixels is -1"),
        (lambda: Pi0Config(model_action_dim=6), "model_action_dim is 6, it must be at least 7"),
        (lambda: TransformerConfig(heads=4, kv_heads=3), "heads is 4, it must be a multiple of kv_heads, which is 3"),
        (lambda: TransformerConfig(width=33), "width is 33, it must be even"),
        (lambda: TransformerConfig(depth=0), "depth is 0, it must be at least 1"),
        (lambda: VisionConfig(image_size=60), "image_size is 60, it must be a multiple of patch_size, which is 16"),
        (lambda: VisionConfig(patch_size=8), "4 conv_channels halve the image to cells of 16 pixels"),
        (lambda: VisionConfig(heads=5), "width is 128, it must be a multiple of heads, which is 5"),
        (lambda: VisionConfig(patch_size=0), "patch_size is 0, it must be at least 1"),
        (lambda: VisionConfig(heads=0), "heads is 0, it must be at least 1"),
        (lambda: VisionConfig(depth=-1), "depth is -1, it must be at least 0"),
        (lambda: VisionConfig(conv_channels=(32, 0, 64, 64)), r"conv_channels is \[32, 0, 64, 64\], it must be at least 1"),
        (lambda: Pi0Config(time_min_period=0.0), r"time_min_period is 0\.0 and time_max_period 4\.0; they must satisfy 0 < "),
        (lambda: Pi0Config(time_max_period=0.05), r"time_min_period is 0\.1 and time_max_period 0\.05"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_spec_or_tokenizer_that_does_not_fit_is_named(statistics: Statistics) -> None:
    config = PI0_PRESETS["tiny"]
    with pytest.raises(ConfigError, match="chunk_length is 4 in the policy's spec and 8 in its config"):
        make_policy(config, statistics, PolicySpec(chunk_length=4, executed_horizon=4))
    with pytest.raises(ConfigError, match=r"vocabulary is 100, the tokenizer in .* has 843 tokens"):
        make_policy(replace(config, vocabulary=100), statistics, policy_spec(config, resolution=64))


def test_misuse_of_the_policy_is_named(tiny: Pi0Policy, observe: Observe) -> None:
    batch = tiny.preprocess(observe(2))
    with pytest.raises(ValueError, match="3 noise seeds for a batch of 2 rows"):
        tiny.act(batch, [1, 2, 3])
    with pytest.raises(ValueError, match="sft_loss needs a batch with actions"):
        tiny.sft_loss(batch, [1, 2])
    with pytest.raises(ValueError, match="'vision' are not one of 'all', 'expert'"):
        tiny.parameter_names("vision")  # type: ignore[arg-type]
