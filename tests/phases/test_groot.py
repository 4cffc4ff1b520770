"""A very small GR00T-style policy through SFT, evaluation, PPO and GRPO on Reach: the phases know nothing of its family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rl_recipe import GROUPS, GRPO, RESOLUTION, metrics_of, rl_recipe, saved_weights

from vla_rl.datasets.loader import DataConfig
from vla_rl.engine.config import EngineConfig
from vla_rl.phases.evaluation import EvaluationConfig
from vla_rl.phases.rl import run_rl
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.groot.config import ActionHeadConfig, AttentionStackConfig, ConvBackboneConfig, GrootConfig
from vla_rl.policies.groot.policy import GrootPolicy
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

VISION = VisionConfig(image_size=RESOLUTION, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2)
LANGUAGE = TransformerConfig(width=16, depth=1, mlp_width=32, heads=2, kv_heads=2, head_width=8)
HEAD = ActionHeadConfig(
    vl_attention=AttentionStackConfig(depth=1, heads=2, head_width=8), dit=AttentionStackConfig(depth=4, heads=2, head_width=8)
)
POLICY = GrootConfig(
    chunk_length=4,
    executed_horizon=4,
    denoise_steps=3,
    backbone=ConvBackboneConfig(vision=VISION, language=LANGUAGE),
    head=HEAD,
    shift_pixels=1,
    state_dropout=0.2,
)
REACH = EnvConfig(kind="reach", resolution=RESOLUTION)
PARTS = ("model.backbone.vision", "model.backbone.language", "model.action_head.vl_self_attention", "model.action_head.model")


@pytest.fixture(scope="module")
def trained(reach_demonstrations_32: Path, tmp_path_factory: pytest.TempPathFactory) -> SftConfig:
    """Twenty updates on demonstrations, the last policy evaluated in simulation."""
    config = SftConfig(
        run_dir=str(tmp_path_factory.mktemp("sft") / "run"),
        data=DataConfig(paths=(str(reach_demonstrations_32),), validation_fraction=0.3),
        policy=POLICY,
        engine=EngineConfig(lr=3e-3, device="cpu"),
        updates=20,
        global_batch_size=16,
        micro_batch_size_per_rank=8,
        validate_every=20,
        checkpoint_every=20,
        evaluation=EvaluationConfig(20, "reach", (0,), 2, REACH, PoolConfig(backend="serial", workers=2)),
        show_progress=False,
    )
    assert run_sft(config) == 0
    return config


def policy_folder(run_dir: str) -> Path:
    return Path(run_dir) / "checkpoints" / "last" / "policy"


@pytest.fixture(scope="module")
def initial(trained: SftConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained policy, shaken so that gradients reach everything at once (its output layer began at zero)."""
    policy = load_policy(policy_folder(trained.run_dir))
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    folder = tmp_path_factory.mktemp("initial") / "policy"
    save_policy(policy, folder)
    return folder


def test_sft_learns_and_its_checkpoint_is_evaluated(trained: SftConfig) -> None:
    rows = read_jsonl(Path(trained.run_dir) / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    (evaluated,) = [row for row in rows if "success_rate" in row]
    assert evaluated["crashes"] == 0 and evaluated["missing_episodes"] == 0
    policy = load_policy(policy_folder(trained.run_dir))
    assert isinstance(policy, GrootPolicy) and policy.config == POLICY


@pytest.mark.parametrize("exploration", [Exploration(noise_level=0.4), Exploration("flow_noise", "all")], ids=lambda e: e.method)
def test_ppo_is_on_policy_to_the_bit_and_moves_every_part(exploration: Exploration, initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial, exploration=exploration, steps=2)
    assert run_rl(config) == 0
    rows = metrics_of(config)
    assert len(rows) == 2
    assert all(row["log_prob_gap_largest"] == 0.0 for row in rows), "equal batch shapes: rollout and trainer give the same bits"
    assert [row["version"] for row in rows] == [1, 2]
    before, after = load_policy(initial).state_dict(), load_policy(policy_folder(config.run_dir))
    moved = {name for name, weight in after.state_dict().items() if name in before and not torch.equal(weight, before[name])}
    for part in PARTS:
        assert any(name.startswith(part) for name in moved), part
    assert (after.noise_head is not None) == (exploration.method == "flow_noise")  # pyright: ignore[reportAttributeAccessIssue]


def test_grpo_learns_from_groups(initial: Path, tmp_path: Path) -> None:
    algorithm = replace(GRPO, group=replace(GROUPS, size=4), episodes_per_step=8)
    config = rl_recipe(tmp_path / "run", initial, algorithm=algorithm, steps=1, checkpoint_every=1, max_steps=30)
    assert run_rl(config) == 0
    (row,) = metrics_of(config)
    assert row["episodes"] == 8 and row["log_prob_gap_largest"] == 0.0
    assert saved_weights(config).keys() == load_policy(initial).published_weights(load_policy(initial).state_dict()).keys()
