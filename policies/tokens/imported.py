"""OpenVLA-OFT with discrete actions, from its folder: `config.json`, sharded weights, `dataset_statistics.json`, the tokenizer's files.

The folder does not say how many pictures the policy saw, nor how many actions a chunk has: those are LIBERO's of the published discrete
policies (SimpleVLA-RL's starting points): one picture, no state, eight actions, all executed. The regressing form has a head in a file of
its own (`action_head--*.pt`), and is another kind of policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.episode import ACTION_DIM, VIEWS
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.processor import Normalization
from vla_rl.policies.published import CONFIG_FILE, OPENVLA_STATISTICS, read_json
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.policies.tensor_files import CheckpointError, TensorFiles
from vla_rl.policies.tokenizer import TOKENIZER_FILE, PromptTokenizer
from vla_rl.policies.tokens.config import ActionTokensConfig, LanguageConfig, PrismaticConfig, TokenConfig, VitConfig

VISION = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
"""timm's names of the two vision transformers, in order, and their attention heads, which no shape shows."""
CHUNK_LENGTH = 8
"""Actions of a chunk in OpenVLA-OFT's LIBERO constants (`prismatic/vla/constants.py`); all are executed."""
RESOLUTION = 256
"""Pixels at which OpenVLA-OFT renders LIBERO."""
PROMPT_TOKENS = 64
"""Room for the longest of LIBERO's instructions and the question around it."""
GRIPPER = ACTION_DIM - 1
_STATISTICS = ("min", "max", "mean", "std", "q01", "q99")
_FEATURIZER, _FUSED = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."


def openvla_oft(folder: Path) -> PolicyModule:
    """The policy of an OpenVLA-OFT folder, without its weights. Raises CheckpointError naming what is missing or not supported."""
    fields = read_json(folder / CONFIG_FILE)
    _require_discrete(folder)
    shapes = {name: info.shape for name, info in TensorFiles.open(folder).infos.items()}
    config = TokenConfig(
        chunk_length=CHUNK_LENGTH,
        executed_horizon=CHUNK_LENGTH,
        action_tokens=ActionTokensConfig(kind="openvla", bins=int(fields.get("n_action_bins", 256))),
        prismatic=_prismatic(folder, fields, shapes),
        language=_language(folder, fields),
        vocabulary=int(fields["text_config"]["vocab_size"]),
        prompt_tokens=PROMPT_TOKENS,
        normalization=Normalization.QUANTILES,
        pad_images=fields.get("image_resize_strategy") == "letterbox",
        shift_pixels=0,
    )
    _require_tokenizer(folder)
    spec = policy_spec(config, RESOLUTION, views=VIEWS[:1])
    with torch.device("meta"):
        return make_policy(config, _statistics(folder), spec, tokenizer_folder=str(folder))


def _require_discrete(folder: Path) -> None:
    """Raises CheckpointError for a folder whose policy regresses actions, sees the state, or is conditioned in its vision."""
    others = {
        "action_head": "regresses its actions",
        "noisy_action_projector": "denoises its actions",
        "proprio_projector": "sees the state",
        "vision_backbone": "conditions its vision on the prompt (FiLM)",
    }
    for name, does in others.items():
        if found := sorted(folder.glob(f"{name}--*.pt")):
            raise CheckpointError(
                f"{folder} holds {found[0].name}: that OpenVLA-OFT {does}; vla-rl has the discrete form, which writes tokens from one "
                "picture alone. Serve it where its code runs, and evaluate it with policy.remote"
            )


def _prismatic(folder: Path, fields: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> PrismaticConfig:
    given = list(fields.get("timm_model_ids", []))
    if given != list(VISION):
        raise CheckpointError(f"{folder}: timm_model_ids is {given}; vla-rl has OpenVLA's, which is {list(VISION)}")
    sizes = set(fields.get("image_sizes", []))
    if len(sizes) != 1:
        raise CheckpointError(f"{folder}: image_sizes is {fields.get('image_sizes')}; both transformers must see pictures of one size")
    dino, siglip = (_vit(folder, shapes, prefix, heads) for prefix, heads in zip((_FEATURIZER, _FUSED), VISION.values()))
    return PrismaticConfig(
        image_size=int(sizes.pop()),
        patch_size=int(shapes[f"{_FEATURIZER}patch_embed.proj.weight"][-1]),
        dino=dino,
        registers=int(_shape(folder, shapes, f"{_FEATURIZER}reg_token")[1]),
        siglip=siglip,
        spare_rows=int(fields.get("pad_to_multiple_of", 64)),
    )


def _vit(folder: Path, shapes: Mapping[str, Sequence[int]], prefix: str, heads: int) -> VitConfig:
    layers = {int(name.removeprefix(f"{prefix}blocks.").split(".")[0]) for name in shapes if name.startswith(f"{prefix}blocks.")}
    width = _shape(folder, shapes, f"{prefix}patch_embed.proj.weight")[0]
    mlp_width = _shape(folder, shapes, f"{prefix}blocks.0.mlp.fc1.weight")[0]
    return VitConfig(width=int(width), depth=len(layers), mlp_width=int(mlp_width), heads=heads)


def _shape(folder: Path, shapes: Mapping[str, Sequence[int]], name: str) -> Sequence[int]:
    if name not in shapes:
        raise CheckpointError(f"{folder} lacks {name}; its weights are not those of an OpenVLA, or shards are missing")
    return shapes[name]


def _language(folder: Path, fields: Mapping[str, Any]) -> LanguageConfig:
    """The published config names what differs from Llama's defaults."""
    from transformers import LlamaConfig

    given = dict(fields.get("text_config") or {})
    if given.pop("model_type", "llama") != "llama" or "vocab_size" not in given:
        raise CheckpointError(f"{folder}: text_config is {fields.get('text_config')}; it must be a Llama's, with its vocab_size")
    llama = LlamaConfig(**given)
    rope: dict[str, Any] = dict(llama.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{folder}: text_config has rope_type {rope['rope_type']!r}; OpenVLA's Llama 2 has plain rotary positions")
    return LanguageConfig(
        architecture="llama",
        width=llama.hidden_size,
        depth=llama.num_hidden_layers,
        mlp_width=llama.intermediate_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads or llama.num_attention_heads,
        head_width=llama.head_dim or llama.hidden_size // llama.num_attention_heads,
        rotary_base=float(rope.get("rope_theta", 10_000.0)),
        norm_eps=float(llama.rms_norm_eps),
    )


def _require_tokenizer(folder: Path) -> None:
    """Raises CheckpointError where `tokenizer.json` is absent, or begins prompts without Llama's start token."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"{folder} holds no {TOKENIZER_FILE}; fetch the whole folder, or put that of Llama 2 there")
    if not PromptTokenizer(folder, PROMPT_TOKENS).tokenizer.encode("").ids:
        raise CheckpointError(
            f"{folder / TOKENIZER_FILE} begins prompts without a start token, after which OpenVLA has its pictures; "
            "take the file that was saved with the weights"
        )


def _statistics(folder: Path) -> Statistics:
    """Of the one dataset that was fine-tuned on. Dimensions that its mask leaves alone are neither scaled nor moved, and the gripper, which
    is 1 when open, is turned around."""
    entries = read_json(folder / OPENVLA_STATISTICS)
    if len(entries) != 1:
        raise CheckpointError(
            f"{folder / OPENVLA_STATISTICS} has {', '.join(entries) or 'no dataset'}; it must have one: keep that of LIBERO"
        )
    ((name, entry),) = entries.items()
    features = {STATE: _feature(folder, name, entry, "proprio"), ACTION: _feature(folder, name, entry, "action")}
    action = features[ACTION]
    if len(action["q01"]) == ACTION_DIM:
        kept = np.asarray(entry["action"].get("mask", [True] * ACTION_DIM), bool)
        action["q01"], action["q99"] = np.where(kept, action["q01"], -1.0), np.where(kept, action["q99"], 1.0)
        for key, values in action.items():
            values[GRIPPER] = 2.0 * values[GRIPPER] if key == "std" else 1.0 - 2.0 * values[GRIPPER]
    return Statistics({feature: FeatureStats.from_dict(feature, values, _STATISTICS) for feature, values in features.items()})


def _feature(folder: Path, dataset: str, entry: Mapping[str, Any], modality: str) -> dict[str, np.ndarray]:
    missing = [name for name in _STATISTICS if name not in entry.get(modality, {})]
    if missing:
        raise CheckpointError(f"{folder / OPENVLA_STATISTICS}: {modality} of {dataset} lacks {', '.join(missing)}; fetch the file again")
    return {name: np.array(entry[modality][name], np.float64) for name in _STATISTICS}
