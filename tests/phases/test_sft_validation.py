"""Losses on held-out episodes: first pictures under their own prompt and under another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reach_data import record_reach
from test_sft import POLICY, losses

from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.engine.config import EngineConfig
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.phases.sft_batches import noise_draws
from vla_rl.phases.sft_validation import OTHER_PROMPT, OWN_PROMPT, other_prompts, prompt_verdict
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.telemetry.files import read_jsonl


def episodes(*rows: tuple[str, int, str]) -> list[Any]:
    return [SimpleNamespace(spec=SimpleNamespace(suite=suite, task=task), prompt=prompt) for suite, task, prompt in rows]


def test_another_prompt_is_one_of_the_scene_where_it_has_several() -> None:
    one_scene = ("a", 0, "milk"), ("a", 0, "soup"), ("a", 0, "milk")
    assert other_prompts(episodes(*one_scene)) == ["soup", "milk", "soup"]
    assert other_prompts(episodes(*one_scene, ("a", 1, "tea"))) == ["soup", "milk", "soup", "milk"], "after tea, the first of all again"
    assert other_prompts(episodes(("a", 0, "milk"), ("a", 1, "milk"))) == [], "there is no other one"


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Eight scenes, half of them held out: the red block and the yellow one take turns, whose prompts have equally many tokens."""
    folder = tmp_path_factory.mktemp("two_prompts")
    record_reach(folder, episodes=8, tasks=(0, 3))
    return DataConfig(paths=(str(folder),), validation_fraction=0.5)


@pytest.fixture
def recipe(two_prompts: DataConfig, tmp_path: Path) -> SftConfig:
    return SftConfig(
        run_dir=str(tmp_path / "run"),
        data=two_prompts,
        policy=POLICY,
        engine=EngineConfig(lr=3e-3, device="cpu"),
        updates=4,
        global_batch_size=16,
        micro_batch_size_per_rank=3,
        noise_draws=2,
        validate_every=4,
        checkpoint_every=4,
        show_progress=False,
    )


def held_out(data: DataConfig) -> EpisodeDataset:
    dataset = open_datasets(data)[1]
    assert dataset is not None and len({info.prompt for info in dataset.infos}) == 2
    return dataset


def loss_by_hand(policy: FlowPolicy, dataset: EpisodeDataset, swapped: bool) -> float:
    """First pictures one by one, in the way of the module's docstring."""
    prompts, total, count = sorted({info.prompt for info in dataset.infos}), 0.0, 0.0
    for sample in np.flatnonzero(dataset.sample_positions_X == 0):
        samples = dataset.batch(dataset.columns(np.array([sample]), policy.spec.chunk_length))
        seen = samples.observations[0]
        told = next(prompt for prompt in prompts if (prompt != seen.prompt) == swapped)
        batch = policy.preprocess([replace(seen, prompt=told)], samples.actions_BCA, samples.action_mask_BC)
        seeds = [row[0] for row in noise_draws(0, "validation", [int(sample)], 2)]
        with torch.no_grad():
            result = policy.sft_loss(batch, seeds)
        total, count = total + float(result.loss_sum), count + float(result.count)
    return total / count


def test_first_pictures_have_losses_under_both_prompts(recipe: SftConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sft(recipe) == 0
    own, other = losses(recipe, OWN_PROMPT), losses(recipe, OTHER_PROMPT)
    assert own.keys() == other.keys() == {4}
    policy = load_policy(Path(recipe.run_dir) / "checkpoints" / "last" / "policy").eval()
    assert isinstance(policy, FlowPolicy)
    dataset = held_out(recipe.data)
    assert own[4] == pytest.approx(loss_by_hand(policy, dataset, swapped=False), rel=1e-5)  # float32 sums in another order
    assert other[4] == pytest.approx(loss_by_hand(policy, dataset, swapped=True), rel=1e-5)
    assert own[4] != other[4]
    assert f"first pictures of held-out episodes: loss {own[4]:.3g} under their prompt" in capsys.readouterr().err


def test_a_policy_that_cannot_read_has_equal_losses(recipe: SftConfig, tmp_path: Path) -> None:
    assert run_sft(recipe) == 0
    deaf = load_policy(Path(recipe.run_dir) / "checkpoints" / "last" / "policy")
    words = [parameter for name, parameter in deaf.named_parameters() if "embed_tokens" in name]
    assert len(words) == 1
    words[0].data.zero_()
    save_policy(deaf, tmp_path / "deaf")
    again = replace(
        recipe, run_dir=str(tmp_path / "again"), initial_policy=str(tmp_path / "deaf"), engine=EngineConfig(lr=1e-30, device="cpu")
    )
    assert run_sft(again) == 0
    assert losses(again, OWN_PROMPT) == losses(again, OTHER_PROMPT)


def test_one_prompt_has_no_other(recipe: SftConfig, reach_demonstrations: Path) -> None:
    assert run_sft(replace(recipe, data=DataConfig(paths=(str(reach_demonstrations),), validation_fraction=0.3))) == 0
    rows = read_jsonl(Path(recipe.run_dir) / "metrics.jsonl")
    assert any("validation_loss" in row for row in rows) and not any(OWN_PROMPT in row for row in rows)


def test_the_verdict_names_a_policy_that_does_not_read() -> None:
    assert prompt_verdict(0.5, 2.0) == "first pictures of held-out episodes: loss 0.5 under their prompt, 2 under another one"
    assert "0.7 under another one; the policy hardly reads its prompt (docs/policies.md" in prompt_verdict(0.5, 0.7)
