"""Token policies through the phases: SFT on demonstrations of Reach, GRPO and PPO on Reach, and the same with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_recipe import GRPO, PPO, RESOLUTION, metrics_of, rl_recipe, same_weights, saved_weights

from vla_rl.algorithms.config import KlSettings
from vla_rl.algorithms.rewards import RewardSettings
from vla_rl.config import ConfigError
from vla_rl.datasets.loader import DataConfig
from vla_rl.engine.config import EngineConfig
from vla_rl.phases import rl
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.policies.blocks.config import VisionConfig
from vla_rl.policies.checkpoint import load_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.tokens.config import ActionTokensConfig, LanguageConfig, TokenConfig
from vla_rl.policies.tokens.fast import ACTION_TOKENIZER_FILE
from vla_rl.policies.tokens.policy import TokenPolicy
from vla_rl.policies.tokens.sglang_engine import SglangConfig
from vla_rl.policies.tokens.vllm_engine import VllmConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

PARALLEL = TokenConfig(
    chunk_length=4,
    executed_horizon=4,
    action_tokens=ActionTokensConfig(bins=8),
    vision=VisionConfig(image_size=RESOLUTION, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2),
    language=LanguageConfig(width=16, depth=2, mlp_width=32, heads=2, kv_heads=2, head_width=8),
)
REASONING = replace(PARALLEL, decoding="autoregressive", prefix_attention="causal", reasoning_tokens=6)
FAST = replace(
    REASONING,
    reasoning_tokens=0,
    action_tokens=ActionTokensConfig(kind="fast", scale=4.0, largest_coefficient=20, vocabulary=64, longest=29),
)
FORMS = {"parallel": PARALLEL, "reasoning": REASONING, "fast": FAST}
SAMPLING = Exploration(method="tokens", temperature=1.2, reasoning_temperature=0.9)
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


def trained(config: TokenConfig, demonstrations: Path, run_dir: Path, updates: int) -> SftConfig:
    sft = SftConfig(
        run_dir=str(run_dir),
        data=DataConfig(paths=(str(demonstrations),), validation_fraction=0.0),
        policy=config,
        engine=EngineConfig(lr=3e-3, device="cpu", shard_by="root"),
        updates=updates,
        global_batch_size=16,
        micro_batch_size_per_rank=8,
        checkpoint_every=updates,
        show_progress=False,
    )
    assert run_sft(sft) == 0
    return sft


@pytest.fixture(scope="module")
def initial_of(reach_demonstrations_32: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By form: a policy after a few updates on three demonstrations."""
    torch.set_num_threads(1)

    @cache
    def make(form: str) -> Path:
        sft = trained(FORMS[form], reach_demonstrations_32, tmp_path_factory.mktemp(form) / "sft", updates=30)
        return Path(sft.run_dir) / "checkpoints" / "last" / "policy"

    return make


@pytest.fixture(params=FORMS)
def initial(request: pytest.FixtureRequest, initial_of: Callable[[str], Path]) -> Path:
    return initial_of(request.param)


def tokens_recipe(run_dir: Path, initial: Path, **changes: Any) -> RlConfig:
    """Two steps of GRPO; with the format reward where the policy reasons."""
    policy = load_policy(initial)
    reward = RewardSettings(format_coefficient=0.4 if policy.config.reasoning_tokens else 0.0)
    algorithm = replace(GRPO, reward=reward, **changes.pop("algorithm", {}))
    values: dict[str, Any] = {"steps": 2, "checkpoint_every": 2, "exploration": SAMPLING, "algorithm": algorithm}
    return rl_recipe(run_dir, initial, **(values | changes))


def test_sft_learns_the_tokens_of_the_demonstrations(initial: Path) -> None:
    rows = [row for row in read_jsonl(initial.parents[2] / "metrics.jsonl") if "loss" in row]
    first, last = rows[0], rows[-1]
    assert last["loss"] < 0.9 * first["loss"] and last["accuracy"] > first["accuracy"]
    policy = load_policy(initial)
    assert isinstance(policy, TokenPolicy)
    if policy.config.reasoning_tokens:
        assert last["loss_reasoning"] < first["loss_reasoning"] and last["accuracy_reasoning"] > 0.3


def test_fast_tokens_are_trained_once_and_travel_with_the_policy(reach_demonstrations_32: Path, tmp_path: Path) -> None:
    sft = trained(FAST, reach_demonstrations_32, tmp_path / "sft", updates=1)
    trained_file = tmp_path / "sft" / "tokenizer" / ACTION_TOKENIZER_FILE
    saved = tmp_path / "sft" / "checkpoints" / "last" / "policy" / "tokenizer" / ACTION_TOKENIZER_FILE
    assert saved.read_bytes() == trained_file.read_bytes()
    again = replace(sft, run_dir=str(tmp_path / "again"), policy=replace(FAST, tokenizer=str(saved.parent)))
    assert run_sft(again) == 0
    assert not (tmp_path / "again" / "tokenizer").exists(), "the recipe brought its own"
    assert saved_weights_of(again) == saved_weights_of(sft)


def test_draws_of_noise_that_a_token_policy_has_not_are_refused(reach_demonstrations_32: Path, tmp_path: Path) -> None:
    sft = SftConfig(str(tmp_path / "sft"), DataConfig((str(reach_demonstrations_32),)), FAST, noise_draws=2)
    with pytest.raises(ConfigError, match="noise_draws is 2, but a 'tokens' policy denoises nothing; set it to 1"):
        run_sft(sft)


def saved_weights_of(config: SftConfig) -> bytes:
    return (Path(config.run_dir) / "checkpoints" / "last" / "policy" / "model.safetensors").read_bytes()


def test_grpo_is_on_policy_to_the_bit_and_moves_everything(initial: Path, tmp_path: Path) -> None:
    config = tokens_recipe(tmp_path / "run", initial)
    assert rl.run_rl(config) == 0
    rows = metrics_of(config)
    assert [row["version"] for row in rows] == [1, 2]
    assert all(row["log_prob_gap_largest"] == 0.0 for row in rows), "rollout and micro-batches have four rows each: the same bits"
    before = load_policy(initial).state_dict()
    moved = {name for name, weight in saved_weights(config).items() if not torch.equal(weight, before[name])}
    assert any("language.model.layers" in name for name in moved) and any("vision" in name for name in moved)


def test_another_run_in_other_pools_is_the_same_run(initial_of: Callable[[str], Path], tmp_path: Path) -> None:
    ours = tokens_recipe(tmp_path / "one", initial_of("reasoning"), steps=1, checkpoint_every=1)
    theirs = replace(ours, run_dir=str(tmp_path / "two"), pool=PoolConfig(backend="process", workers=2), rollout_batch_size=4)
    assert rl.run_rl(ours) == rl.run_rl(theirs) == 0
    assert same_weights(ours, theirs)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("parallel", {"log_prob": replace(PPO.log_prob, unit="action"), "entropy_coefficient": 0.01}),
        ("reasoning", {"kl": KlSettings("k3", "loss", 0.1), "old_log_prob": "recompute"}),
    ],
)
def test_ppo_with_a_critic_that_reads_the_prefix(
    form: str, changes: dict[str, Any], initial_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = tokens_recipe(tmp_path / "run", initial_of(form), steps=1, checkpoint_every=1)
    config = replace(config, algorithm=replace(PPO, reward=config.algorithm.reward, **changes))
    assert rl.run_rl(config) == 0
    row = metrics_of(config)[0]
    assert row["log_prob_gap_largest"] == 0.0 and "explained_variance" in row
    assert load_policy(Path(config.run_dir) / "checkpoints" / "last" / "policy").critic is not None


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_grpo_with_vllm(reach_demonstrations_32: Path, tmp_path: Path) -> None:
    """Every step hands vLLM new weights, and what it samples is on-policy for the trainer, within float32's rounding."""
    heads = LanguageConfig(architecture="qwen3", width=16, depth=2, mlp_width=32, heads=2, kv_heads=1, head_width=32)
    sft = trained(replace(REASONING, language=heads), reach_demonstrations_32, tmp_path / "sft", updates=10)
    initial = Path(sft.run_dir) / "checkpoints" / "last" / "policy"
    config = tokens_recipe(tmp_path / "run", initial, steps=3, checkpoint_every=3, vllm=VllmConfig(python=str(PYTHON), start_s=1500.0))
    assert rl.run_rl(config) == 0
    rows = metrics_of(config)
    assert [row["vllm_starts"] for row in rows] == [1.0] * 3 and [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["staleness_max"] == 0 for row in rows)
    assert all(0.0 < row["log_prob_gap_largest"] <= 1e-4 for row in rows), "another engine, so never exactly the same sums"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": VllmConfig(), "exploration": Exploration()}, "set exploration.method: tokens"),
        ({"sglang": SglangConfig(), "exploration": Exploration()}, "sglang is given"),
        ({"vllm": VllmConfig(), "sglang": SglangConfig()}, "leave the other out"),
        ({"algorithm": {"kl": KlSettings("velocity", "loss", 0.1)}}, "tokens have no velocity"),
    ],
)
def test_contradictions_are_refused(initial_of: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokens_recipe(tmp_path / "run", initial_of("parallel"), **changes)
