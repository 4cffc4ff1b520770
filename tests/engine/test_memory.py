"""The memory estimate against torch's profiler: what a real step allocates and keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.memory import _meta_policy, estimate_memory, sft_pass
from vla_rl.policies.factory import make_policy
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config, TransformerConfig, VisionConfig

ROWS = 6
TOLERANCE = 0.1
"""Of the profiler's bytes, as the estimate promises."""
SMALL = Pi0Config(
    denoise_steps=10,
    vision=VisionConfig(stem="patch", image_size=84, patch_size=14, conv_channels=(), width=96, depth=3, mlp_width=256, heads=4),
    language=TransformerConfig(width=128, depth=4, mlp_width=512, heads=8, kv_heads=1, head_width=32),
    expert=TransformerConfig(width=64, depth=4, mlp_width=256, heads=8, kv_heads=1, head_width=32),
)
"""The published structure at small sizes."""
CONFIGS = {"tiny": PI0_PRESETS["tiny"], "tiny_pi05": PI0_PRESETS["tiny_pi05"], "small": SMALL}


def net_bytes(profiler: profile) -> int:
    """Bytes allocated and not freed while the profiler ran."""
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())  # pyright: ignore[reportAttributeAccessIssue]


def memory_profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_estimates_agree_with_the_profiler(name: str) -> None:
    config = CONFIGS[name]
    estimate = estimate_memory(config, EngineConfig(ema_decay=0.9), ROWS)
    meta, one = _meta_policy(config, ("image", "image2"))
    policy = make_policy(config, meta.processor.statistics, meta.spec).train()
    policy.freeze_unread()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], fused=True)
    batch = one.select(torch.zeros(ROWS, dtype=torch.int64))
    with memory_profiler() as forward:
        loss = sft_pass(policy, batch)
    with memory_profiler() as backward:
        loss.backward()
    del loss
    with memory_profiler() as step:
        optimizer.step()
    batch_bytes = sum(value.nbytes for value in vars(batch).values() if isinstance(value, torch.Tensor))
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    assert estimate.parameters == sum(p.nbytes for p in policy.parameters())
    assert estimate.gradients == pytest.approx(gradients, rel=TOLERANCE)
    assert estimate.moments == pytest.approx(net_bytes(step), rel=TOLERANCE)
    assert estimate.average == estimate.gradients
    assert estimate.activations == pytest.approx(net_bytes(forward) + batch_bytes, rel=TOLERANCE)
    assert net_bytes(forward) + net_bytes(backward) == pytest.approx(gradients, rel=TOLERANCE), "activations are gone after backward"


def test_options_do_to_the_estimate_what_they_do_to_memory() -> None:
    plain = estimate_memory(SMALL, EngineConfig(), ROWS)
    twice = estimate_memory(SMALL, EngineConfig(), 2 * ROWS)
    assert twice.activations == pytest.approx(2 * plain.activations, rel=0.02) and twice.parameters == plain.parameters
    assert estimate_memory(SMALL, EngineConfig(activation_checkpointing=True), ROWS).activations < 0.6 * plain.activations
    assert estimate_memory(SMALL, EngineConfig(precision="bf16"), ROWS).activations < 0.75 * plain.activations
    shared = estimate_memory(SMALL, EngineConfig(ema_decay=0.99), ROWS, ranks=4)
    assert shared.moments == pytest.approx(plain.moments / 4, abs=8) and shared.average == shared.gradients
    expert = estimate_memory(SMALL, EngineConfig(trainable="expert"), ROWS)
    assert expert.gradients < 0.5 * plain.gradients and expert.parameters == plain.parameters
    assert expert.activations < plain.activations


def test_a_published_size_is_estimated_without_its_memory() -> None:
    """3.3 billion parameters: 13 GB of weights, which this test does not have."""
    estimate = estimate_memory(replace(PI0_PRESETS["pi0_base"]), EngineConfig(), micro_batch_size=1)
    assert 13e9 < estimate.parameters < 15e9
    assert estimate.moments == 2 * estimate.gradients and estimate.total > 4 * 3e9 * 4
