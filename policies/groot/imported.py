"""GR00T N1.7 and N1.6 from NVIDIA's folder: config, sharded weights, processor, statistics by part, numbers of embodiments.

NVIDIA's LIBERO policies know the embodiment `libero_sim` (N1.6: `libero_panda`): single parts (x, y, z, roll, pitch, yaw, gripper) with
statistics of their own, and a gripper that is 1 when open. The backbone's sizes are not in the folder: `model_name` names them, as
Cosmos-Reason2-2B or as a local folder with Qwen3-VL's `config.json` (N1.6: see `eagle_files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.groot.config import (
    ActionHeadConfig,
    AttentionStackConfig,
    EagleBackboneConfig,
    GrootConfig,
    QwenBackboneConfig,
    QwenVisionConfig,
)
from vla_rl.policies.groot.eagle_files import eagle_backbone
from vla_rl.policies.groot.qwen_text import own_sizes
from vla_rl.policies.lerobot_files import TOKENIZER_FOLDER
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.processor import Normalization
from vla_rl.policies.published import CONFIG_FILE, read_json, relative_parts
from vla_rl.policies.remote.groot import ACTION_PARTS, STATE_PARTS, VIDEO_KEYS
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.policies.tensor_files import CheckpointError
from vla_rl.policies.tokenizer import TOKENIZER_FILE

N1_7, N1_6 = "Gr00tN1d7", "Gr00tN1d6"
"""`model_type` of the two versions."""
EMBODIMENTS = {N1_7: "libero_sim", N1_6: "libero_panda"}
"""NVIDIA's tag of LIBERO's simulated Panda."""
KNOWN_NUMBERS = {N1_7: {}, N1_6: {"libero_panda": 2}}
"""Numbers of embodiments that a processor adds to `embodiment_id.json` (`processing_gr00t_n1d6.py`)."""
COSMOS = "Cosmos-Reason2-2B"
"""The backbone of N1.7, whose sizes are `QwenBackboneConfig`'s defaults."""
EXECUTED_HORIZON = 8
"""Actions that NVIDIA's LIBERO evaluation executes before it looks again."""
GRIPPER = ACTION_PARTS.index("gripper")
_MARKS = {"qwen3_vl": 2, "eagle3": 10}
"""Tokens around each picture in the prompt: two marks, and in Eagle's also `<image 1>`, in whatever pieces a tokenizer cuts it."""
_TEXT = {"qwen3_vl": 64, "eagle3": 88}
"""Room for the chat's frame and sixty tokens of instruction (LIBERO's longest has fewer)."""
_STATISTICS = ("min", "max", "mean", "std", "q01", "q99")


def nvidia_groot(folder: Path) -> PolicyModule:
    """The GR00T of NVIDIA's folder, without its weights. Raises CheckpointError naming what is missing or not supported."""
    fields = read_json(folder / CONFIG_FILE)
    embodiment = EMBODIMENTS[fields["model_type"]]
    settings = read_json(folder / "processor_config.json").get("processor_kwargs", {})
    modalities = _modalities(folder, settings, embodiment)
    backbone = _backbone(folder, fields, settings, len(modalities["video"]["modality_keys"]))
    config = GrootConfig(
        chunk_length=int(fields["action_horizon"]),
        executed_horizon=min(EXECUTED_HORIZON, len(modalities["action"]["delta_indices"])),
        denoise_steps=int(fields.get("num_inference_timesteps", 4)),
        backbone=backbone,
        head=_head(folder, fields, embodiment),
        prompt_tokens=len(modalities["video"]["modality_keys"]) * (backbone.vision.tokens + _MARKS[backbone.kind]) + _TEXT[backbone.kind],
        model_state_dim=int(fields["max_state_dim"]),
        model_action_dim=int(fields["max_action_dim"]),
        normalization=Normalization.QUANTILES if settings.get("use_percentiles", False) else Normalization.MIN_MAX,
        clip_outliers=bool(settings.get("clip_outliers", True)),
        crop=_crop(settings),
        shift_pixels=0,
        state_dropout=float(fields.get("state_dropout_prob", 0.0)),
    )
    spec = policy_spec(config, _pixels(settings), views=_views(folder, modalities))
    tokenizer = folder / TOKENIZER_FOLDER
    with torch.device("meta"):
        return make_policy(config, _statistics(folder, embodiment), spec, tokenizer_folder=str(tokenizer))


def _modalities(folder: Path, settings: Mapping[str, Any], embodiment: str) -> dict[str, Any]:
    """What LIBERO's embodiment sees and does.

    Raises CheckpointError for a folder without it, and for states and actions that are not normalised by their range or quantiles.
    """
    known = settings.get("modality_configs", {})
    if embodiment not in known:
        raise CheckpointError(
            f"{folder} knows {', '.join(known) or 'no embodiment'}; vla-rl acts as {embodiment!r}, so fine-tune it for LIBERO first"
        )
    modalities = known[embodiment]
    for name, parts in (("state", tuple(STATE_PARTS)), ("action", ACTION_PARTS)):
        if tuple(modalities[name]["modality_keys"]) != parts:
            raise CheckpointError(f"{folder}: the {name} of {embodiment} is {modalities[name]['modality_keys']}, it must be {list(parts)}")
        if modalities[name].get("mean_std_embedding_keys"):
            raise CheckpointError(f"{folder}: mean_std_embedding_keys of {name} is set, which vla-rl does not do; use policy.remote")
    if settings.get("use_relative_action") and relative_parts(modalities["action"]):
        raise CheckpointError(f"{folder}: actions are relative to the state, which vla-rl does not undo; serve it and use policy.remote")
    if settings.get("apply_sincos_state_encoding") and modalities["state"].get("sin_cos_embedding_keys"):
        raise CheckpointError(f"{folder}: the state is encoded as sines and cosines, which vla-rl does not do; use policy.remote")
    return modalities


def _views(folder: Path, modalities: Mapping[str, Any]) -> tuple[str, ...]:
    names = {name: view for view, name in VIDEO_KEYS.items()}
    keys = modalities["video"]["modality_keys"]
    if any(key not in names for key in keys):
        raise CheckpointError(f"{folder} looks at {', '.join(keys)}; LIBERO has {', '.join(names)}")
    return tuple(names[key] for key in keys)


def _head(folder: Path, fields: Mapping[str, Any], embodiment: str) -> ActionHeadConfig:
    embodiments = KNOWN_NUMBERS[fields["model_type"]] | read_json(folder / "embodiment_id.json")
    if embodiment not in embodiments:
        raise CheckpointError(f"{folder / 'embodiment_id.json'} has no number for {embodiment!r}; it has {', '.join(embodiments)}")
    return ActionHeadConfig(
        vl_attention=_stack(fields.get("vl_self_attention_cfg") or {"num_layers": 0, "num_attention_heads": 32, "attention_head_dim": 64}),
        dit=_stack(fields["diffusion_model_cfg"]),
        text_every=int(fields.get("attend_text_every_n_blocks", 2)) if fields.get("use_alternate_vl_dit", True) else 0,
        hidden_width=int(fields["hidden_size"]),
        embodiments=int(fields["max_num_embodiments"]),
        embodiment=int(embodiments[embodiment]),
        positions=int(fields["max_seq_len"]),
        time_buckets=int(fields["num_timestep_buckets"]),
        mask_token=fields["model_type"] == N1_6 and fields.get("state_dropout_prob", 0.0) > 0.0,
    )


def _stack(fields: Mapping[str, Any]) -> AttentionStackConfig:
    return AttentionStackConfig(int(fields["num_layers"]), int(fields["num_attention_heads"]), int(fields["attention_head_dim"]))


def _backbone(folder: Path, fields: Mapping[str, Any], settings: Mapping[str, Any], views: int) -> QwenBackboneConfig | EagleBackboneConfig:
    """Sizes of the backbone by its name. Raises CheckpointError for a name whose sizes nobody says, and for a missing tokenizer."""
    if not (folder / TOKENIZER_FOLDER / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no {TOKENIZER_FOLDER}/{TOKENIZER_FILE}; put that of its backbone ({fields['model_name']}) there"
        )
    return eagle_backbone(folder, fields, _pixels(settings), views) if fields["model_type"] == N1_6 else _qwen(folder, fields)


def _qwen(folder: Path, fields: Mapping[str, Any]) -> QwenBackboneConfig:
    name, layer = str(fields["model_name"]), int(fields["select_layer"])
    if name.rpartition("/")[2] == COSMOS:
        return QwenBackboneConfig(read_layer=layer)
    if not (Path(name) / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder}: model_name is {name!r}; its sizes are known for {COSMOS} and for folders with a {CONFIG_FILE}")
    published = read_json(Path(name) / CONFIG_FILE)
    text, vision = published["text_config"], published["vision_config"]
    rope = text.get("rope_parameters") or text["rope_scaling"]
    pixels = int(fields["image_target_size"][0])
    return QwenBackboneConfig(
        vision=QwenVisionConfig(
            image_size=pixels,
            patch_size=vision["patch_size"],
            merge=vision["spatial_merge_size"],
            width=vision["hidden_size"],
            depth=vision["depth"],
            mlp_width=vision["intermediate_size"],
            heads=vision["num_heads"],
            positions=vision["num_position_embeddings"],
            deepstack=tuple(vision["deepstack_visual_indexes"]),
        ),
        read_layer=layer,
        rope_theta=float(rope["rope_theta"]),
        rope_sections=_three(rope["mrope_section"]),
        **own_sizes(text),
    )


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    first, second, third = values
    return first, second, third


def _crop(settings: Mapping[str, Any]) -> float:
    """Share of a side that is kept: `crop_fraction` where NVIDIA's processor reads it, else the ratio of two sizes."""
    fraction, crop, target = (settings.get(name) for name in ("crop_fraction", "image_crop_size", "image_target_size"))
    if fraction is not None and settings.get("use_albumentations"):
        return float(fraction)
    return 1.0 if not crop or not target else crop[0] / target[0]


def _pixels(settings: Mapping[str, Any]) -> int:
    edge = settings.get("shortest_image_edge") if settings.get("use_albumentations") else None
    return int(edge or (settings.get("image_target_size") or (256, 256))[0])


def _statistics(folder: Path, embodiment: str) -> Statistics:
    """State and actions from their parts; the gripper as the env has it, so that its low end lies above its high one."""
    entries = read_json(folder / "statistics.json").get(embodiment)
    if entries is None:
        raise CheckpointError(f"{folder / 'statistics.json'} has no {embodiment!r}; restore the file that was saved with the weights")
    actions = _joined(folder, entries, "action", ACTION_PARTS)
    flipped = {name: 1.0 - 2.0 * values[GRIPPER] for name, values in actions.items() if name != "std"}
    for name, values in actions.items():
        values[GRIPPER] = 2.0 * values[GRIPPER] if name == "std" else flipped[name]
    state = _joined(folder, entries, "state", tuple(STATE_PARTS))
    return Statistics(
        {STATE: FeatureStats.from_dict(STATE, state, _STATISTICS), ACTION: FeatureStats.from_dict(ACTION, actions, _STATISTICS)}
    )


def _joined(folder: Path, entries: Mapping[str, Any], modality: str, parts: Sequence[str]) -> dict[str, np.ndarray]:
    missing = [part for part in parts if part not in entries.get(modality, {})]
    if missing:
        raise CheckpointError(f"{folder / 'statistics.json'} lacks {modality} {', '.join(missing)} of LIBERO's embodiment")
    rows = [entries[modality][part] for part in parts]
    return {name: np.concatenate([np.asarray(row[name], np.float64).reshape(-1) for row in rows]) for name in _STATISTICS}
