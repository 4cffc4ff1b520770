"""The backbone of NVIDIA's N1.6 folder: `config.json` says `nvidia/Eagle-Block2A-2B-v2`, or a local folder with Eagle's own `config.json`.

Isaac-GR00T keeps Eagle's config, tokenizer and chat template beside its code (`gr00t/model/modules/nvidia/Eagle-Block2A-2B-v2`);
the last two belong into the checkpoint's `tokenizer/` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from vla_rl.policies.groot.config import EagleBackboneConfig, EagleVisionConfig
from vla_rl.policies.groot.policy import eagle_prompt
from vla_rl.policies.groot.qwen_text import own_sizes
from vla_rl.policies.lerobot_files import TOKENIZER_FOLDER
from vla_rl.policies.published import CONFIG_FILE, read_json
from vla_rl.policies.tensor_files import CheckpointError

EAGLE = "Eagle-Block2A-2B-v2"
"""The backbone of N1.6, whose sizes are `EagleBackboneConfig`'s defaults."""
CHAT_TEMPLATE_FILE = "chat_template.json"


def eagle_backbone(folder: Path, fields: Mapping[str, Any], pixels: int, views: int) -> EagleBackboneConfig:
    """Sizes of the backbone by its name, for pictures of `pixels` a side; the prompt's form from the folder.

    Raises CheckpointError for a name whose sizes nobody says, for another form than N1.6's, and for a missing or damaged chat template.
    """
    name, layer = str(fields["model_name"]), int(fields["select_layer"])
    if name.rpartition("/")[2] == EAGLE and not (Path(name) / CONFIG_FILE).is_file():
        sizes = EagleBackboneConfig(read_layer=layer)
    elif (Path(name) / CONFIG_FILE).is_file():
        sizes = _sizes(Path(name), layer)
    else:
        raise CheckpointError(f"{folder}: model_name is {name!r}; its sizes are known for {EAGLE} and for folders with a {CONFIG_FILE}")
    cell = sizes.vision.patch_size * sizes.vision.merge
    sizes = replace(sizes, vision=replace(sizes.vision, image_size=round(pixels / cell) * cell))
    return _with_template(folder / TOKENIZER_FOLDER / CHAT_TEMPLATE_FILE, sizes, views)


def _sizes(eagle: Path, read_layer: int) -> EagleBackboneConfig:
    published = read_json(eagle / CONFIG_FILE)
    text, vision = published["text_config"], published["vision_config"]
    for name, given, wanted in (
        ("select_layer", published["select_layer"], -1),
        ("vision_config.use_rope", vision["use_rope"], False),
        ("vision_config.use_windows_attn", vision["use_windows_attn"], False),
    ):
        if given != wanted:
            raise CheckpointError(f"{eagle / CONFIG_FILE}: {name} is {given}; vla-rl has the form of {EAGLE}, where it is {wanted}")
    merge = round(1 / published["downsample_ratio"])
    return EagleBackboneConfig(
        vision=EagleVisionConfig(
            image_size=vision["patch_size"] * merge,
            patch_size=vision["patch_size"],
            merge=merge,
            width=vision["hidden_size"],
            depth=vision["num_hidden_layers"],
            mlp_width=vision["intermediate_size"],
            heads=vision["num_attention_heads"],
            positions=vision["num_patches"],
        ),
        read_layer=read_layer,
        rope_theta=float(text["rope_theta"]),
        **own_sizes(text),
    )


def _with_template(path: Path, sizes: EagleBackboneConfig, views: int) -> EagleBackboneConfig:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; put it there from Isaac-GR00T's {EAGLE} folder, beside its tokenizer")
    backbone = replace(sizes, chat_template=str(read_json(path).get("chat_template", "")))
    try:
        shown = eagle_prompt("task", views, backbone).count(sizes.image_token)
    except TemplateError as error:
        raise CheckpointError(f"{path}: the template cannot be rendered ({error}); restore it from the {EAGLE} folder") from error
    if shown != views * sizes.vision.tokens:
        raise CheckpointError(f"{path}: its prompt has no place for each of {views} views; restore it from the {EAGLE} folder")
    return backbone
