"""RL steps of a very small pi0 on Reach: on-policy to the bit, resumable to the bit, stale only as far as allowed."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rl_recipe import GROUPS, GRPO, PPO, metrics_of, rl_recipe, same_weights, save_random_policy

from vla_rl.algorithms.config import AlgorithmConfig, CloningSettings, CriticSettings, DistillationSettings, KlSettings
from vla_rl.algorithms.corrections import Correction
from vla_rl.algorithms.filters import GroupFilter
from vla_rl.algorithms.health import OnPolicyError
from vla_rl.algorithms.reductions import LogProbReduction
from vla_rl.config import ConfigError, to_plain
from vla_rl.datasets.loader import DataConfig
from vla_rl.engine.config import EngineConfig
from vla_rl.phases import rl, rl_best, rl_trainer
from vla_rl.phases.evaluation import EvaluationConfig
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_heads import with_heads
from vla_rl.phases.rl_update import Learner
from vla_rl.policies.checkpoint import load_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.module import HEADS
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.libero.egl import renderer_name
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_json, read_jsonl
from vla_rl.telemetry.spans import leaf_shares

VALIDATION = EvaluationConfig(every=1, suite="reach", env=EnvConfig(kind="reach", resolution=32))
ONE_STEP = {"steps": 1, "checkpoint_every": 1}
BF16 = EngineConfig(lr=1e-3, schedule="constant", warmup_fraction=0.0, device="cpu", shard_by="root", precision="bf16")


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("initial") / "policy"
    save_random_policy(folder)
    return folder


@pytest.fixture(scope="module")
def straight(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> RlConfig:
    """Four steps of PPO without a break."""
    config = rl_recipe(tmp_path_factory.mktemp("straight") / "run", initial)
    assert rl.run_rl(config) == 0
    return config


def stopped_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C arrives in the middle of a step."""
    plain = rl.rl_step

    def step(run: Any) -> Any:
        if run.step == steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(run)

    monkeypatch.setattr(rl, "rl_step", step)


def test_every_step_leaves_its_numbers_and_a_policy(straight: RlConfig, initial: Path) -> None:
    rows = metrics_of(straight)
    assert len(rows) == 4
    for row in rows:
        assert row["log_prob_gap_largest"] == 0.0, "rollout and micro-batches have four rows each: the same bits"
        assert row["episodes"] == 4 and row["crashes"] == 0
        assert {"success/reach_0", "success/reach_1", "return", "ratio", "clip_fraction", "kl", "explained_variance"} <= row.keys()
        assert row["staleness_max"] == 0
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    policy = load_policy(Path(straight.run_dir) / "checkpoints" / "last" / "policy")
    assert policy.critic is not None and policy.noise_head is None
    before = load_policy(initial).state_dict()
    moved = [name for name, weight in policy.state_dict().items() if name in before and not torch.equal(weight, before[name])]
    assert any(name.startswith("model.expert.") for name in moved) and any(name.startswith("model.vision.") for name in moved)


def rows_of(config: RlConfig) -> list[dict[str, Any]]:
    """Rows of episodes, without what depends on the clock."""
    rows = read_jsonl(Path(config.run_dir) / "episodes.jsonl")
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


def test_every_episode_leaves_a_row(straight: RlConfig) -> None:
    rows = rows_of(straight)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert len({row["key"] for row in rows}) == 16, "no scene is used twice"
    for row in rows:
        assert row["weights_version"] == row["step"] - 1 and row["return"] == float(row["success"])
        assert row["outcome"] == ("success" if row["success"] else "failure") and 1 <= row["steps"] <= 10
        assert row["init_hash"] and row["instruction"].startswith("reach the ")
        assert row["renderer"] == renderer_name(), "what drew the pictures is on record"
    for step, metrics in enumerate(metrics_of(straight), start=1):
        assert metrics["success"] == sum(row["success"] for row in rows if row["step"] == step) / 4


def test_a_steps_time_is_explained(straight: RlConfig) -> None:
    shares = leaf_shares(read_jsonl(Path(straight.run_dir) / "spans.jsonl"), "rl_step")
    assert abs(shares["unaccounted"]) <= 0.05
    assert sum(shares.values()) == pytest.approx(1.0)


def test_two_and_two_steps_equal_four(straight: RlConfig, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rl_recipe(tmp_path / "run", initial)
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        assert rl.run_rl(config) == 130
    assert rl.run_rl(config) == 0
    assert same_weights(config, straight)
    assert metrics_of(config) == metrics_of(straight)
    assert rows_of(config) == rows_of(straight)


def test_a_run_that_is_over_can_be_made_longer(straight: RlConfig, initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial, steps=2)
    assert rl.run_rl(config) == 0
    assert rl.run_rl(replace(config, steps=straight.steps)) == 0
    assert same_weights(config, straight)
    assert metrics_of(config) == metrics_of(straight)


def test_pools_and_their_timing_change_nothing(straight: RlConfig, initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial, pool=PoolConfig(backend="process", workers=2), rollout_batch_size=4)
    assert rl.run_rl(config) == 0
    assert same_weights(config, straight)


def test_another_seed_sees_other_scenes(straight: RlConfig, initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial, seed=1, **ONE_STEP)
    assert rl.run_rl(config) == 0
    assert metrics_of(config)[0] != metrics_of(straight)[0]


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (PPO, {"exploration": Exploration(stochastic_steps="all")}),
        (PPO, {"exploration": Exploration(likelihood="matching", matching_draws=3)}),
        (replace(PPO, log_prob=LogProbReduction(actions="mean")), {"exploration": Exploration("flow_noise", "last", noise_over="chunk")}),
        (replace(PPO, entropy_coefficient=0.01), {"exploration": Exploration("flow_noise", "all")}),
        (replace(PPO, log_prob=replace(PPO.log_prob, unit="action"), aggregation="episode_mean"), {}),
        (replace(PPO, old_log_prob="recompute"), {}),
        (replace(PPO, kl=KlSettings("k3", "loss", 0.1)), {}),
        (replace(PPO, kl=KlSettings("k1", "reward", 0.1)), {}),
        (replace(PPO, kl=KlSettings("velocity", "loss", 0.1)), {"exploration": Exploration(stochastic_steps="all")}),
        (replace(PPO, kl=KlSettings("k3", "loss", 0.1), epochs=1, global_batch_size=64), {"engine": BF16}),
        (GRPO, {"gradient_noise_every": 1, "gradient_noise_parts": 2}),
        (replace(GRPO, advantage="leave_one_out"), {}),
    ],
    ids=[
        "whole-chain",
        "matching",
        "last-step-over-chunk",
        "flow-noise",
        "per-action",
        "recompute",
        "kl-loss",
        "kl-reward",
        "kl-velocity",
        "bf16",
        "grpo",
        "rloo",
    ],
)
def test_every_choice_takes_a_step(algorithm: AlgorithmConfig, changes: dict[str, Any], initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial, algorithm=algorithm, **ONE_STEP, **changes)
    assert rl.run_rl(config) == 0
    row = metrics_of(config)[0]
    assert row["log_prob_gap_largest"] == 0.0
    assert row["updates"] >= 1 and math.isfinite(row["loss"])
    if algorithm.kl.kind in ("k3", "velocity"):
        assert "loss_kl_reference" in row
    if row["updates"] == 1:
        assert row["loss_kl_reference"] == 0.0, "the reference scores as the policy that learns does"
    policy = load_policy(Path(config.run_dir) / "checkpoints" / "last" / "policy")
    assert (policy.noise_head is not None) == (config.exploration.method == "flow_noise")
    assert (policy.critic is not None) == (algorithm.critic is not None)


def test_cloning_and_distillation(initial: Path, tmp_path: Path, reach_demonstrations_32: Path) -> None:
    save_random_policy(tmp_path / "teacher", seed=5)
    algorithm = replace(
        PPO,
        cloning=CloningSettings(coefficient=0.5, global_batch_size=6),
        distillation=DistillationSettings("velocity", 0.3),
    )
    data = DataConfig(paths=(str(reach_demonstrations_32),), validation_fraction=0.0)
    config = rl_recipe(tmp_path / "run", initial, algorithm=algorithm, demonstrations=data, teacher=str(tmp_path / "teacher"), **ONE_STEP)
    assert rl.run_rl(config) == 0
    row = metrics_of(config)[0]
    assert row["loss_cloning"] > 0 and row["loss_distillation"] > 0 and row["cloning_weight"] == 0.5
    gradient = replace(
        config, run_dir=str(tmp_path / "second"), algorithm=replace(algorithm, distillation=DistillationSettings("policy_gradient", 0.3))
    )
    assert rl.run_rl(gradient) == 0
    assert not same_weights(config, gradient)


def test_the_policy_stands_still_while_the_critic_warms_up(initial: Path, tmp_path: Path) -> None:
    warming = replace(PPO, critic=CriticSettings(learning_rate=1e-2, warmup_steps=1))
    config = rl_recipe(tmp_path / "run", initial, algorithm=warming, **ONE_STEP)
    assert rl.run_rl(config) == 0
    policy, before = load_policy(Path(config.run_dir) / "checkpoints" / "last" / "policy").state_dict(), load_policy(initial).state_dict()
    assert all(torch.equal(policy[name], weight) for name, weight in before.items())
    fresh = with_heads(config, load_policy(initial)).state_dict()
    assert not torch.equal(policy["critic.layers.0.weight"], fresh["critic.layers.0.weight"])


@pytest.mark.parametrize("trainable", ["expert", "lora"])
def test_new_heads_learn_whatever_else_is_frozen(trainable: Any, initial: Path, tmp_path: Path) -> None:
    """With adapters they kept their random weights for all of a run."""
    engine = replace(rl_recipe(tmp_path, initial).engine, trainable=trainable)
    config = rl_recipe(tmp_path / "run", initial, exploration=Exploration("flow_noise"), engine=engine, **ONE_STEP)
    assert rl.run_rl(config) == 0
    fresh = with_heads(config, load_policy(initial)).state_dict()
    policy = load_policy(Path(config.run_dir) / "checkpoints" / "last" / "policy").state_dict()
    changed = {name for name, weight in policy.items() if not torch.equal(weight, fresh[name])}
    assert changed > {name for name in fresh if name.startswith(HEADS)}


def test_a_resume_in_the_warm_up_of_the_critic(
    initial: Path, tmp_path: Path, reach_demonstrations_32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Demonstrations wait for the policy too: their gradient moved nothing, and took its part of the critic's clipped norm."""
    warming = replace(PPO, critic=CriticSettings(learning_rate=1e-2, warmup_steps=2), cloning=CloningSettings(0.5, global_batch_size=6))
    data = DataConfig(paths=(str(reach_demonstrations_32),), validation_fraction=0.0)
    whole = rl_recipe(tmp_path / "whole", initial, algorithm=warming, demonstrations=data, steps=3)
    broken = replace(whole, run_dir=str(tmp_path / "broken"))
    assert rl.run_rl(whole) == 0
    with monkeypatch.context() as patch:
        stopped_after(patch, 1)
        assert rl.run_rl(broken) == 130
    assert rl.run_rl(broken) == 0
    assert same_weights(whole, broken) and metrics_of(whole) == metrics_of(broken)
    assert [row["cloning_weight"] for row in metrics_of(whole)] == [0.0, 0.0, 0.5]


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change something about the learner, and nothing about who acts."""
    plain = rl_trainer.open_learner

    def opened(*arguments: Any) -> Any:
        learner, cloning = plain(*arguments)
        change(learner)
        return learner, cloning

    monkeypatch.setattr(rl_trainer, "open_learner", opened)


def wrong_sigma(learner: Learner) -> None:
    learner.exploration = replace(learner.exploration, noise_level=learner.exploration.noise_level * 1.01)


def wrong_grid(learner: Learner) -> None:
    learner.policy.config = replace(learner.policy.config, denoise_steps=learner.policy.config.denoise_steps + 1)


def wrong_pixels(learner: Learner) -> None:
    preprocess = learner.policy.preprocess

    def shifted(*arguments: Any) -> Any:
        batch = preprocess(*arguments)
        return replace(batch, images_BVCHW=batch.images_BVCHW.roll(1, -1))

    learner.policy.preprocess = shifted  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [wrong_sigma, wrong_grid, wrong_pixels])
@pytest.mark.parametrize("micro_batch", [4, 8], ids=["same-shape", "other-shape"])
def test_a_planted_mismatch_stops_the_run(
    mistake: Any, micro_batch: int, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, mistake)
    config = rl_recipe(tmp_path / "run", initial, algorithm=replace(PPO, micro_batch_size_per_rank=micro_batch), **ONE_STEP)
    with pytest.raises(OnPolicyError, match="No hyperparameter explains that"):
        rl.run_rl(config)
    assert not (Path(config.run_dir) / "checkpoints").exists(), "nothing was trained"


def test_another_micro_batch_size_gives_the_same_step_up_to_rounding(initial: Path, tmp_path: Path) -> None:
    configs = [
        rl_recipe(tmp_path / str(size), initial, algorithm=replace(PPO, micro_batch_size_per_rank=size, epochs=1), **ONE_STEP)
        for size in (4, 8)
    ]
    for config in configs:
        assert rl.run_rl(config) == 0
    first, second = (metrics_of(config)[0] for config in configs)
    assert second["log_prob_gap_largest"] <= 1e-4
    for name in ("loss", "loss_policy", "loss_value", "grad_norm"):
        assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5)  # float32 sums of other shapes


class Killed(BaseException):
    """Stands for kill -9: nothing cleans up after it but what must."""


def test_the_best_policy_stays_the_best_over_a_resume(initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its second evaluation, which is made up for, and in the step after that: the third policy is worse and takes no place."""
    rates, evaluated = {"step_1": 0.5, "step_2": 0.8, "step_3": 0.6}, list[str]()
    kills = ["evaluation of step_2", "rl_step 3"]
    plain = rl.rl_step

    def evaluate(settings: Any, policy: Path, run_dir: Path) -> dict[str, float]:
        if f"evaluation of {run_dir.name}" in kills:
            raise Killed(kills.pop(0))
        evaluated.append(run_dir.name)
        return {"success_rate": rates[run_dir.name], "crashes": 0.0}

    def step(run: Any) -> Any:
        if f"rl_step {run.step + 1}" in kills:
            raise Killed(kills.pop(0))
        return plain(run)

    monkeypatch.setattr(rl_best, "evaluate_checkpoint", evaluate)
    monkeypatch.setattr(rl, "rl_step", step)
    config = rl_recipe(tmp_path / "run", initial, steps=3, checkpoint_every=1, evaluation=VALIDATION)
    for _ in range(2):
        with pytest.raises(Killed):
            rl.run_rl(config)
    assert rl.run_rl(config) == 0
    assert evaluated == ["step_1", "step_2", "step_3"]
    kept = read_json(Path(config.run_dir) / "best" / "selection.json")
    assert (kept["step"], kept["success_rate"]) == (2, 0.8)
    rows = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if "validation_success_rate" in row]
    assert [(row["update"], row["validation_success_rate"]) for row in rows] == [(1, 0.5), (2, 0.8), (3, 0.6)]


def test_stale_rollouts_run_on_schedule_and_resume_to_the_bit(initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = replace(PPO, max_staleness=2, correction=Correction("behaviour_clip"))
    whole = rl_recipe(tmp_path / "whole", initial, algorithm=stale)
    assert rl.run_rl(whole) == 0
    assert [row["staleness_max"] for row in metrics_of(whole)] == [0, 1, 2, 2]
    assert [row["staleness_bound"] for row in metrics_of(whole)] == [2] * 4
    broken = replace(whole, run_dir=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        assert rl.run_rl(broken) == 130
    assert (Path(broken.run_dir) / "checkpoints" / "last" / rl_trainer.ROLLOUTS_FILE).stat().st_size > 0
    assert rl.run_rl(broken) == 0
    assert same_weights(broken, whole)
    assert metrics_of(broken) == metrics_of(whole)


def test_a_bound_of_zero_is_the_synchronous_code(straight: RlConfig, initial: Path, tmp_path: Path) -> None:
    clipped = rl_recipe(tmp_path / "run", initial, algorithm=replace(PPO, correction=Correction("behaviour_clip")))
    assert rl.run_rl(clipped) == 0
    assert same_weights(clipped, straight)


@pytest.mark.parametrize("rejected", ["refill", "mask", "drop"])
def test_groups_without_a_signal_are_not_trained_on(rejected: str, initial: Path, tmp_path: Path) -> None:
    never = replace(GROUPS, filter=GroupFilter(0.1, 0.9, rejected, max_groups_factor=2.0))  # type: ignore[arg-type]
    config = rl_recipe(tmp_path / "run", initial, algorithm=replace(GRPO, group=never), max_steps=2, **ONE_STEP)
    assert rl.run_rl(config) == 0
    row = metrics_of(config)[0]
    assert row["groups_too_hard"] == (4 if rejected == "refill" else 2) and row["groups_kept"] == 0
    assert row.get("updates", 0) == 0
    before = load_policy(initial).state_dict()
    assert all(
        torch.equal(weight, before[name])
        for name, weight in load_policy(Path(config.run_dir) / "checkpoints/last/policy").state_dict().items()
    )


def test_recipes_that_contradict_themselves(initial: Path, tmp_path: Path) -> None:
    matching, over_chunk = Exploration(likelihood="matching"), Exploration(noise_over="chunk")
    for changes, said in (
        ({"engine": replace(rl_recipe(tmp_path, initial).engine, schedule="one_cycle")}, "schedule: constant"),
        ({"teacher": "somewhere"}, "nothing uses it"),
        ({"algorithm": replace(PPO, cloning=CloningSettings(0.1))}, "demonstrations is needed"),
        ({"algorithm": replace(PPO, entropy_coefficient=0.1)}, "flow_noise"),
        ({"seed": 50}, "0 to 49"),
        ({"suite": "libero_object"}, "does not run in env.kind"),
        ({"exploration": matching, "algorithm": replace(PPO, log_prob=LogProbReduction(denoise_steps="mean"))}, "mean over its draws"),
        ({"exploration": over_chunk, "algorithm": replace(PPO, log_prob=LogProbReduction("action"))}, "one likelihood"),
        ({"exploration": over_chunk, "algorithm": PPO}, "set them to 'chunk' and 'mean'"),
    ):
        with pytest.raises(ConfigError, match=said):
            rl_recipe(tmp_path, initial, **changes)


def start(config: RlConfig, folder: Path) -> subprocess.Popen[bytes]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(to_plain(config)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
    return subprocess.Popen([sys.executable, "-m", "vla_rl.cli", "rl", str(recipe)], env=environment)


@pytest.mark.faults
def test_killed_at_random_moments_each_step_is_there_exactly_once(straight: RlConfig, initial: Path, tmp_path: Path) -> None:
    """Three kills, each a random time after the run has started its loop."""
    config = rl_recipe(tmp_path / "run", initial, checkpoint_every=1)
    moments, spans = random.Random(7), Path(config.run_dir) / "spans.jsonl"
    for _ in range(3):
        seen = spans.stat().st_size if spans.exists() else 0
        child = start(config, tmp_path)
        while child.poll() is None and (spans.stat().st_size if spans.exists() else 0) <= seen:
            os.sched_yield()
        try:
            child.wait(moments.uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            child.kill()
        child.wait()
    assert start(config, tmp_path).wait() == 0
    assert len(metrics_of(config)) == 4
    assert rows_of(config) == rows_of(straight)
    assert same_weights(config, straight)
