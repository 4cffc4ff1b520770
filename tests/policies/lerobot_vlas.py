"""Small SmolVLA and GR00T folders as LeRobot saves them, and the base models that they are built on, with everything on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.groot.configuration_groot import GrootConfig as LerobotGrootConfig
from lerobot.policies.groot.modeling_groot import GrootPolicy
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from published_folders import stats_tensors
from test_groot_policy import SPECIAL_TOKENS
from test_lerobot_policy import common, save
from test_published_groot import CONFIG, nvidia_statistics, processor_config
from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.smolvlm import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

from vla_rl.bench.lerobot_groot import lerobot_groot
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE

SMOLVLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
COSMOS = "nvidia/Cosmos-Reason2-2B"
GROOT_BASE = "nvidia/GR00T-N1.7-LIBERO"
CHUNK = 6
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
"""The part of Qwen3-VL's chat template that a user's turn with pictures goes through."""


def write_smolvla(folder: Path, statistics: Statistics, **fields: Any) -> Path:
    """A tiny SmolVLA as LeRobot's training saves it, with its base model inside the folder under the hub's name.

    `load_vlm_weights=True`, as in the published ones, builds it from the base model's weights, in bfloat16.
    """
    write_smolvlm(folder / SMOLVLM)
    config = SmolVLAConfig(
        vlm_model_name=str(folder / SMOLVLM),
        chunk_size=CHUNK,
        n_action_steps=4,
        resize_imgs_with_padding=(32, 32),
        num_vlm_layers=2,
        num_steps=3,
        max_state_dim=12,
        max_action_dim=10,
        **common(),
        **fields,
    )
    save(SmolVLAPolicy(config), statistics, folder)
    rename(folder, str(folder / SMOLVLM), SMOLVLM)
    return folder


def write_smolvlm(folder: Path) -> None:
    """Config, weights and processor of a tiny SmolVLM2."""
    tokens = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>", "image_token": "<image>"}
    tokenizer = fast_tokenizer(list(tokens.values()), extra_special_tokens=tokens | {"end_of_utterance_token": "<end_of_utterance>"})
    config = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 1100,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        pad_token_id=0,
    )
    SmolVLMForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)


def write_groot(folder: Path, statistics: Statistics, **fields: Any) -> Path:
    """A tiny GR00T N1.7 as LeRobot's training saves it, with NVIDIA's base and the backbone's processor inside the folder."""
    base = folder / GROOT_BASE
    base.mkdir(parents=True)
    image_token = write_qwen_processor(folder / COSMOS)
    theirs = lerobot_groot(CONFIG, image_token, folder.parent / "backbone", spread=0.15)
    theirs.config.model_name = str(folder.parent / "backbone")
    theirs.save_pretrained(base)
    sidecars = {"processor_config": processor_config(), "statistics": {"libero_sim": nvidia_statistics(statistics)}}
    for name, values in (sidecars | {"embodiment_id": {"libero_sim": 2}}).items():
        (base / f"{name}.json").write_text(json.dumps(values))
    config = LerobotGrootConfig(
        base_model_path=str(base),
        embodiment_tag="libero_sim",
        chunk_size=CONFIG.chunk_length,
        n_action_steps=CONFIG.chunk_length,
        max_state_dim=CONFIG.model_state_dim,
        max_action_dim=CONFIG.model_action_dim,
        use_bf16=False,
        **common(),
        **fields,
    )
    GrootPolicy(config).eval().save_pretrained(folder)
    for pipeline in make_pre_post_processors(config, dataset_stats=stats_tensors(statistics)):
        pipeline.save_pretrained(folder)
    rename(folder, str(base), GROOT_BASE)
    return folder


def write_qwen_processor(folder: Path) -> int:
    """Tokenizer, image and video processor of a Qwen3-VL whose pictures have 32 pixels; returns the number of its image token."""
    tokenizer = fast_tokenizer([*SPECIAL_TOKENS, "<|video_pad|>"])
    tokenizer.chat_template = QWEN_CHAT
    tokenizer.save_pretrained(folder)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}
    Qwen2VLImageProcessor(patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=pixels).save_pretrained(folder)
    Qwen3VLVideoProcessor(patch_size=16, merge_size=2).save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids("<|image_pad|>")


def fast_tokenizer(special: list[str], **more: Any) -> PreTrainedTokenizerFast:
    """The shipped tokenizer with more special tokens."""
    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER / TOKENIZER_FILE))
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **more)
    wrapped.pad_token = wrapped.convert_ids_to_tokens(0)
    return wrapped


def rename(folder: Path, name: str, new: str) -> None:
    """Config and preprocessor name a base model by another name."""
    for file in ("config.json", "policy_preprocessor.json"):
        path = folder / file
        path.write_text(path.read_text().replace(json.dumps(name), json.dumps(new)))
