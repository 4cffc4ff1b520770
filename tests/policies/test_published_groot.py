"""NVIDIA's GR00T folder: config, shards, statistics by part and embodiment numbers become a policy of ours bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published_folders import write_tensors
from test_groot_policy import QWEN, SPECIAL_TOKENS
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3VLConfig

from vla_rl.episode import VIEWS, Observation
from vla_rl.policies.checkpoint import CheckpointError, load_policy, save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.groot.config import ActionHeadConfig, AttentionStackConfig, GrootConfig
from vla_rl.policies.groot.policy import GrootPolicy
from vla_rl.policies.inspect import inspect_checkpoint
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.processor import Normalization
from vla_rl.policies.statistics import ACTION, STATE, Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE

Observe = Callable[..., list[Observation]]
PARTS = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
KEPT = ("min", "max", "mean", "std", "q01", "q99")
HEAD = ActionHeadConfig(
    vl_attention=AttentionStackConfig(depth=1, heads=2, head_width=16),
    dit=AttentionStackConfig(depth=4, heads=2, head_width=16),
    hidden_width=24,
    embodiments=4,
    embodiment=2,
    positions=32,
    time_buckets=1000,
)
CONFIG = GrootConfig(
    chunk_length=10,
    executed_horizon=8,
    denoise_steps=4,
    backbone=QWEN,
    head=HEAD,
    prompt_tokens=2 * (QWEN.vision.tokens + 2) + 64,
    model_state_dim=12,
    model_action_dim=12,
    normalization=Normalization.QUANTILES,
    crop=28 / 32,
    shift_pixels=0,
    state_dropout=0.2,
    clip_outliers=True,
)


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER / TOKENIZER_FILE))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return folder


def small_groot(statistics: Statistics, tokenizer: Path) -> GrootPolicy:
    """A policy of N1.7's structure, with random weights that bfloat16 holds."""
    return random_policy(CONFIG, statistics, tokenizer, resolution=32)


def random_policy(config: GrootConfig, statistics: Statistics, tokenizer: Path, resolution: int) -> GrootPolicy:
    policy = make_policy(config, statistics, policy_spec(config, resolution), tokenizer_folder=str(tokenizer)).eval()
    assert isinstance(policy, GrootPolicy)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data = (parameter.data + 0.05 * torch.randn(parameter.shape, generator=generator)).bfloat16().float()
    return policy


def write_nvidia(folder: Path, policy: GrootPolicy, entries: dict[str, Any]) -> None:
    """As Isaac-GR00T saves it: the model's names without a prefix, in shards, with the processor's files beside them."""
    backbone = folder.parent / "qwen"
    vision = QWEN.vision
    Qwen3VLConfig(
        text_config={
            "hidden_size": QWEN.width,
            "intermediate_size": QWEN.mlp_width,
            "num_hidden_layers": QWEN.read_layer + 2,
            "num_attention_heads": QWEN.heads,
            "num_key_value_heads": QWEN.kv_heads,
            "head_dim": QWEN.head_width,
            "vocab_size": QWEN.vocabulary,
            "rope_parameters": {"rope_type": "default", "rope_theta": QWEN.rope_theta, "mrope_section": list(QWEN.rope_sections)},
        },
        vision_config={
            "hidden_size": vision.width,
            "depth": vision.depth,
            "intermediate_size": vision.mlp_width,
            "num_heads": vision.heads,
            "num_position_embeddings": vision.positions,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge,
            "deepstack_visual_indexes": list(vision.deepstack),
            "out_hidden_size": QWEN.width,
        },
    ).save_pretrained(backbone)
    write_tokenizer(folder / "tokenizer")
    tensors = {policy.published_name(name).removeprefix("_groot_model."): tensor.bfloat16() for name, tensor in policy.state_dict().items()}
    head = tensors["backbone.model.model.language_model.embed_tokens.weight"].clone()
    write_tensors(folder, tensors | {"backbone.model.lm_head.weight": head}, shards=2)
    files = {"config": nvidia_config(str(backbone)), "processor_config": processor_config(), "statistics": {"libero_sim": entries}}
    for name, values in (files | {"embodiment_id": {"libero_sim": 2, "new_embodiment": 3}}).items():
        (folder / f"{name}.json").write_text(json.dumps(values))


def nvidia_config(backbone: str) -> dict[str, Any]:
    def stack(config: AttentionStackConfig) -> dict[str, Any]:
        return {"num_layers": config.depth, "num_attention_heads": config.heads, "attention_head_dim": config.head_width, "dropout": 0.2}

    return {
        "model_type": "Gr00tN1d7",
        "architectures": ["Gr00tN1d7"],
        "model_name": backbone,
        "select_layer": QWEN.read_layer,
        "image_crop_size": [28, 28],
        "image_target_size": [32, 32],
        "max_state_dim": 12,
        "max_action_dim": 12,
        "action_horizon": 10,
        "hidden_size": HEAD.hidden_width,
        "max_seq_len": HEAD.positions,
        "use_alternate_vl_dit": True,
        "attend_text_every_n_blocks": HEAD.text_every,
        "vl_self_attention_cfg": stack(HEAD.vl_attention),
        "diffusion_model_cfg": stack(HEAD.dit),
        "num_inference_timesteps": 4,
        "num_timestep_buckets": HEAD.time_buckets,
        "state_dropout_prob": 0.2,
        "max_num_embodiments": HEAD.embodiments,
    }


def processor_config() -> dict[str, Any]:
    modalities = {
        "video": {"delta_indices": [0], "modality_keys": ["image", "wrist_image"]},
        "state": {"delta_indices": [0], "modality_keys": PARTS},
        "action": {"delta_indices": list(range(9)), "modality_keys": PARTS},
        "language": {"delta_indices": [0], "modality_keys": ["annotation.human.action.task_description"]},
    }
    settings = {"modality_configs": {"libero_sim": modalities}, "use_percentiles": True, "use_relative_action": False}
    return {
        "processor_class": "Gr00tN1d7Processor",
        "processor_kwargs": settings | {"image_crop_size": [28, 28], "image_target_size": [32, 32]},
    }


def nvidia_statistics(statistics: Statistics) -> dict[str, Any]:
    """By part; the gripper of the actions in [0, 1], 1 open."""
    entries: dict[str, Any] = {}
    for modality, feature, places in (
        ("state", STATE, [[0], [1], [2], [3], [4], [5], [6, 7]]),
        ("action", ACTION, [[i] for i in range(7)]),
    ):
        values = statistics.to_dict()[feature]
        entries[modality] = {part: {key: [values[key][i] for i in where] for key in KEPT} for part, where in zip(PARTS, places)}
    entries["action"]["gripper"] = {"min": [0.0], "max": [1.0], "mean": [0.4], "std": [0.5], "q01": [0.0], "q99": [1.0]}
    return entries


@pytest.fixture
def folder(statistics: Statistics, tmp_path: Path) -> Path:
    """A small N1.7 in NVIDIA's layout."""
    policy = small_groot(statistics, write_tokenizer(tmp_path / "tokenizer"))
    write_nvidia(tmp_path / "nvidia", policy, nvidia_statistics(statistics))
    return tmp_path / "nvidia"


def check_weights_and_disk(imported: PolicyModule, original: PolicyModule, observations: list[Observation], folder: Path) -> None:
    """The imported weights are the original's, and a policy that goes to disk and back acts the same, bit for bit."""
    weights = imported.state_dict()
    assert weights.keys() == original.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.state_dict().items())
    save_policy(imported, folder)
    again = load_policy(folder)
    assert again.config == imported.config and again.processor.statistics == imported.processor.statistics
    batch = imported.preprocess(observations)
    actions = [made.act(batch, [1, 2]).actions_BCA for made in (imported, again)]
    assert torch.equal(*actions) and actions[0].abs().max() > 0


def test_an_nvidia_folder_goes_in_out_and_in_again(folder: Path, statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    original = small_groot(statistics, tmp_path / "tokenizer")
    imported = load_policy(folder)
    assert imported.config == CONFIG, "sizes from NVIDIA's files"
    assert (imported.spec.views, imported.spec.resolution, imported.spec.executed_horizon) == (VIEWS, 32, 8)
    check_weights_and_disk(imported, original, observe(2, 32), tmp_path / "ours")
    assert inspect_checkpoint(folder).problems == ()


def test_its_gripper_opens_where_the_envs_opens(folder: Path, statistics: Statistics) -> None:
    """NVIDIA: g = (n + 1) / 2 in [0, 1], 1 open; the env's action is 1 - 2 g. Every other part has the statistics of its own."""
    policy = load_policy(folder)
    sampled = torch.zeros(1, 10, 12)
    sampled[0, :3, 6] = torch.tensor([-1.0, 0.5, 1.0])
    np.testing.assert_allclose(policy.postprocess(sampled)[0, :3, 6], [1.0, -0.5, -1.0], atol=1e-6)
    beyond = sampled * 3.0
    np.testing.assert_array_equal(policy.postprocess(beyond)[0, :3, 6], [1.0, -1.0, -1.0])
    low, high = (np.array(statistics.to_dict()[ACTION][key])[:6] for key in ("q01", "q99"))
    np.testing.assert_allclose(policy.postprocess(sampled)[0, 0, :6], (low + high) / 2, atol=1e-6)
    recorded = np.zeros((1, 10, 7), np.float32)
    recorded[0, :, 6] = 1.0  # closed
    image = {view: np.zeros((32, 32, 3), np.uint8) for view in VIEWS}
    batch = policy.preprocess([Observation(image, np.zeros(8, np.float32), "pick up the milk")], recorded)
    assert batch.actions_BCA is not None and batch.actions_BCA[0, 0, 6].item() == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("config", {"model_type": "Gr00tN1d6"}, "knows libero_sim; vla-rl acts as 'libero_panda'"),
        ("config", {"model_name": "nvidia/another-backbone"}, "its sizes are known for Cosmos-Reason2-2B"),
        ("processor_config", {"processor_kwargs": {"modality_configs": {"gr1": {}}}}, "knows gr1; vla-rl acts as 'libero_sim'"),
        ("embodiment_id", {"libero_sim": None}, "has no number for 'libero_sim'; it has new_embodiment"),
        ("statistics", {"libero_sim": None}, "has no 'libero_sim'"),
        ("config", {"max_seq_len": None}, "do not say what .*there is no 'max_seq_len'"),
        ("processor_config", {"processor_kwargs": {"modality_configs": {"libero_sim": {}}}}, "there is no 'state'"),
    ],
)
def test_what_a_folder_lacks_is_named(folder: Path, name: str, change: dict[str, Any], said: str) -> None:
    path = folder / f"{name}.json"
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(CheckpointError, match=said):
        load_policy(folder)


def test_nvidias_flags_are_read_as_its_processor_reads_them(folder: Path) -> None:
    """Its LIBERO folders have `use_relative_action` without a relative part, and crop by `crop_fraction` (albumentations)."""
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    flags = {"use_relative_action": True, "use_albumentations": True, "crop_fraction": 0.95, "shortest_image_edge": 32}
    values["processor_kwargs"] |= flags
    path.write_text(json.dumps(values))
    assert load_policy(folder).config.crop == 0.95
    values["processor_kwargs"]["modality_configs"]["libero_sim"]["action"]["action_configs"] = [{"rep": "RELATIVE"}] * 7
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="actions are relative to the state"):
        load_policy(folder)


def test_weights_of_other_sizes_are_listed(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"does not fit a groot policy(.|\n)*wrong shape"):
        load_policy(folder)
    assert inspect_checkpoint(folder).problems
