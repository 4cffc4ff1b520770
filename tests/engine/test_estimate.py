"""The memory estimate against torch's profiler: what a real step allocates and keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.estimate import RankMemory, rank_memory
from vla_rl.engine.selection import select_trainable
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.base import Batch
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.groot.config import GROOT_PRESETS
from vla_rl.policies.module import FamilyConfig, PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

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
CONFIGS = {"tiny": PI0_PRESETS["tiny"], "tiny_pi05": PI0_PRESETS["tiny_pi05"], "small": SMALL, "groot": GROOT_PRESETS["tiny"]}
LIMITS = {STATE: np.array([[-1.0] * STATE_DIM, [1.0] * STATE_DIM]), ACTION: np.array([[-1.0] * ACTION_DIM, [1.0] * ACTION_DIM])}
STATISTICS = Statistics({name: FeatureStats.from_values(values) for name, values in LIMITS.items()})


def make(config: FamilyConfig) -> PolicyModule:
    return make_policy(config, STATISTICS, policy_spec(config, 64)).train()


def batch_of(policy: PolicyModule, rows: int) -> Batch:
    """Equal rows, on the CPU."""
    blank = np.zeros((64, 64, 3), np.uint8)
    observation = Observation(dict.fromkeys(VIEWS, blank), np.zeros(STATE_DIM, np.float32), "pick up the milk")
    actions_BCA = np.zeros((rows, policy.spec.chunk_length, ACTION_DIM), np.float32)
    return policy.processor.preprocess([observation] * rows, actions_BCA)


def estimate(config: FamilyConfig, engine: EngineConfig, rows: int = ROWS, ranks: int = 1) -> RankMemory:
    with torch.device("meta"):
        policy = make(config)
    select_trainable(policy, engine)
    batch = batch_of(policy, rows).to("meta")
    return rank_memory(policy, engine, ranks, lambda: policy.sft_loss(batch, range(rows)).loss_sum)


def net_bytes(profiler: profile) -> int:
    """Bytes allocated and not freed while the profiler ran."""
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())  # pyright: ignore[reportAttributeAccessIssue]


def memory_profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_estimates_agree_with_the_profiler(name: str) -> None:
    expected = estimate(CONFIGS[name], EngineConfig(shard_by="root"))
    policy = make(CONFIGS[name])
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], fused=True)
    batch = batch_of(policy, ROWS)
    with memory_profiler() as forward:
        loss = policy.sft_loss(batch, range(ROWS)).loss_sum
    with memory_profiler() as backward:
        loss.backward()
    del loss
    with memory_profiler() as step:
        optimizer.step()
    in_batch = sum(value.nbytes for value in vars(batch).values() if isinstance(value, torch.Tensor))
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    assert expected.weights == sum(p.nbytes for p in policy.parameters())
    assert expected.gradients == pytest.approx(gradients, rel=TOLERANCE)
    assert expected.moments == pytest.approx(net_bytes(step), rel=TOLERANCE)
    assert expected.activations == pytest.approx(net_bytes(forward) + in_batch, rel=TOLERANCE)
    assert net_bytes(forward) + net_bytes(backward) == pytest.approx(gradients, rel=TOLERANCE), "activations are gone after backward"


def test_options_do_to_the_estimate_what_they_do_to_memory() -> None:
    plain = estimate(SMALL, EngineConfig())
    assert estimate(SMALL, EngineConfig(), rows=2 * ROWS).activations == pytest.approx(2 * plain.activations, rel=0.02)
    assert estimate(SMALL, EngineConfig(activation_checkpointing=True)).activations < 0.6 * plain.activations
    assert estimate(SMALL, EngineConfig(precision="bf16")).activations < 0.75 * plain.activations
    shared = estimate(SMALL, EngineConfig(ema_decay=0.99), ranks=4)
    assert shared.moments == pytest.approx(1.5 * plain.moments / 4, abs=8) and shared.gathered == plain.gathered
    expert = estimate(SMALL, EngineConfig(trainable="expert"))
    assert expert.gradients < 0.5 * plain.gradients and expert.weights == plain.weights and expert.activations < plain.activations


def test_a_published_size_is_estimated_without_its_memory() -> None:
    """3.3 billion parameters: 13 GB of weights, which this test does not have."""
    expected = estimate(PI0_PRESETS["pi0_base"], EngineConfig(), rows=1)
    assert 13e9 < expected.weights < 15e9 and expected.moments == 2 * expected.gradients
