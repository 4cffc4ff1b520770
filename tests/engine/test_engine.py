"""The engine on one rank against plain torch, and what its settings change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy_policy import Rows, TinyPolicy, count, loss, rows, train

from vla_rl.engine.config import EngineConfig, EngineConfigError, LoraSettings
from vla_rl.engine.engine import MAX_SKIPPED_IN_A_ROW, DivergedError, Engine, EngineError
from vla_rl.engine.schedule import learning_rate
from vla_rl.engine.tensors import full_tensor, local_tensor
from vla_rl.engine.world import World, WorldError, open_world
from vla_rl.policies.base import LossSums

SUM_ORDER = 2e-6
"""Float32 sums of 16 rows in another order; gradients here are of order 1."""


def make(world: World, **fields: object) -> Engine:
    return Engine(TinyPolicy(), EngineConfig(**fields), 8, world)  # type: ignore[arg-type]


def weights(engine: Engine, **options: bool) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights(**options)}


def gradient(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.grad).clone() for name, p in engine.trainable().items() if p.grad is not None}


def plain_gradient(batch: Rows) -> dict[str, torch.Tensor]:
    policy = TinyPolicy()
    sums = policy.sft_loss(batch)
    (sums.loss_sum / sums.count).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("shard_by", ["blocks", "root"])
def test_gradient_is_plain_torch_however_the_batch_is_cut(world: World, micro_batches: int, shard_by: str) -> None:
    batch, size = rows(16), 16 // micro_batches
    engine = make(world, shard_by=shard_by)
    result = engine.forward_backward([batch.cut(size * i, size * (i + 1)) for i in range(micro_batches)], loss, count)
    sums = TinyPolicy().sft_loss(batch)
    assert result.loss == pytest.approx((sums.loss_sum / sums.count).item(), abs=SUM_ORDER)
    assert result.metrics["error"] == pytest.approx(result.loss, abs=SUM_ORDER)
    assert result.count == pytest.approx(count(batch))
    ours = gradient(engine)
    for name, expected in plain_gradient(batch).items():
        torch.testing.assert_close(ours[name], expected, atol=SUM_ORDER, rtol=0)


def test_updates_are_plain_adamw_with_clipping(world: World) -> None:
    engine = make(world, grad_clip_norm=0.5, weight_decay=0.1)
    policy, config = TinyPolicy(), engine.config
    matrices = [p for p in policy.parameters() if p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for update in range(3):
        batch = rows(16, seed=update)
        sums = policy.sft_loss(batch)
        (sums.loss_sum / sums.count).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, update, 8)
        optimizer.step()
        optimizer.zero_grad()
        engine.forward_backward([batch], loss, count)
        step = engine.optim_step()
        assert step.version == update + 1
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)  # sums over parameters in another order
    ours = weights(engine)
    for name, expected in policy.named_parameters():
        # another kernel (fused), and clip_grad_norm_ divides by norm + 1e-6: 3 updates of at most 1e-3 each
        torch.testing.assert_close(ours[name], expected.detach(), atol=2e-6, rtol=0)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(world: World) -> None:
    engine = make(world, ema_decay=0.9)
    train(engine, 1)
    before, average = weights(engine), weights(engine, averaged=True)
    batch = rows(4)
    batch.y_BO[0, 0] = float("nan")
    engine.forward_backward([batch], loss, count)
    step = engine.optim_step()
    assert step.skipped
    assert (step.version, engine.version, engine.skipped, engine.updates) == (1, 1, 1, 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    assert all(torch.equal(average[name], tensor) for name, tensor in weights(engine, averaged=True).items())
    train(engine, 1)
    assert (engine.version, engine.skipped, engine.updates) == (2, 1, 3)


def test_parameters_that_were_held_still_begin_as_adam_begins(world: World) -> None:
    """Their moments saw gradients of 0 and their bias correction counted those updates: the first real updates were too small or large."""
    config = EngineConfig(lr=1e-2, betas=(0.9, 0.999), schedule="constant", warmup_fraction=0.0, weight_decay=0.0, grad_clip_norm=1e9)
    engine = Engine(TinyPolicy(), config, 8, world, groups=("expert.",))
    others = [name for name in engine.trainable() if not name.startswith("expert.")]
    start = weights(engine)
    for update in range(30):
        engine.forward_backward([rows(16, seed=update)], loss, count)
        expected = torch.cat([g.flatten() for name, g in gradient(engine).items() if name not in others]).norm()
        assert engine.optim_step({"": 0.0}).grad_norm == pytest.approx(float(expected), rel=1e-5)  # sums in another order
    held = weights(engine)
    assert all(torch.equal(held[name], start[name]) for name in others) and not torch.equal(held["expert.bias"], start["expert.bias"])
    engine.forward_backward([rows(16)], loss, count)
    gradients = gradient(engine)
    engine.optim_step()
    for name, tensor in weights(engine).items():
        if name in others:
            g = gradients[name]
            # Adam's first update: lr g / (|g| + eps); weights of order 1 are rounded to 1e-7
            torch.testing.assert_close(held[name] - tensor, 1e-2 * g / (g.abs() + 1e-8), atol=5e-7, rtol=1e-5)


def test_standing_still_for_good_is_an_error(world: World) -> None:
    engine = make(world)
    batch = rows(4)
    batch.y_BO[0, 0] = float("inf")
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        engine.forward_backward([batch], loss, count)
        engine.optim_step()
    engine.forward_backward([batch], loss, count)
    with pytest.raises(DivergedError, match=f"not finite in {MAX_SKIPPED_IN_A_ROW} updates in a row up to update "):
        engine.optim_step()


def test_average_follows_its_formula_and_swaps_in_and_out(world: World) -> None:
    engine = make(world, ema_decay=0.3)
    expected = weights(engine)
    for decay in (2 / 11, 3 / 12, 0.3, 0.3):  # (1 + n) / (10 + n) until that is more
        train(engine, 1)
        now = weights(engine)
        expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
    for name, tensor in engine.named_weights(averaged=True):
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)  # lerp rounds once, the formula twice
    before, average = weights(engine), weights(engine, averaged=True)
    with engine.averaged_weights():
        assert all(torch.equal(average[name], tensor) for name, tensor in weights(engine).items())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_averaged_weights_without_an_average_are_an_error(world: World) -> None:
    with pytest.raises(EngineError, match="ema_decay is none"):
        list(make(world).named_weights(averaged=True))


def test_expert_only_freezes_the_rest(world: World) -> None:
    engine = make(world, trainable="expert", weight_decay=0.5)
    before = weights(engine)
    train(engine, 2)
    changed = {name for name, tensor in weights(engine).items() if not torch.equal(tensor, before[name])}
    assert changed == {"expert.weight", "expert.bias"} == {name for name, _ in engine.named_weights(trainable_only=True)}


def test_adapters_merge_into_the_weights_they_change(world: World) -> None:
    engine = make(world, trainable="lora", lora=LoraSettings(rank=2, alpha=4.0, target_modules=("up_proj",)), ema_decay=0.5)
    before = weights(engine)
    assert all(torch.equal(before[name], tensor) for name, tensor in TinyPolicy().state_dict().items())  # B starts at 0
    train(engine, 2)
    after = weights(engine)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"layers.{i}.up_proj.weight" for i in range(3)} == {name for name, _ in engine.named_weights(trainable_only=True)}
    plain = TinyPolicy()
    plain.load_state_dict(after)
    batch = rows(8)
    # x @ (W + s B A) against x @ W + s (x @ A) @ B, float32
    torch.testing.assert_close(plain.act(batch.x_BI), engine.infer(lambda policy: policy.act(batch.x_BI)), atol=1e-5, rtol=0)


def test_adapter_names_that_match_nothing_are_named(world: World) -> None:
    with pytest.raises(EngineConfigError, match=r"'up_prj', which no linear layer of TinyPolicy ends in; nearest: 'up_proj'"):
        make(world, trainable="lora", lora=LoraSettings(target_modules=("up_prj",)))


def test_adapters_begin_with_weights_of_the_seed_alone(world: World) -> None:
    """So that a run started again is the same run, whatever was drawn before."""
    config = EngineConfig(trainable="lora", lora=LoraSettings(rank=2, target_modules=("up_proj",)))

    def first_weights(seed: int) -> torch.Tensor:
        torch.rand(1)  # what was drawn before does not matter
        engine = Engine(TinyPolicy(), config, 8, world, seed=seed)
        return torch.cat([full_tensor(weight).flatten() for name, weight in engine.trainable().items() if "lora_A" in name])

    assert torch.equal(first_weights(3), first_weights(3))
    assert not torch.equal(first_weights(3), first_weights(4))


@pytest.mark.parametrize("shard_by", ["blocks", "root"])
def test_recomputation_gives_the_same_gradient_bit_for_bit(world: World, shard_by: str) -> None:
    kept, recomputed = make(world, shard_by=shard_by), make(world, shard_by=shard_by, activation_checkpointing=True)
    for engine in (kept, recomputed):
        engine.forward_backward([rows(16)], loss, count)
    assert all(torch.equal(gradient(recomputed)[name], value) for name, value in gradient(kept).items())


def test_recomputation_runs_the_blocks_again(world: World) -> None:
    engine = make(world, activation_checkpointing=True)
    calls: list[int] = []
    engine.policy.layers[0].norm.register_forward_hook(lambda *_: calls.append(1))
    engine.forward_backward([rows(4)], loss, count)
    assert len(calls) == 2


def test_offloading_gives_the_same_training(world: World) -> None:
    kept, offloaded = make(world), make(world, cpu_offload=True)
    for engine in (kept, offloaded):
        train(engine, 2)
    assert all(torch.equal(weights(offloaded)[name], value) for name, value in weights(kept).items())


def test_bf16_keeps_float32_masters_and_stays_close(world: World) -> None:
    full, low = make(world), make(world, precision="bf16")
    seen: list[torch.dtype] = []
    low.policy.layers[0].up_proj.register_forward_hook(lambda module, _, output: seen.extend((module.weight.dtype, output.dtype)))
    results = [engine.forward_backward([rows(16)], loss, count) for engine in (full, low)]
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert {p.dtype for p in low.trainable().values()} == {torch.float32}
    assert {p.grad.dtype for p in low.trainable().values() if p.grad is not None} == {torch.float32}
    assert results[1].loss == pytest.approx(results[0].loss, rel=0.02)  # bfloat16 has 8 bits of mantissa: 0.4 % a rounding
    assert results[1].loss != results[0].loss


def test_a_count_that_the_loss_does_not_confirm_is_an_error(world: World) -> None:
    with pytest.raises(EngineError, match=r"the loss counted .* and the normalizer 16"):
        make(world).forward_backward([rows(16)], loss, lambda batch: float(len(batch)))


def test_a_batch_without_weight_is_an_error(world: World) -> None:
    empty = replace(rows(4), weight_B=torch.zeros(4))
    with pytest.raises(EngineError, match="the global count is 0"):
        make(world).forward_backward([empty], loss, count)


def test_a_loss_that_goes_past_the_entry_points_is_an_error(world: World) -> None:
    class Hidden:
        def __init__(self, loss_sum: torch.Tensor) -> None:
            self.loss_sum = loss_sum

    class Leaky(TinyPolicy):
        def value(self, batch: Rows) -> Hidden:  # no pytree: FSDP does not see the tensor
            return Hidden((self.predict(batch.x_BI).mean(1) * batch.weight_B).sum())

    engine = Engine(Leaky(), EngineConfig(shard_by="root"), 8, world)
    engine.forward_backward([rows(4)], lambda policy, batch: LossSums(policy.value(batch).loss_sum, batch.weight_B.sum(), {}), count)
    with pytest.raises(EngineError, match="went past FSDP; enter the policy through one of act, sft_loss"):
        engine.optim_step()


def test_inference_needs_no_backward_and_leaves_training_alone(world: World) -> None:
    engine, undisturbed = make(world, shard_by="root"), make(world, shard_by="root")
    batch = rows(8)
    for _ in range(2):
        actions = engine.infer(lambda policy: policy.act(batch.x_BI))
        assert not actions.requires_grad
        train(engine, 1)
        train(undisturbed, 1)
    assert all(torch.equal(weights(undisturbed)[name], value) for name, value in weights(engine).items())


def test_weights_are_sharded_parameters(world: World) -> None:
    engine = make(world)
    assert all(local_tensor(p).shape == p.shape for p in engine.trainable().values())
    assert list(weights(engine)) == [name for name, _ in [*TinyPolicy().named_parameters(), *TinyPolicy().named_buffers()]]


def test_half_a_rank_is_an_error() -> None:
    with pytest.raises(WorldError, match="belong together"):
        open_world("cpu", rank=0)
