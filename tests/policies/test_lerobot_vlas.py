"""LeRobot's SmolVLA and GR00T behind the adapter: prompts of several lengths in a batch, base models, cameras; against LeRobot's own calls.

Nothing is fetched: base models and their processors lie inside the checkpoint folders, under their names on the hub.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot_vlas import COSMOS, GROOT_BASE, SMOLVLM, write_groot, write_smolvla
from published_folders import RESOLUTION

from vla_rl.episode import ACTION_DIM, VIEWS, Float32, Observation
from vla_rl.policies.checkpoint import CheckpointError, load_acting_policy
from vla_rl.policies.inference import answer
from vla_rl.policies.inspect import inspect_checkpoint
from vla_rl.policies.lerobot_policy import LerobotPolicy
from vla_rl.policies.statistics import Statistics

Observe = Callable[..., list[Observation]]
PROMPTS = ("pick up the milk", "pick up the tomato sauce and place it in the basket", "pick up the milk")
SEEDS = [5, 6, 7]
KINDS = ("smolvla", "smolvla-bf16", "groot")
TOLERANCE = {"smolvla": 2e-5, "smolvla-bf16": 3e-2, "groot": 2e-5}
"""Batches of another size and prompts of another length sum in another order: in float32, and in bfloat16 (8 bits) over 3 steps."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub answers nothing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folders(statistics: Statistics, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind, which tests do not change."""
    root = tmp_path_factory.mktemp("vlas")
    return {
        "smolvla": write_smolvla(root / "smolvla", statistics),
        "smolvla-bf16": write_smolvla(root / "smolvla-bf16", statistics, load_vlm_weights=True),
        "groot": write_groot(root / "groot", statistics),
    }


def observations_with(prompts: tuple[str, ...], observe: Observe) -> list[Observation]:
    return [replace(observation, prompt=prompt) for observation, prompt in zip(observe(len(prompts), RESOLUTION), prompts)]


def chunks(policy: Any, observations: list[Observation], seeds: list[int]) -> Float32:
    return answer(policy, observations, seeds, len(observations), "cpu")[1]


def lerobots_chunk(folder: Path, observation: Observation, seed: int, monkeypatch: pytest.MonkeyPatch) -> Float32:
    """LeRobot's own pipeline for one frame of its env, as its evaluation calls it; the noise is given, not drawn."""
    config = PreTrainedConfig.from_pretrained(folder)
    if config.type == "smolvla":
        config.vlm_model_name = str(folder / SMOLVLM)
        overrides = {"tokenizer_processor": {"tokenizer_name": config.vlm_model_name}}
    else:
        config.base_model_path = str(folder / GROOT_BASE)
        overrides = {"groot_n1_7_vlm_encode_v1": {"model_name": str(folder / COSMOS)}}
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    frame = {f"observation.images.{view}": torch.from_numpy(observation.images[view]).permute(2, 0, 1) / 255 for view in VIEWS}
    batch = before(frame | {"observation.state": torch.from_numpy(observation.state), "task": observation.prompt})
    shape = (6, 10) if config.type == "smolvla" else (10, 12)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))[None]
    monkeypatch.setattr(torch, "normal", lambda *_, **__: noise)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: noise.clone())
    chunk = after(policy.predict_action_chunk(batch))[0].clamp(-1, 1).numpy()
    monkeypatch.undo()
    return chunk


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_prompts_are_lerobots_single_rows(
    kind: str, folders: dict[str, Path], observe: Observe, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_acting_policy(folders[kind])
    assert isinstance(policy, LerobotPolicy)
    lengths = {"smolvla": (6, 4), "groot": (9, 8)}[kind.partition("-")[0]]  # GR00T: 9 of 10 steps are LIBERO's, replanned after 8
    assert (policy.spec.chunk_length, policy.spec.executed_horizon) == lengths
    observations = observations_with(PROMPTS, observe)
    actions = chunks(policy, observations, SEEDS)
    assert actions.shape == (3, lengths[0], ACTION_DIM)
    for row, observation in enumerate(observations):
        with monkeypatch.context() as patch:
            expected = lerobots_chunk(folders[kind], observation, SEEDS[row], patch)
        np.testing.assert_allclose(actions[row], expected, atol=TOLERANCE[kind], rtol=0)
    assert np.abs(actions[0] - actions[2]).max() > 10 * TOLERANCE[kind], "a trivial output would agree by accident"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_others_prompts(kind: str, folders: dict[str, Path], observe: Observe) -> None:
    policy = load_acting_policy(folders[kind])
    first, second, third = observations_with(PROMPTS, observe)
    together = chunks(policy, [first, second, third], SEEDS)
    other = replace(third, prompt="open the middle drawer of the cabinet, and close it again")
    apart = chunks(policy, [first, second, other], SEEDS)
    np.testing.assert_array_equal(apart[:2], together[:2])
    assert np.abs(apart[2] - together[2]).max() > 1e-3, "the prompt is read"
    np.testing.assert_array_equal(chunks(policy, [other, other, third], [1, 2, 7])[2], together[2])


@pytest.mark.parametrize("kind", KINDS)
def test_every_view_is_read(kind: str, folders: dict[str, Path], observe: Observe) -> None:
    policy = load_acting_policy(folders[kind])
    observation = observe(1, RESOLUTION)[0]
    plain = chunks(policy, [observation], [3])
    for view in VIEWS:
        dark = replace(observation, images=observation.images | {view: np.zeros_like(observation.images[view])})
        assert np.abs(chunks(policy, [dark], [3]) - plain).max() > 1e-3, view


def test_renamed_and_empty_cameras_give_the_same_actions(folders: dict[str, Path], observe: Observe, tmp_path: Path) -> None:
    """smolvla_base's cameras are `camera1`, `camera2` and one that LIBERO does not have, which LeRobot masks."""
    folder = shutil.copytree(folders["smolvla"], tmp_path / "cameras")
    names = {f"observation.images.{view}": f"observation.images.camera{number}" for number, view in enumerate(VIEWS, start=1)}
    config = json.loads((folder / "config.json").read_text())
    config["input_features"] = {names.get(name, name): feature for name, feature in config["input_features"].items()}
    (folder / "config.json").write_text(json.dumps(config | {"empty_cameras": 1}))
    steps = json.loads((folder / "policy_preprocessor.json").read_text())
    steps["steps"][0]["config"]["rename_map"] = names
    (folder / "policy_preprocessor.json").write_text(json.dumps(steps))
    renamed, plain = load_acting_policy(folder), load_acting_policy(folders["smolvla"])
    assert renamed.spec == plain.spec
    observations = observations_with(PROMPTS, observe)
    actions = chunks(renamed, observations, SEEDS)
    np.testing.assert_allclose(actions, chunks(plain, observations, SEEDS), atol=TOLERANCE["smolvla"], rtol=0)


@pytest.mark.parametrize("kind", ["smolvla", "groot"])
def test_its_dry_run_says_the_same(kind: str, folders: dict[str, Path]) -> None:
    report = inspect_checkpoint(folders[kind])
    assert report.problems == () and report.spec == load_acting_policy(folders[kind]).spec
    assert {plan.destination for plan in report.tensors} == {f"LeRobot's {kind}"}


@pytest.mark.parametrize(("kind", "lost"), [("smolvla", SMOLVLM), ("groot", GROOT_BASE)])
def test_a_base_model_that_is_nowhere_is_named(kind: str, lost: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    shutil.rmtree(folder / lost)
    with pytest.raises(CheckpointError, match=rf"built on(.|\n)*without the Hugging Face hub, put their files into .*{folder / lost}"):
        load_acting_policy(folder)


def test_a_missing_package_is_named_before_it_acts(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree", None)  # as where dm-tree is not installed
    with pytest.raises(CheckpointError, match=r"ModuleNotFoundError(.|\n)*pip install 'vla-rl\[lerobot-policies\]'"):
        load_acting_policy(folders["groot"])


def test_relative_actions_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """NVIDIA's LIBERO policies have `use_relative_action` set, and no part to which it applies."""
    folder = shutil.copytree(folders["groot"], tmp_path / "groot")
    path = folder / "policy_postprocessor.json"
    processor = json.loads(path.read_text())
    decode = processor["steps"][0]["config"]
    decode["use_relative_action"] = True
    path.write_text(json.dumps(processor))
    assert load_acting_policy(folder).spec.chunk_length == 9
    decode["modality_config"]["action"]["action_configs"] = [{"rep": "RELATIVE", "type": "NON_EEF"}, *[{"rep": "ABSOLUTE"}] * 6]
    path.write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match="actions are relative to the state"):
        load_acting_policy(folder)
    assert "relative to the state" in inspect_checkpoint(folder).problems[0]
