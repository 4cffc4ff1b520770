"""The plan of a recipe, and what it says about memory, held against real engines and hand counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rl_recipe import POLICY, PPO, rl_recipe, save_random_policy

from vla_rl import cli
from vla_rl.cluster.config import ClusterConfig
from vla_rl.config import ConfigError, load_recipe
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import close_world, open_world
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_dry_run import batch_shapes, dry_run_rl, initial_on_meta, learning_policy, trainer_memory
from vla_rl.phases.rl_heads import load_initial, with_heads

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "cluster"


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "policy"
    save_random_policy(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "ppo_pi05_8gpu.yaml",
            ["machine 0: gpu 0: trainer 0 + worker 0, gpu 1", "8 x 16 = 128 envs, at most 4 each", "per GPU that both share"],
        ),
        (
            "grpo_pi05_2x8gpu.yaml",
            ["machine 0: gpu 0: trainer 0, gpu 1", "machine 1: gpu 0: worker 0, gpu 1", "8 ranks x 8 micro-batches x 8"],
        ),
    ],
)
def test_recipes_of_the_published_size_pass(name: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", str(CONFIGS / name), "--dry-run"]) == 0
    text = capsys.readouterr().out
    for part in [*said, "rollout worker (GiB): policy 6.7", "images [8, 2, 3, 224, 224]", "tokens [8, 200]", "x_t [8, 1, 50, 32]"]:
        assert part in text, text


def test_shards_of_pi05_by_hand() -> None:
    """Three float32 copies of 1/8 of the parameters that learn, beside 1/8 of all weights; an H200 has 141 GB."""
    config = load_recipe(RlConfig, CONFIGS / "grpo_pi05_2x8gpu.yaml")
    policy = learning_policy(config, initial_on_meta(config))
    memory = trainer_memory(config, policy)
    every = sum(parameter.numel() for parameter in policy.parameters())
    learning = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert 3.3e9 < every < 3.8e9, "openpi's pi0.5 has 3.6 billion parameters"
    assert memory.weights == 4 * every // 8 and memory.gradients == 4 * learning // 8 and memory.moments == 8 * learning // 8
    assert memory.total < 80e9


def test_the_estimate_is_what_an_engine_holds(initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial)
    memory = trainer_memory(config, learning_policy(config, initial_on_meta(config)))
    engine = Engine(with_heads(config, load_initial(config)), config.engine, 1, open_world("cpu"))
    held = sum(parameter.numel() * 4 for parameter in engine.policy.parameters())
    close_world()
    assert memory.weights == held
    assert memory.moments == 2 * memory.gradients == 2 * 4 * sum(p.numel() for p in engine.trainable().values())
    assert memory.gathered == held, "shard_by: root gathers everything at once"
    by_blocks = replace(config, engine=replace(config.engine, shard_by="blocks"))
    assert trainer_memory(by_blocks, learning_policy(by_blocks, initial_on_meta(by_blocks))).gathered < held


def test_activations_are_what_autograd_keeps(initial: Path, tmp_path: Path) -> None:
    """Twice the rows keep about twice as much (parts that no row changes do not grow), and recomputation keeps less."""
    config = rl_recipe(tmp_path / "run", initial)
    policy = learning_policy(config, initial_on_meta(config))
    small = trainer_memory(config, policy).activations
    twice = replace(config, algorithm=replace(PPO, micro_batch_size_per_rank=8))
    assert 1.8 * small < trainer_memory(twice, policy).activations <= 2 * small
    recomputed = replace(config, engine=replace(config.engine, activation_checkpointing=True))
    assert 0 < trainer_memory(recomputed, policy).activations < small
    frozen = replace(config, engine=EngineConfig(schedule="constant", warmup_fraction=0.0, trainable="expert", device="cpu"))
    assert trainer_memory(frozen, learning_policy(frozen, initial_on_meta(frozen))).gradients < trainer_memory(config, policy).gradients


def test_shapes_come_from_the_policys_own_processor(initial: Path, tmp_path: Path) -> None:
    config = rl_recipe(tmp_path / "run", initial)
    shapes = batch_shapes(config, learning_policy(config, initial_on_meta(config)))
    assert shapes["images"] == (4, 2, 3, 32, 32) and shapes["x_t"] == (4, 1, POLICY.chunk_length, POLICY.model_action_dim)
    assert not torch.distributed.is_initialized()


def test_what_a_run_would_refuse_a_dry_run_refuses(initial: Path, tmp_path: Path) -> None:
    missing = rl_recipe(tmp_path / "run", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere is not there.*pi05_base"):
        dry_run_rl(missing)
    full = rl_recipe(tmp_path / "run", initial, cluster=ClusterConfig(backend="process", rollout_workers=2, gpus_per_node=2))
    with pytest.raises(ConfigError, match="need 3 GPUs"):
        dry_run_rl(full)
    with pytest.raises(ConfigError, match="did you mean 'pi05_base'"):
        rl_recipe(tmp_path / "run", initial, initial_sizes="pi05_bas")
    with pytest.raises(ConfigError, match=r"initial_sizes is 'tiny', whose vision is"):
        load_initial(rl_recipe(tmp_path / "run", initial, initial_sizes="tiny"))
