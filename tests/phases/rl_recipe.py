"""A very small policy and a very short RL recipe on Reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vla_rl.algorithms.config import AlgorithmConfig, CriticSettings, GroupSettings
from vla_rl.algorithms.filters import GroupFilter
from vla_rl.engine.config import EngineConfig
from vla_rl.episode import ACTION_DIM, STATE_DIM
from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

RESOLUTION = 32
TRANSFORMER = TransformerConfig(width=16, depth=2, mlp_width=32, heads=2, kv_heads=2, head_width=8)
VISION = VisionConfig(image_size=RESOLUTION, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2)
POLICY = Pi0Config(chunk_length=4, executed_horizon=4, denoise_steps=3, vision=VISION, language=TRANSFORMER, expert=TRANSFORMER)
PPO = AlgorithmConfig(
    episodes_per_step=4,
    critic=CriticSettings(learning_rate=1e-2),
    epochs=2,
    target_kl=None,
    global_batch_size=8,
    micro_batch_size_per_rank=4,
)
GROUPS = GroupSettings(size=2, filter=GroupFilter(lowest_success=0.0, highest_success=1.0))
GRPO = replace(PPO, advantage="group_mean", critic=None, group=GROUPS, normalize_advantages=False)


def save_random_policy(
    folder: Path,
    seed: int = 0,
    outputs: float = 0.05,
    resolution: int = RESOLUTION,
    config: Pi0Config = POLICY,
    live_dims: int = ACTION_DIM,
) -> None:
    """Random weights whose velocities depend on everything (a fresh policy's are zero); actions are constant from `live_dims` on."""
    generator = np.random.default_rng(0)
    states, actions = generator.normal(size=(200, STATE_DIM)), generator.uniform(-1, 1, size=(200, ACTION_DIM))
    actions[:, live_dims:] = 0.0
    statistics = Statistics({STATE: FeatureStats.from_values(states), ACTION: FeatureStats.from_values(actions)})
    policy = make_policy(config, statistics, policy_spec(config, resolution), seed)
    torch.nn.init.normal_(policy.model.action_out_proj.weight, std=outputs, generator=torch.Generator().manual_seed(seed))
    save_policy(policy, folder)


def rl_recipe(run_dir: Path, initial_policy: Path, **changes: Any) -> RlConfig:
    """Four short episodes a step, in this process."""
    values: dict[str, Any] = {
        "suite": "reach",
        "tasks": (0, 1),
        "max_steps": 10,
        "steps": 4,
        "algorithm": PPO,
        "exploration": Exploration(noise_level=0.4),
        "critic": CriticConfig(queries=2, hidden=(8,)),
        "noise_head": NoiseHeadConfig(hidden=(8,)),
        "engine": EngineConfig(lr=1e-3, schedule="constant", warmup_fraction=0.0, device="cpu", shard_by="root"),
        "env": EnvConfig(kind="reach", resolution=RESOLUTION),
        "pool": PoolConfig(backend="serial", workers=4),
        "checkpoint_every": 2,
        "show_progress": False,
    }
    return RlConfig(run_dir=str(run_dir), initial_policy=str(initial_policy), **(values | changes))


def saved_weights(config: RlConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.run_dir) / "checkpoints" / "last" / "policy" / "model.safetensors")


def metrics_of(config: RlConfig) -> list[dict[str, Any]]:
    """Rows in order of steps, each step once, without what depends on the clock or on who was ready when."""
    rows = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if "success" in row]
    assert [row["update"] for row in rows] == list(range(1, len(rows) + 1)), "each step exactly once, in order"
    clocked = ("time", "busy_s/", "env_step_", "step_s", "control_steps_per_s", "batch_fill")
    return [{name: value for name, value in row.items() if not name.startswith(clocked)} for row in rows]


def same_weights(first: RlConfig, second: RlConfig) -> bool:
    ours, theirs = saved_weights(first), saved_weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
