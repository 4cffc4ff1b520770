"""Published folders: what LeRobot and openpi wrote becomes a policy of ours bit for bit, and whatever does not fit is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published_folders import CHUNK, HORIZON, RESOLUTION, small_policy, write_lerobot_pi0, write_openpi
from safetensors.torch import load_file, save_file

from vla_rl.episode import VIEWS, Observation
from vla_rl.policies.checkpoint import OWN_FILE, CheckpointError, load_acting_policy, load_policy, save_policy
from vla_rl.policies.inspect import NOT_READ, inspect_checkpoint, is_checkpoint
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.pi0.imported import pi0_sizes
from vla_rl.policies.pi0.model import Pi0Model
from vla_rl.policies.published import resolve_folder
from vla_rl.policies.statistics import ACTION, STATE, Statistics, StatisticsError

FAMILIES = ("pi0", "pi05")
Observe = Callable[..., list[Observation]]


def equal_weights(first: PolicyModule, second: PolicyModule) -> bool:
    other = second.state_dict()
    return other.keys() == first.state_dict().keys() and all(torch.equal(w, other[name]) for name, w in first.state_dict().items())


def same_actions(first: PolicyModule, second: PolicyModule, observations: list[Observation], tolerance: float = 0.0) -> bool:
    chunks = [made.postprocess(made.act(made.preprocess(observations), [1, 2]).actions_BCA) for made in (first, second)]
    return bool(np.abs(chunks[0]).max() > 0) and np.allclose(*chunks, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lerobot_folder_goes_in_out_and_in_again(family: str, statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    original = small_policy(family, statistics)
    write_lerobot_pi0(tmp_path / "theirs", original, statistics)
    imported = load_policy(tmp_path / "theirs")
    assert imported.config == original.config, "sizes from shapes, the rest from LeRobot's config"
    assert (imported.spec.views, imported.spec.resolution) == (VIEWS, RESOLUTION)
    assert (imported.spec.chunk_length, imported.spec.executed_horizon) == (CHUNK, HORIZON)
    assert imported.spec.conventions == original.spec.conventions
    assert equal_weights(imported, original)
    assert same_actions(imported, original, observe(2, RESOLUTION), tolerance=1e-5), "LeRobot keeps its statistics in float32"
    save_policy(imported, tmp_path / "ours")
    again = load_policy(tmp_path / "ours")
    assert equal_weights(again, imported) and again.config == imported.config and again.spec == imported.spec
    (tmp_path / "ours" / OWN_FILE).unlink()
    as_lerobot = load_policy(tmp_path / "ours")
    assert equal_weights(as_lerobot, imported) and same_actions(as_lerobot, imported, observe(2, RESOLUTION))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_openpi_folder_goes_in_out_and_in_again(
    family: str, shards: int, statistics: Statistics, observe: Observe, tmp_path: Path
) -> None:
    original = small_policy(family, statistics)
    write_openpi(tmp_path / "theirs", original, statistics, shards=shards)
    imported = load_policy(tmp_path / "theirs")
    assert equal_weights(imported, original)
    assert (imported.spec.chunk_length, imported.spec.executed_horizon) == (CHUNK, 5)
    save_policy(imported, tmp_path / "ours")
    again = load_policy(tmp_path / "ours")
    assert equal_weights(again, imported) and same_actions(again, imported, observe(2, RESOLUTION))


@pytest.mark.parametrize("family", FAMILIES)
def test_openpis_normalisation_is_openpis(family: str, statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    """By hand, from openpi's `transforms.Normalize` and `Unnormalize`."""
    write_openpi(tmp_path / "theirs", small_policy(family, statistics), statistics)
    policy = load_policy(tmp_path / "theirs")
    state = observe(1, RESOLUTION)[0].state.astype(np.float64)
    entries = {name: {key: np.array(value) for key, value in entry.items()} for name, entry in statistics.to_dict().items()}
    model = np.linspace(-0.4, 0.4, 7)
    if family == "pi0":
        wanted = (state - entries[STATE]["mean"]) / (entries[STATE]["std"] + 1e-6)
        actions = model * (entries[ACTION]["std"] + 1e-6) + entries[ACTION]["mean"]
    else:
        low, high = entries[STATE]["q01"], entries[STATE]["q99"]
        wanted = (state - low) / (high - low + 1e-6) * 2 - 1
        low, high = entries[ACTION]["q01"], entries[ACTION]["q99"]
        actions = (model + 1) / 2 * (high - low + 1e-6) + low
    batch = policy.preprocess(observe(1, RESOLUTION))
    np.testing.assert_allclose(batch.state_BS[0, :8], wanted, atol=2e-6, rtol=0)  # float32
    sampled = torch.zeros(1, CHUNK, 32)
    sampled[..., :7] = torch.from_numpy(model)
    np.testing.assert_allclose(policy.postprocess(sampled)[0, 0], np.clip(actions, -1, 1), atol=2e-6, rtol=0)


def test_openpis_own_libero_checkpoints_are_known(statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    """`pi05_libero` saw no state; `pi0_libero` has actions relative to the state, which nothing here would undo."""
    asset = "physical-intelligence/libero"
    write_openpi(tmp_path / "pi05", small_policy("pi05", statistics), statistics, asset)
    policy = load_policy(tmp_path / "pi05")
    first, second = observe(2, RESOLUTION)
    tokens = policy.preprocess([first, replace(first, state=second.state)]).tokens_BL
    assert not policy.config.state_in_prompt and torch.equal(tokens[0], tokens[1])
    write_openpi(tmp_path / "pi0", small_policy("pi0", statistics), statistics, asset)
    with pytest.raises(CheckpointError, match=r"extra_delta_transform.*policy\.remote"):
        load_policy(tmp_path / "pi0")


@pytest.mark.parametrize("name", ["pi0_base", "pi05_base"])
def test_sizes_of_the_published_networks_are_found_from_their_shapes(name: str) -> None:
    with torch.device("meta"):
        shapes = {f"model.{key}": tuple(tensor.shape) for key, tensor in Pi0Model(PI0_PRESETS[name], 2).state_dict().items()}
    assert pi0_sizes(shapes) == PI0_PRESETS[name]


@pytest.fixture
def lerobot(statistics: Statistics, tmp_path: Path) -> Path:
    """A pi0 in LeRobot's layout."""
    write_lerobot_pi0(tmp_path / "pi0", small_policy("pi0", statistics), statistics)
    return tmp_path / "pi0"


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_cameras_name_is_refused_unless_the_folder_renames_it(lerobot: Path) -> None:
    features = json.loads((lerobot / "config.json").read_text())["input_features"]
    features["observation.images.front"] = features.pop("observation.images.image")
    edit(lerobot / "config.json", input_features=features)
    with pytest.raises(CheckpointError, match=r"looks at .*observation\.images\.front.*set rename_map"):
        load_policy(lerobot)
    steps = json.loads((lerobot / "policy_preprocessor.json").read_text())["steps"]
    steps[0]["config"]["rename_map"] = {"observation.images.image": "observation.images.front"}
    edit(lerobot / "policy_preprocessor.json", steps=steps)
    assert set(load_policy(lerobot).spec.views) == set(VIEWS)


def test_empty_cameras_are_left_out(statistics: Statistics, tmp_path: Path) -> None:
    write_lerobot_pi0(tmp_path / "pi0", small_policy("pi0", statistics), statistics, empty_cameras=1)
    assert "observation.images.empty_camera_0" in json.loads((tmp_path / "pi0" / "config.json").read_text())["input_features"]
    assert load_policy(tmp_path / "pi0").spec.views == VIEWS


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"type": "pi05"}, "config.json says 'pi05', the weights are 'pi0'"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2"),
        ({"n_action_steps": CHUNK + 1}, f"n_action_steps is {CHUNK + 1}; it must be 1 to chunk_size, which is {CHUNK}"),
        ({"use_relative_actions": True}, "use_relative_actions is set"),
        ({"normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}}, "must share one of MEAN_STD"),
        ({"output_features": {"action": {"type": "ACTION", "shape": [32]}}}, r"action has shape \[32\], LIBERO's is \[7\]"),
    ],
)
def test_what_a_lerobot_config_asks_for_and_cannot_have_is_named(lerobot: Path, values: dict[str, Any], said: str) -> None:
    edit(lerobot / "config.json", **values)
    with pytest.raises(CheckpointError, match=said):
        load_policy(lerobot)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"chunk_size": None}, "TypeError: int"),
        ({"input_features": {"observation.images.image": {"type": "VISUAL"}}}, "there is no 'shape'"),
        ({"num_inference_steps": -3}, "denoise_steps is -3, it must be at least 1"),
        ({"normalization_mapping": []}, "AttributeError"),
        ({"type": "act", "input_features": {"observation.images.image": None}}, "TypeError"),
    ],
)
def test_an_entry_of_another_form_is_an_error_that_names_the_folder(lerobot: Path, values: dict[str, Any], said: str) -> None:
    """Entries that another release leaves out or writes otherwise; each was a traceback."""
    edit(lerobot / "config.json", **values)
    with pytest.raises(CheckpointError, match=rf"{lerobot}: its files do not say what .*{said}"):
        load_acting_policy(lerobot)
    assert said.split(":")[0] in "\n".join(inspect_checkpoint(lerobot).problems)


def test_files_that_are_missing_damaged_or_contradict_each_other_are_named(lerobot: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        shutil.copytree(lerobot, tmp_path / name)
        return tmp_path / name

    shutil.rmtree((folder := broken("no_tokenizer")) / "tokenizer")
    with pytest.raises(CheckpointError, match=r"no tokenizer/tokenizer\.json; put the tokenizer"):
        load_policy(folder)
    next((folder := broken("no_statistics")).glob("policy_preprocessor_step_*")).unlink()
    with pytest.raises(StatisticsError, match="it holds 0; fetch the whole folder"):
        load_policy(folder)
    ((folder := broken("no_processor")) / "policy_preprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks policy_preprocessor\.json"):
        load_policy(folder)
    path = next((folder := broken("other_statistics")).glob("policy_postprocessor_step_*"))
    tensors = load_file(path)
    save_file(tensors | {"action.mean": tensors["action.mean"] + 0.1}, path)
    with pytest.raises(StatisticsError, match="statistics of 'action' differ"):
        load_policy(folder)
    path = (folder := broken("truncated")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_policy(folder)
    path = (folder := broken("other_network")) / "model.safetensors"
    save_file({"head.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(CheckpointError, match="not those of a pi0"):
        load_policy(folder)


def test_shards_and_assets_that_do_not_add_up_are_named(statistics: Statistics, tmp_path: Path) -> None:
    write_openpi(tmp_path / "pi0", small_policy("pi0", statistics), statistics, shards=2)
    shutil.copytree(tmp_path / "pi0", tmp_path / "lacks_shard")
    (tmp_path / "lacks_shard" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00002"):
        load_policy(tmp_path / "lacks_shard")
    index = tmp_path / "pi0" / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=places | {"invented": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="its shards do not hold: invented"):
        load_policy(tmp_path / "pi0")
    for damaged in ([], {"model.state_proj.bias": None}):
        edit(index, weight_map=damaged)
        with pytest.raises(CheckpointError, match="is no index of tensors"):
            load_policy(tmp_path / "pi0")
    edit(index, weight_map=places)
    shutil.copytree(tmp_path / "pi0" / "assets" / "my", tmp_path / "pi0" / "assets" / "other")
    with pytest.raises(CheckpointError, match=r"it has my/robot, other/robot"):
        load_policy(tmp_path / "pi0")


def test_a_name_that_is_neither_folder_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="hub does not give it"):
        resolve_folder("somebody/no-such-policy")
    for name in ("/nowhere/at/all", "nowhere", "./runs/x"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            resolve_folder(name)


def test_the_dry_run_lists_every_tensor_and_its_destination(lerobot: Path, statistics: Statistics, tmp_path: Path) -> None:
    report = inspect_checkpoint(lerobot)
    policy = load_policy(lerobot)
    assert report.problems == () and report.family == "pi0" and report.spec == policy.spec and is_checkpoint(lerobot)
    plans = {plan.name: plan for plan in report.tensors}
    assert set(plans) == set(load_file(lerobot / "model.safetensors"))
    assert plans["model.action_in_proj.weight"].destination == "model.action_in_proj.weight"
    assert plans["model.paligemma_with_expert.paligemma.lm_head.weight"].destination == NOT_READ
    assert {plan.destination for plan in report.tensors} == {*policy.state_dict(), NOT_READ}
    assert {plan.dtype for plan in report.tensors} == {"F32", "BF16"}
    assert "executed_horizon: 4" in report.text() and "-> model.language.embed_tokens.weight" in report.text()
    tensors = load_file(lerobot / "model.safetensors")
    del tensors["model.state_proj.bias"]
    save_file(tensors | {"model.invented": torch.zeros(3)}, lerobot / "model.safetensors")
    problems = "\n".join(inspect_checkpoint(lerobot).problems)
    assert "model.invented has no place" in problems and "nothing fills model.state_proj.bias" in problems
    shutil.rmtree(lerobot / "tokenizer")
    assert "put the tokenizer" in inspect_checkpoint(lerobot).problems[0] and not is_checkpoint(tmp_path)


def test_a_policy_of_ours_acts_through_the_same_door(lerobot: Path) -> None:
    assert isinstance(load_acting_policy(lerobot), PolicyModule)
