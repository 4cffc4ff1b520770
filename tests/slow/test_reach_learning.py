"""PPO learns: the return of a shortened run on Reach rises, and does not where the advantage is taken away or turned round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_recipe import POLICY, PPO, metrics_of, rl_recipe, save_random_policy

from vla_rl.algorithms.advantages import GaeSettings
from vla_rl.algorithms.config import CriticSettings
from vla_rl.algorithms.rewards import RewardSettings
from vla_rl.phases import rl
from vla_rl.phases.rl_batches import Advantages
from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.sim.pool import PoolConfig

LEARNER = replace(
    PPO,
    episodes_per_step=32,
    reward=RewardSettings("function", function="reach_rewards:along_x"),
    gae=GaeSettings(0.95, 0.5),
    critic=CriticSettings(learning_rate=3e-3),
    epochs=4,
    global_batch_size=48,
    micro_batch_size_per_rank=16,
)
"""Rewarded for pushing along x: a return of 12 is full speed for a whole episode, 0 is what random weights get."""
SHORT_FLOW = replace(POLICY, denoise_steps=2)
"""With few denoise steps, and rotation and gripper constant as in demonstrations of Reach, little of a likelihood is beside the point."""
STEPS = 4
RISE = 2.0
"""Least rise of the mean return from the first step to the last."""


def recipe(run_dir: Path, initial: Path, seed: int) -> RlConfig:
    """Four steps of 32 episodes of at most 12 control steps, from random weights."""
    config = rl_recipe(
        run_dir,
        initial,
        algorithm=LEARNER,
        tasks=(),
        max_steps=12,
        steps=STEPS,
        seed=seed,
        exploration=Exploration("flow_sde", "one", noise_level=1.0),
        critic=CriticConfig(queries=2, hidden=(32,), detach=False),
        pool=PoolConfig(backend="serial", workers=16),
        checkpoint_every=STEPS,
    )
    return replace(config, engine=replace(config.engine, lr=2e-3))


def rise(run_dir: Path, seed: int) -> float:
    """Mean return of the last step minus that of the first."""
    torch.set_num_threads(1)
    save_random_policy(run_dir / "initial", seed, config=SHORT_FLOW, live_dims=3)
    config = recipe(run_dir / "run", run_dir / "initial", seed)
    assert rl.run_rl(config) == 0
    returns = [row["return"] for row in metrics_of(config)]
    return returns[-1] - returns[0]


@pytest.mark.slow
def test_the_return_rises(tmp_path: Path) -> None:
    assert rise(tmp_path, seed=0) >= RISE


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, -1.0], ids=["no-advantage", "wrong-sign"])
def test_the_threshold_notices_a_broken_learner(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., Advantages] = rl.advantages

    def broken(*arguments: Any) -> Advantages:
        wanted = plain(*arguments)
        return replace(wanted, advantage_B=factor * wanted.advantage_B)

    monkeypatch.setattr(rl, "advantages", broken)
    assert rise(tmp_path, seed=0) < RISE / 2
