"""NVIDIA's GR00T N1.6 folder becomes a policy of ours bit for bit: Eagle, embodiment `libero_panda`, its own chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published_folders import write_tensors
from test_groot_policy import EAGLE
from test_published_groot import HEAD, PARTS, check_weights_and_disk, nvidia_config, nvidia_statistics, random_policy, write_tokenizer

from vla_rl.episode import VIEWS, Observation
from vla_rl.policies.checkpoint import CheckpointError, load_policy
from vla_rl.policies.groot.config import EAGLE_CHAT, AttentionStackConfig, GrootConfig
from vla_rl.policies.groot.policy import GrootPolicy
from vla_rl.policies.inspect import NOT_READ, inspect_checkpoint
from vla_rl.policies.processor import Normalization
from vla_rl.policies.statistics import Statistics

Observe = Callable[..., list[Observation]]
TEMPLATE = EAGLE_CHAT.replace("\n<|im_end|>\n{% for", "<|im_end|>\n{% for")
"""Another line break than our default's: the folder's own template is the one that counts."""
LANGUAGE_HEAD = "backbone.model.language_model.lm_head.weight"
CONFIG = GrootConfig(
    chunk_length=10,
    executed_horizon=8,
    denoise_steps=4,
    backbone=replace(EAGLE, chat_template=TEMPLATE),
    head=replace(HEAD, vl_attention=AttentionStackConfig(depth=0, heads=32, head_width=64), mask_token=True),
    prompt_tokens=2 * (EAGLE.vision.tokens + 10) + 88,
    model_state_dim=12,
    model_action_dim=12,
    normalization=Normalization.MIN_MAX,
    clip_outliers=True,
    crop=0.95,
    shift_pixels=0,
    state_dropout=0.2,
)


def write_n1_6(folder: Path, policy: GrootPolicy, entries: dict[str, Any]) -> None:
    """As Isaac-GR00T saves it; Eagle's own config and chat template as they lie beside its code."""
    eagle = folder.parent / "Eagle-Block2A-2B-v2"
    eagle.mkdir()
    (eagle / "config.json").write_text(json.dumps(eagle_config()))
    write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tensors = {policy.published_name(name).removeprefix("_groot_model."): tensor.bfloat16() for name, tensor in policy.state_dict().items()}
    head = tensors["backbone.model.language_model.model.embed_tokens.weight"].clone()
    write_tensors(folder, tensors | {LANGUAGE_HEAD: head}, shards=2)
    config = nvidia_config(str(eagle)) | {"model_type": "Gr00tN1d6", "select_layer": EAGLE.read_layer, "backbone_model_type": "eagle"}
    del config["vl_self_attention_cfg"]
    files = {"config": config, "processor_config": processor_config(), "statistics": {"libero_panda": entries}}
    for name, values in (files | {"embodiment_id": {"gr1": 20}}).items():  # libero_panda's number is in NVIDIA's code
        (folder / f"{name}.json").write_text(json.dumps(values))


def eagle_config() -> dict[str, Any]:
    vision = EAGLE.vision
    text = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": EAGLE.width,
        "intermediate_size": EAGLE.mlp_width,
        "num_hidden_layers": EAGLE.read_layer + 3,
        "num_attention_heads": EAGLE.heads,
        "num_key_value_heads": EAGLE.kv_heads,
        "head_dim": EAGLE.head_width,
        "vocab_size": EAGLE.vocabulary,
        "rope_theta": EAGLE.rope_theta,
    }
    siglip = {
        "model_type": "siglip2_vision_model",
        "hidden_size": vision.width,
        "intermediate_size": vision.mlp_width,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.heads,
        "num_patches": vision.positions,
        "patch_size": vision.patch_size,
        "use_rope": False,
        "use_windows_attn": False,
    }
    return {"model_type": "eagle_3_vl", "downsample_ratio": 0.5, "select_layer": -1, "text_config": text, "vision_config": siglip}


def processor_config() -> dict[str, Any]:
    absolute = [{"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}] * len(PARTS)
    modalities = {
        "video": {"delta_indices": [0], "modality_keys": ["image", "wrist_image"]},
        "state": {"delta_indices": [0], "modality_keys": PARTS, "sin_cos_embedding_keys": None, "mean_std_embedding_keys": None},
        "action": {"delta_indices": list(range(16)), "modality_keys": PARTS, "action_configs": absolute},
        "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
    }
    sizes = {"image_crop_size": None, "image_target_size": None, "shortest_image_edge": 60, "crop_fraction": 0.95}
    flags = {"use_albumentations": True, "use_relative_action": True, "apply_sincos_state_encoding": True, "use_percentiles": False}
    settings = {"modality_configs": {"libero_panda": modalities}, "model_name": "nvidia/Eagle-Block2A-2B-v2", **sizes, **flags}
    return {"processor_class": "Gr00tN1d6Processor", "processor_kwargs": settings}


@pytest.fixture
def original(statistics: Statistics, tmp_path: Path) -> GrootPolicy:
    return random_policy(CONFIG, statistics, write_tokenizer(tmp_path / "tokenizer"), resolution=60)


@pytest.fixture
def folder(original: GrootPolicy, statistics: Statistics, tmp_path: Path) -> Path:
    """A small N1.6 in NVIDIA's layout."""
    write_n1_6(tmp_path / "nvidia", original, nvidia_statistics(statistics))
    return tmp_path / "nvidia"


def test_an_n1_6_folder_goes_in_out_and_in_again(folder: Path, original: GrootPolicy, observe: Observe, tmp_path: Path) -> None:
    imported = load_policy(folder)
    assert imported.config == CONFIG, "sizes, prompt and crop from NVIDIA's files"
    assert (imported.spec.views, imported.spec.resolution, imported.spec.executed_horizon) == (VIEWS, 60, 8)
    check_weights_and_disk(imported, original, observe(2, 60), tmp_path / "ours")


def test_its_dry_run_lists_every_tensor(folder: Path, original: GrootPolicy) -> None:
    report = inspect_checkpoint(folder)
    assert report.problems == () and report.spec == original.spec
    destinations = {plan.name: plan.destination for plan in report.tensors}
    assert destinations.pop(LANGUAGE_HEAD) == NOT_READ
    assert sorted(destinations.values()) == sorted(original.state_dict())


def change(folder: Path, file: str, path: tuple[str, ...], value: Any) -> None:
    values = json.loads((folder / file).read_text())
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / file).write_text(json.dumps(values))


STATE = ("processor_kwargs", "modality_configs", "libero_panda", "state")
ACTION = ("processor_kwargs", "modality_configs", "libero_panda", "action")
RELATIVE = [{"rep": "RELATIVE", "state_key": "x"}, *[{"rep": "ABSOLUTE"}] * 6]


@pytest.mark.parametrize(
    ("file", "path", "value", "said"),
    [
        ("config.json", ("model_name",), "nvidia/another-backbone", "its sizes are known for Eagle-Block2A-2B-v2 and for folders"),
        (
            "../Eagle-Block2A-2B-v2/config.json",
            ("vision_config", "use_rope"),
            True,
            r"vision_config\.use_rope is True",
        ),
        ("tokenizer/chat_template.json", ("chat_template",), "{{ messages }}", "no place for each of 2 views"),
        ("tokenizer/chat_template.json", ("chat_template",), "{% for", "the template cannot be rendered"),
        ("processor_config.json", (*ACTION, "action_configs"), RELATIVE, "actions are relative to the state"),
        ("processor_config.json", (*STATE, "sin_cos_embedding_keys"), ["x"], "encoded as sines and cosines"),
        ("processor_config.json", (*STATE, "mean_std_embedding_keys"), ["x"], "mean_std_embedding_keys of state is set"),
    ],
)
def test_what_differs_from_n1_6_is_named(folder: Path, file: str, path: tuple[str, ...], value: Any, said: str) -> None:
    change(folder, file, path, value)
    with pytest.raises(CheckpointError, match=said):
        load_policy(folder)
    assert inspect_checkpoint(folder).problems


def test_a_missing_chat_template_is_named_with_its_source(folder: Path) -> None:
    (folder / "tokenizer" / "chat_template.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"chat_template\.json is missing; put it there from Isaac-GR00T's Eagle-Block2A-2B-v2 folder"
    ):
        load_policy(folder)


def test_weights_of_other_sizes_are_listed(folder: Path) -> None:
    change(folder, "../Eagle-Block2A-2B-v2/config.json", ("text_config", "intermediate_size"), 40)
    with pytest.raises(CheckpointError, match=r"does not fit a groot policy(.|\n)*wrong shape"):
        load_policy(folder)
