"""pi0 and pi0.5 from published folders: LeRobot's, and openpi's PyTorch form. Sizes come from the tensors' shapes.

What shapes cannot say is fixed in both systems: 8 query heads in every Gemma variant, 16 heads in the vision tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from vla_rl.episode import VIEWS
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.lerobot_files import TOKENIZER_FOLDER, read_lerobot_folder
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config
from vla_rl.policies.pi0.published import own_name
from vla_rl.policies.processor import Normalization
from vla_rl.policies.published import CONFIG_FILE, NORM_STATS_FILE, norm_stats_files, read_json
from vla_rl.policies.remote.openpi import EXECUTED_HORIZON
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.policies.tensor_files import CheckpointError, TensorFiles
from vla_rl.policies.tokenizer import TOKENIZER_FILE

PI0_TYPES = ("pi0", "pi05")
"""LeRobot's names of the families that are ours."""
GEMMA_HEADS, SIGLIP_HEADS = 8, 16
OPENPI_EPSILON = 1e-6
"""openpi adds this to the standard deviation, and to the width between the quantiles (`transforms.Normalize`)."""
LIBERO_ASSET = "physical-intelligence/libero"
"""The asset of openpi's own LIBERO checkpoints, whose training configurations are known."""
OPENPI_RESOLUTION = 256
"""openpi's LIBERO data and its client render at 256 pixels."""
Shapes = Mapping[str, Sequence[int]]


def lerobot_pi0(folder: Path) -> PolicyModule:
    """The pi0 or pi0.5 of a LeRobot folder, without its weights. Raises CheckpointError naming what is missing or not supported."""
    lerobot = read_lerobot_folder(folder)
    fields = lerobot.config
    for name in ("use_relative_actions", "use_peft"):
        if fields.get(name):
            raise CheckpointError(f"{folder}: {name} is set, which vla-rl's pi0 does not do; merge or convert it with LeRobot first")
    sizes = pi0_sizes(_own_shapes(folder))
    if sizes.family != fields["type"]:
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} says {fields['type']!r}, the weights are {sizes.family!r}'s; restore the right file"
        )
    config = replace(
        sizes,
        chunk_length=lerobot.chunk_length,
        executed_horizon=lerobot.executed_horizon,
        denoise_steps=int(fields.get("num_inference_steps", sizes.denoise_steps)),
        prompt_tokens=int(fields.get("tokenizer_max_length", sizes.prompt_tokens)),
        normalization=lerobot.normalization,
        time_min_period=float(fields.get("min_period", sizes.time_min_period)),
        time_max_period=float(fields.get("max_period", sizes.time_max_period)),
    )
    return _make(config, lerobot.statistics, lerobot.views, lerobot.resolution, folder)


def openpi_pi0(folder: Path) -> PolicyModule:
    """The pi0 or pi0.5 of openpi's PyTorch folder, without its weights (`examples/convert_jax_model_to_pytorch.py` writes it).

    Raises CheckpointError naming what is missing or not supported.
    """
    fields = read_json(folder / CONFIG_FILE)
    if "action_horizon" not in fields:
        raise CheckpointError(f"{folder / CONFIG_FILE} lacks action_horizon, which openpi's converter writes; the weights do not say it")
    sizes = pi0_sizes(_own_shapes(folder))
    asset, statistics = _openpi_statistics(folder, sizes.family)
    if asset == LIBERO_ASSET and sizes.family == "pi0":
        raise CheckpointError(
            f"{folder} is openpi's pi0_libero, whose actions are relative to the state (extra_delta_transform); vla-rl does not undo that. "
            "Serve it with openpi and evaluate it with policy.remote"
        )
    horizon = int(fields["action_horizon"])
    config = replace(
        sizes,
        chunk_length=horizon,
        executed_horizon=min(EXECUTED_HORIZON, horizon),
        state_in_prompt=asset != LIBERO_ASSET,  # openpi's pi05_libero has discrete_state_input=False
    )
    return _make(config, statistics, VIEWS, OPENPI_RESOLUTION, folder)


def pi0_sizes(shapes: Shapes) -> Pi0Config:
    """The sizes of a network from the shapes of its tensors under our names; everything else as published.

    Raises CheckpointError naming a tensor that every pi0 has and this one lacks.
    """
    family: Literal["pi0", "pi05"] = "pi05" if "model.time_mlp_in.weight" in shapes else "pi0"
    published = PI0_PRESETS["pi05_base" if family == "pi05" else "pi0_base"]
    width, action_dim = _shape(shapes, "model.action_in_proj.weight")
    state_dim = _shape(shapes, "model.state_proj.weight")[1] if family == "pi0" else published.model_state_dim
    assert width == _shape(shapes, "model.expert.layers.0.self_attn.q_proj.weight")[1]
    return replace(
        published,
        vision=_vision(shapes),
        language=_transformer(shapes, "model.language."),
        expert=_transformer(shapes, "model.expert."),
        vocabulary=_shape(shapes, "model.language.embed_tokens.weight")[0],
        model_state_dim=state_dim,
        model_action_dim=action_dim,
        carry_output_head="model.expert.lm_head.weight" in shapes,
    )


def _make(config: Pi0Config, statistics: Statistics, views: tuple[str, ...], resolution: int, folder: Path) -> PolicyModule:
    tokenizer = folder / TOKENIZER_FOLDER
    if not (tokenizer / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no {TOKENIZER_FOLDER}/{TOKENIZER_FILE}; put the tokenizer that it was trained with there "
            "(for openpi's and LeRobot's pi0 and pi0.5: that of google/paligemma-3b-pt-224)"
        )
    with torch.device("meta"):
        return make_policy(config, statistics, policy_spec(config, resolution, views=views), tokenizer_folder=str(tokenizer))


def _own_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of a folder's tensors under our names."""
    files = TensorFiles.open(folder)
    return {own: files.shapes[name] for name in files.infos if (own := own_name(name, files.names)) is not None}


def _vision(shapes: Shapes) -> VisionConfig:
    width, _, patch, _ = _shape(shapes, "model.vision.embeddings.patch_embedding.weight")
    cells = _shape(shapes, "model.vision.embeddings.position_embedding.weight")[0]
    side = math.isqrt(cells)
    if side * side != cells:
        raise CheckpointError(f"the vision tower has {cells} positions, which are no square of patches")
    depth, mlp_width = _depth(shapes, "model.vision.layers."), _shape(shapes, "model.vision.layers.0.mlp.fc1.weight")[0]
    sizes: dict[str, Any] = {"image_size": side * patch, "patch_size": patch, "width": width, "depth": depth, "mlp_width": mlp_width}
    return VisionConfig(stem="patch", conv_channels=(), heads=SIGLIP_HEADS, **sizes)


def _transformer(shapes: Shapes, prefix: str) -> TransformerConfig:
    queries, width = _shape(shapes, f"{prefix}layers.0.self_attn.q_proj.weight")
    keys, _ = _shape(shapes, f"{prefix}layers.0.self_attn.k_proj.weight")
    head_width = queries // GEMMA_HEADS
    return TransformerConfig(
        width=width,
        depth=_depth(shapes, f"{prefix}layers."),
        mlp_width=_shape(shapes, f"{prefix}layers.0.mlp.gate_proj.weight")[0],
        heads=GEMMA_HEADS,
        kv_heads=keys // head_width,
        head_width=head_width,
    )


def _depth(shapes: Shapes, prefix: str) -> int:
    """Number of layers below `prefix`."""
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in shapes if name.startswith(prefix))


def _shape(shapes: Shapes, name: str) -> list[int]:
    if name not in shapes:
        raise CheckpointError(f"the weights have no {name.removeprefix('model.')}: they are not those of a pi0 or pi0.5")
    return list(shapes[name])


def _openpi_statistics(folder: Path, family: str) -> tuple[str, Statistics]:
    """The only asset below `assets`, and its statistics with openpi's epsilon in them."""
    found = norm_stats_files(folder)
    if len(found) != 1:
        names = ", ".join(str(path.parent.relative_to(folder / "assets")) for path in found) or "none"
        raise CheckpointError(f"{folder} must hold one assets/ASSET_ID/{NORM_STATS_FILE}, it has {names}; keep the one it was trained with")
    entries = read_json(found[0]).get("norm_stats", {})
    missing = [name for name in ("state", "actions") if name not in entries]
    if missing:
        raise CheckpointError(f"{found[0]} lacks norm_stats.{' and norm_stats.'.join(missing)}")
    normalization = Normalization.QUANTILES if family == "pi05" else Normalization.MEAN_STD
    features = {STATE: entries["state"], ACTION: entries["actions"]}
    asset = str(found[0].parent.relative_to(folder / "assets"))
    return asset, Statistics({name: _with_epsilon(name, values, normalization) for name, values in features.items()})


def _with_epsilon(feature: str, values: Mapping[str, Any], normalization: Normalization) -> FeatureStats:
    """openpi divides by std + 1e-6 and by q99 - q01 + 1e-6: the same maps as ours with that much more spread."""
    grown = "std" if normalization is Normalization.MEAN_STD else "q99"
    required = ("mean", "std") if normalization is Normalization.MEAN_STD else ("mean", "std", "q01", "q99")
    stats = FeatureStats.from_dict(feature, {name: value for name, value in values.items() if value is not None}, required)
    return replace(stats, **{grown: tuple((stats.vector(grown) + OPENPI_EPSILON).tolist())})
