"""Supervised fine-tuning of a very small pi0 on Reach: it learns, and it goes on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from reach_data import record_reach
from safetensors.torch import load_file

from vla_rl.cli import main
from vla_rl.config import ConfigError, to_plain
from vla_rl.conventions import ConventionMismatch
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.schema import DatasetError
from vla_rl.engine import checkpoint
from vla_rl.engine.config import EngineConfig, LoraSettings
from vla_rl.engine.engine import EngineError
from vla_rl.phases import sft
from vla_rl.phases.evaluation import EvaluationConfig
from vla_rl.phases.loggers import LoggerConfig
from vla_rl.phases.progress import UpdateProgress
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.phases.sft_batches import noise_seeds
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.checkpoint import OWN_FILE, load_policy
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_json, read_jsonl, write_json
from vla_rl.telemetry.spans import leaf_shares

TRANSFORMER = TransformerConfig(width=32, depth=2, mlp_width=64, heads=2, kv_heads=2, head_width=16)
VISION = VisionConfig(image_size=32, conv_channels=(8, 8, 16, 32), width=32, mlp_width=64, heads=2)
POLICY = Pi0Config(vision=VISION, language=TRANSFORMER, expert=TRANSFORMER, shift_pixels=1)
SUM_ORDER = 1e-5
"""Float32 losses of order 1 after a few updates with sums in another order."""


@pytest.fixture
def recipe(reach_demonstrations: Path, tmp_path: Path) -> SftConfig:
    return SftConfig(
        run_dir=str(tmp_path / "run"),
        data=DataConfig(paths=(str(reach_demonstrations),), validation_fraction=0.3),
        policy=POLICY,
        engine=EngineConfig(lr=3e-3, ema_decay=0.8, device="cpu"),
        updates=8,
        global_batch_size=16,
        micro_batch_size_per_rank=16,
        validate_every=4,
        checkpoint_every=4,
        show_progress=False,
    )


def losses(config: SftConfig, name: str = "loss") -> dict[int, float]:
    rows = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if name in row]
    assert len({row["update"] for row in rows}) == len(rows), "an update is there twice"
    return {row["update"]: row[name] for row in rows}


def saved(config: SftConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.run_dir) / "checkpoints" / "last" / "policy" / "model.safetensors")


def same_weights(first: SftConfig, second: SftConfig) -> bool:
    ours, theirs = saved(first), saved(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def at_update(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], Any]) -> None:
    """Do something in the middle of a run, right after update `number`."""
    advance = UpdateProgress.advance

    def advance_and_act(progress: UpdateProgress, done: int, text: str) -> None:
        advance(progress, done, text)
        if done == number:
            act()

    monkeypatch.setattr(UpdateProgress, "advance", advance_and_act)


@pytest.fixture
def straight(recipe: SftConfig, tmp_path: Path) -> SftConfig:
    """The recipe, run to its end without a break in another directory."""
    config = replace(recipe, run_dir=str(tmp_path / "straight"))
    assert run_sft(config) == 0
    return config


def test_it_learns_and_leaves_a_policy(recipe: SftConfig) -> None:
    config = replace(recipe, updates=40, validate_every=20, checkpoint_every=40)
    assert run_sft(config) == 0
    train, validation = losses(config), losses(config, "validation_loss")
    assert list(train) == list(range(1, 41))
    assert np.mean(list(train.values())[-5:]) < 0.75 * np.mean(list(train.values())[:5])
    assert validation.keys() == {20, 40}
    policy = load_policy(Path(config.run_dir) / "checkpoints" / "last" / "policy")
    assert policy.spec.resolution == 64
    explained = 1.0 - leaf_shares(read_jsonl(Path(config.run_dir) / "spans.jsonl"), "update")["unaccounted"]
    assert explained >= 0.95


def test_ctrl_c_writes_a_checkpoint_and_a_second_start_is_bit_equal(
    recipe: SftConfig, straight: SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_update(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run_sft(recipe) == 130
    assert (Path(recipe.run_dir) / "checkpoints" / "last").resolve().name == "step_3"
    assert run_sft(recipe) == 0
    assert losses(recipe) == losses(straight)
    assert losses(recipe, "validation_loss") == losses(straight, "validation_loss")
    assert same_weights(recipe, straight)
    assert run_sft(recipe) == 0, "a run that is complete stays as it is"
    assert losses(recipe) == losses(straight)


def test_a_crash_after_a_checkpoint_runs_the_lost_updates_again(
    recipe: SftConfig, straight: SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise EngineError("crash")

    with monkeypatch.context() as patch:
        at_update(patch, 6, crash)
        with pytest.raises(EngineError):
            run_sft(recipe)
    assert list(losses(recipe)) == [1, 2, 3, 4, 5, 6]
    assert run_sft(recipe) == 0
    assert losses(recipe) == losses(straight)
    assert same_weights(recipe, straight)


def test_a_kill_right_before_the_pointer_leaves_no_older_policy_behind(
    recipe: SftConfig, straight: SftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is whole then and no update is left to do; what others take from the run is where `last` points."""
    point_to, last = checkpoint._point_to, Path(recipe.run_dir) / "checkpoints" / "last"

    def killed_at_the_end(target: Path) -> None:
        if target.name == "step_8":
            raise SystemExit
        point_to(target)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(checkpoint, "_point_to", killed_at_the_end)
        run_sft(recipe)
    assert last.resolve().name == "step_4"
    assert run_sft(recipe) == 0
    assert last.resolve().name == "step_8"
    assert same_weights(recipe, straight)


@pytest.mark.parametrize("size", [4, 5])
def test_the_cut_into_micro_batches_does_not_matter(recipe: SftConfig, straight: SftConfig, size: int) -> None:
    assert run_sft(replace(recipe, micro_batch_size_per_rank=size)) == 0
    assert losses(recipe) == pytest.approx(losses(straight), abs=SUM_ORDER)
    assert losses(recipe, "validation_loss") == pytest.approx(losses(straight, "validation_loss"), abs=SUM_ORDER)


def test_draws_and_first_pictures_reach_the_updates(recipe: SftConfig, straight: SftConfig, tmp_path: Path) -> None:
    """Cut into other micro-batches it is the same run; an epoch is longer by the repeats; other noise gives another loss."""
    more = replace(recipe, noise_draws=3, data=replace(recipe.data, first_picture_repeats=4))
    cut = replace(more, run_dir=str(tmp_path / "cut"), micro_batch_size_per_rank=5)
    assert run_sft(more) == run_sft(cut) == 0
    assert losses(more) == pytest.approx(losses(cut), abs=SUM_ORDER)
    dataset, _ = open_datasets(recipe.data)
    assert losses(more, "epoch")[8] == pytest.approx(16 * 8 / (len(dataset) + 3 * len(dataset.infos)))
    assert losses(straight, "epoch")[8] == pytest.approx(16 * 8 / len(dataset))
    assert losses(replace(more, run_dir=straight.run_dir))[1] != pytest.approx(losses(more)[1], rel=1e-2)


@pytest.mark.slow
def test_two_ranks_under_torchrun_give_the_losses_of_one(recipe: SftConfig, straight: SftConfig, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(to_plain(recipe)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*command, "-m", "vla_rl.cli", "sft", str(path)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500)
    assert losses(recipe) == pytest.approx(losses(straight), abs=SUM_ORDER)
    assert losses(recipe, "validation_loss") == pytest.approx(losses(straight, "validation_loss"), abs=SUM_ORDER)
    assert run_sft(replace(recipe)) == 0, "and one rank finds the run of two complete"


def test_a_saved_policy_is_a_start(recipe: SftConfig, straight: SftConfig, tmp_path: Path) -> None:
    folder = str(Path(straight.run_dir) / "checkpoints" / "last" / "policy")
    tuned = replace(recipe, initial_policy=folder, updates=1, engine=EngineConfig(lr=1e-12, weight_decay=0.0, device="cpu"))
    assert run_sft(tuned) == 0
    ours, theirs = saved(tuned), saved(straight)
    # one Adam step of 1e-12 / 25 is below half an ulp of nearly every weight
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-9, rtol=0) for name in theirs)


def test_a_start_that_was_made_for_other_episodes_is_refused(
    recipe: SftConfig, straight: SftConfig, reach_demonstrations_32: Path, tmp_path: Path
) -> None:
    """It would learn from what it will never see: its own conventions, rate and resolution are what it acts with."""
    folder = Path(straight.run_dir) / "checkpoints" / "last" / "policy"
    tuned = replace(recipe, initial_policy=str(folder), updates=1)
    small = replace(tuned, data=DataConfig(paths=(str(reach_demonstrations_32),), validation_fraction=0))
    with pytest.raises(DatasetError, match=r"has pictures of 32 px, the policy .*policy was made for 64 px"):
        run_sft(small)
    fields = read_json(folder / OWN_FILE)
    slower = fields["spec"] | {"conventions": fields["spec"]["conventions"] | {"control_rate_hz": 10}}
    write_json(folder / OWN_FILE, fields | {"spec": slower})
    with pytest.raises(ConventionMismatch, match=r"control_rate_hz: policy .*policy has 10, dataset .* has 20"):
        run_sft(tuned)


def test_an_evaluation_that_cannot_run_is_found_before_anything_is_trained(recipe: SftConfig) -> None:
    config = replace(recipe, evaluation=EvaluationConfig(every=4, suite="reach", env=EnvConfig(kind="reach", resolution=32)))
    with pytest.raises(ConfigError, match=r"evaluation\.env\.resolution is 32, and the policy's pictures have 64 px"):
        run_sft(config)
    assert not (Path(config.run_dir) / "checkpoints").exists()


def test_evaluation_during_training_is_in_the_metrics(recipe: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run was killed in the last one, and has no update left."""
    evaluation = EvaluationConfig(
        every=4,
        suite="reach",
        tasks=(0,),
        episodes_per_task=2,
        env=EnvConfig(kind="reach", resolution=64),
        pool=PoolConfig(backend="serial", workers=1),
    )
    config = replace(recipe, updates=4, evaluation=evaluation)

    def killed(*arguments: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sft, "evaluate_checkpoint", killed)
        run_sft(config)
    assert run_sft(config) == 0
    assert losses(config, "success_rate").keys() == {4}
    assert losses(config, "missing_episodes") == {4: 0.0}
    assert len(read_jsonl(Path(config.run_dir) / "evaluations" / "step_4" / "episodes.jsonl")) == 2


def test_tensorboard_gets_the_same_numbers(recipe: SftConfig) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = replace(recipe, updates=2, loggers=LoggerConfig(tensorboard=True))
    assert run_sft(config) == 0
    events = accumulator.EventAccumulator(str(Path(config.run_dir) / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == pytest.approx(losses(config), rel=1e-6)  # event files hold float32


@pytest.mark.parametrize("tuned", [False, True], ids=["scratch", "initial_policy"])
def test_data_that_changed_since_the_checkpoint_are_refused(recipe: SftConfig, straight: SftConfig, tmp_path: Path, tuned: bool) -> None:
    """Also as many others, and where the statistics are an initial policy's, which the data do not change."""
    folder = tmp_path / "demonstrations"
    record_reach(folder, episodes=3)
    initial = str(Path(straight.run_dir) / "checkpoints" / "last" / "policy") if tuned else None
    config = replace(recipe, data=DataConfig(paths=(str(folder),), validation_fraction=0), initial_policy=initial, updates=1)
    assert run_sft(config) == 0
    names = [folder / f"episode_00000{number}.hdf5" for number in range(3)]
    names[0].rename(folder / "episode_000003.hdf5")  # the same episodes in another order
    with pytest.raises(DatasetError, match=r"samples_sha256 is .* Episodes were added, removed or changed since"):
        run_sft(config)
    (folder / "episode_000003.hdf5").rename(names[0])
    assert run_sft(config) == 0
    names[2].unlink()
    with pytest.raises(DatasetError, match=r"num_samples is \d+, the checkpoint has \d+; .* Episodes were added, removed or changed since"):
        run_sft(config)


def test_another_recipe_in_the_same_directory_is_refused(recipe: SftConfig) -> None:
    assert run_sft(replace(recipe, updates=1)) == 0
    with pytest.raises(ConfigError, match=r"holds a run of another recipe(?s:.)*seed: 0 -> 1"):
        run_sft(replace(recipe, updates=1, seed=1))


def test_training_that_diverges_ends_with_a_remedy_and_no_traceback(
    recipe: SftConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(to_plain(replace(recipe, updates=40))))
    assert main(["sft", str(path), "--engine.lr", "1e36"]) == 2
    assert "start again in a new run_dir with a lower engine.lr" in capsys.readouterr().err


@pytest.mark.parametrize("unread", ["adapters", "critic"])
def test_a_run_with_parameters_that_no_loss_reaches_is_bit_equal_over_a_resume(
    recipe: SftConfig, straight: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: str
) -> None:
    """Nothing reads the last layer of pi0's language model, nor its adapters; nor in SFT its critic."""
    changes: dict[str, Any] = {"policy": replace(POLICY, critic=CriticConfig())}
    if unread == "adapters":
        engine = replace(recipe.engine, trainable="lora", lora=LoraSettings(rank=2))
        changes = {"engine": engine, "initial_policy": str(Path(straight.run_dir) / "checkpoints" / "last" / "policy")}
    broken, whole = replace(recipe, **changes), replace(recipe, run_dir=str(tmp_path / "whole"), **changes)
    with monkeypatch.context() as patch:
        at_update(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run_sft(broken) == 130
    assert run_sft(broken) == run_sft(whole) == 0
    assert losses(broken) == losses(whole)
    assert same_weights(broken, whole)


def test_adapters_of_random_weights_are_refused(recipe: SftConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.trainable is 'lora' and initial_policy none: .*; name an initial_policy, or train 'all'"
    ):
        replace(recipe, engine=replace(recipe.engine, trainable="lora"))


def test_a_finished_run_goes_on_where_no_rate_depends_on_its_length(recipe: SftConfig, tmp_path: Path) -> None:
    """Bit for bit as a run that was as long from the start; with a schedule over the updates it would be another one."""
    constant = replace(recipe, engine=replace(recipe.engine, schedule="constant", warmup_fraction=0.0))
    longer = replace(constant, run_dir=str(tmp_path / "longer"))
    assert run_sft(longer) == run_sft(replace(constant, updates=5)) == 0
    assert run_sft(constant) == 0
    assert losses(constant) == losses(longer)
    assert same_weights(constant, longer)
    assert run_sft(replace(constant, updates=3)) == 0, "it is longer than that already"
    warm = replace(constant, run_dir=str(tmp_path / "warm"), engine=replace(constant.engine, warmup_fraction=0.1), updates=1)
    assert run_sft(warm) == 0
    with pytest.raises(ConfigError, match="updates: 1 -> 2"):
        run_sft(replace(warm, updates=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"updates": 0}, "updates is 0; it must be at least 1"),
        ({"micro_batch_size_per_rank": 0}, "micro_batch_size_per_rank is 0"),
        ({"noise_draws": 0}, "noise_draws is 0; it must be at least 1"),
        ({"evaluation": EvaluationConfig(every=6)}, "evaluation.every is 6 and checkpoint_every 4"),
    ],
)
def test_values_that_contradict_are_named(recipe: SftConfig, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(recipe, **fields)


def test_noise_seeds_depend_on_their_place_alone() -> None:
    whole = noise_seeds(3, "update 7", range(8))
    assert whole == [*noise_seeds(3, "update 7", range(3)), *noise_seeds(3, "update 7", range(3, 8))]
    others = noise_seeds(3, "update 8", range(8)) + noise_seeds(4, "update 7", range(8))
    assert len({*whole, *others}) == 24
    assert all(0 <= seed < 2**63 for seed in whole)
