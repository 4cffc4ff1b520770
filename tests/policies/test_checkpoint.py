"""Policies on disk: what is saved comes back bit for bit, and anything else is refused with a list."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType
from lerobot.policies.pi0 import processor_pi0  # noqa: F401 (registers its steps)
from lerobot.policies.pi05 import processor_pi05  # noqa: F401
from lerobot.processor import PolicyProcessorPipeline
from safetensors.torch import load_file, save_file

from vla_rl.config import ConfigError
from vla_rl.episode import VIEWS, Observation
from vla_rl.policies.checkpoint import OWN_FILE, WEIGHTS_FILE, CheckpointError, atomic_folder, load_policy, load_weights, save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.published import detect_layout
from vla_rl.policies.statistics import Statistics, StatisticsError

Observe = Callable[..., list[Observation]]


def test_a_saved_policy_acts_bit_for_bit_as_before(policy: FlowPolicy, observe: Observe, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert (loaded.config, loaded.spec) == (policy.config, policy.spec)
    assert loaded.processor.statistics.sha256 == policy.processor.statistics.sha256
    assert loaded.parameter_names("all") == policy.parameter_names("all")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in policy.state_dict().items())
    actions = [made.act(made.preprocess(observe(3)), [1, 2, 3]).actions_BCA for made in (policy, loaded)]
    assert torch.equal(*actions)


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(tiny: Pi0Policy, tmp_path: Path) -> None:
    save_policy(tiny, tmp_path / "policy")
    tiny.model.action_out_proj.bias.data.fill_(3.0)
    save_policy(tiny, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (load_policy(tmp_path / "policy").model.action_out_proj.bias == 3.0).all()


def test_a_failed_save_keeps_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "old").write_text("kept")

    def fail() -> None:
        with atomic_folder(tmp_path / "policy") as temporary:
            (temporary / "new").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (tmp_path / "policy" / "old").read_text() == "kept"


def test_gathered_weights_can_be_saved_in_place_of_the_policys_own(tiny: Pi0Policy, tmp_path: Path) -> None:
    gathered = {name: torch.full_like(tensor, 0.25) for name, tensor in tiny.state_dict().items()}
    save_policy(tiny, tmp_path / "policy", gathered)
    assert all((tensor == 0.25).all() for tensor in load_policy(tmp_path / "policy").state_dict().values())


@pytest.fixture
def saved(tiny: Pi0Policy, tmp_path: Path) -> Path:
    """A saved tiny pi0."""
    save_policy(tiny, tmp_path / "policy")
    return tmp_path / "policy"


def test_missing_surplus_and_misshaped_tensors_are_listed_together_and_nothing_is_loaded(saved: Path, tiny: Pi0Policy) -> None:
    weights = load_file(saved / WEIGHTS_FILE)
    del weights["model.action_in_proj.bias"]
    weights["model.invented.weight"] = torch.zeros(2)
    weights["model.state_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, saved / WEIGHTS_FILE)
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(tiny, saved / WEIGHTS_FILE)
    message = str(caught.value)
    assert "nothing was loaded" in message
    assert "missing (1):\n  model.action_in_proj.bias" in message
    assert "surplus (1):\n  model.invented.weight" in message
    assert "wrong shape (1):\n  model.state_proj.weight: expected [128, 8], got [3, 3]" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state_dict().items())
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        load_policy(saved)


def test_weights_of_the_other_family_are_refused(saved: Path, statistics: Statistics) -> None:
    config = PI0_PRESETS["tiny_pi05"]
    other = make_policy(config, statistics, policy_spec(config, resolution=64))
    with pytest.raises(CheckpointError, match=r"does not fit a pi05 policy(.|\n)*missing(.|\n)*time_mlp_in(.|\n)*surplus(.|\n)*state_proj"):
        load_weights(other, saved / WEIGHTS_FILE)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, OWN_FILE])
def test_truncated_files_are_named(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{name}.*damaged or truncated"):
        load_policy(saved)


def test_truncated_or_foreign_statistics_are_named(saved: Path) -> None:
    path = next(saved.glob("policy_preprocessor_step_*.safetensors"))
    tensors = load_file(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StatisticsError, match="damaged or truncated"):
        load_policy(saved)
    tensors["action.mean"] += 0.1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"the statistics have hash .* was trained with"):
        load_policy(saved)
    path.unlink()
    with pytest.raises(StatisticsError, match="it holds 0"):
        load_policy(saved)


def test_unknown_family_and_misspelt_config_are_named(saved: Path) -> None:
    own = json.loads((saved / OWN_FILE).read_text())
    (saved / OWN_FILE).write_text(json.dumps(own | {"family": "pi5"}))
    with pytest.raises(ConfigError, match="did you mean 'pi05'"):
        load_policy(saved)
    own["config"]["chunk_lenght"] = own["config"].pop("chunk_length")
    (saved / OWN_FILE).write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"'chunk_lenght'.*did you mean 'chunk_length'"):
        load_policy(saved)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"executed_horizon": 9}, "executed_horizon is 9, it must be 1 to chunk_length, which is 8"),
        ({"resolution": "small"}, "ValueError"),
        ({"conventions": {"orientation": "rotated_180"}}, "KeyError: 'rotation'"),
    ],
)
def test_a_spec_that_makes_no_sense_is_named(values: dict[str, Any], said: str, saved: Path) -> None:
    own = json.loads((saved / OWN_FILE).read_text())
    (saved / OWN_FILE).write_text(json.dumps(own | {"spec": own["spec"] | values}))
    with pytest.raises(CheckpointError, match=rf"vla_rl\.json: its spec is none .*{said}"):
        load_policy(saved)


@pytest.mark.parametrize("values", [{"family": []}, {"config": None}, {"statistics_sha256": None}])
def test_an_entry_of_another_form_is_named(values: dict[str, Any], saved: Path) -> None:
    own = json.loads((saved / OWN_FILE).read_text())
    (saved / OWN_FILE).write_text(json.dumps(own | values))
    with pytest.raises(CheckpointError, match=rf"{saved}: its files do not say what"):
        load_policy(saved)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint that vla-rl knows: it holds no vla_rl\.json \(ours\)"):
        load_policy(tmp_path)


@pytest.mark.parametrize("inside", ["policy", "last/policy", "checkpoints/last/policy", "checkpoints/last/pretrained_model"])
def test_the_folder_of_a_run_names_the_policy_in_it(tmp_path: Path, inside: str) -> None:
    (tmp_path / "run" / inside).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"; did you mean .*run/{inside}\?$"):
        detect_layout(tmp_path / "run")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_published_forms_of_the_weights_load(prefix: str, statistics: Statistics, tmp_path: Path) -> None:
    """LeRobot's files start every name with `model.`, openpi's do not and hold the embedding only as vocabulary head."""
    config = replace(PI0_PRESETS["tiny"], carry_output_head=True)
    policy, other = (make_policy(config, statistics, policy_spec(config, resolution=64), seed=seed) for seed in (0, 1))
    save_policy(policy, tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / WEIGHTS_FILE)
    if not prefix:
        del weights["model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"]
    save_file({prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}, tmp_path / WEIGHTS_FILE)
    load_weights(other, tmp_path / WEIGHTS_FILE)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in policy.state_dict().items())


def test_lerobot_reads_config_and_processors(policy: FlowPolicy, observe: Observe, tmp_path: Path) -> None:
    """LeRobot's own classes parse the folder, and its pipelines prepare the same inputs and give the same actions back."""
    folder = tmp_path / "policy"
    save_policy(policy, folder)
    config = PreTrainedConfig.from_pretrained(folder)
    assert (config.type, config.chunk_size, config.max_action_dim) == (policy.config.family, 8, 7)
    assert config.input_features is not None
    assert [name for name, feature in config.input_features.items() if feature.type is FeatureType.VISUAL] == [
        f"observation.images.{view}" for view in VIEWS
    ]
    observation = observe(1)[0]
    frame = {f"observation.images.{view}": torch.from_numpy(observation.images[view]).permute(2, 0, 1) / 255 for view in VIEWS}
    frame |= {"observation.state": torch.from_numpy(observation.state), "task": observation.prompt}
    overrides = {"tokenizer_processor": {"tokenizer_name": str(folder / "tokenizer")}}
    preprocessor = PolicyProcessorPipeline.from_pretrained(folder, "policy_preprocessor.json", overrides=overrides)
    theirs, ours = preprocessor(frame), policy.preprocess([observation])
    assert theirs["observation.language.tokens"].tolist() == ours.tokens_BL.tolist()
    assert theirs["observation.language.attention_mask"].bool().tolist() == ours.token_mask_BL.tolist()
    torch.testing.assert_close(theirs["observation.state"], ours.state_BS, atol=2e-6, rtol=0)  # rounded in another order
    actions = torch.linspace(-0.5, 0.5, 56).reshape(1, 8, 7)
    postprocessor = PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_postprocessor.json",
        to_transition=lambda action: {"action": action},
        to_output=lambda transition: transition["action"],
    )
    np.testing.assert_allclose(postprocessor(actions).numpy(), policy.postprocess(actions), atol=2e-6)
