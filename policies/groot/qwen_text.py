"""Sizes of a Qwen3 language model: our names and those of transformers' `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_rl.policies.groot.config import EagleBackboneConfig, QwenBackboneConfig

_PUBLISHED = {
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "vocabulary": "vocab_size",
}


def text_config(config: QwenBackboneConfig | EagleBackboneConfig) -> dict[str, Any]:
    """transformers' fields, without the rotary ones; layers above the one that is read do not exist."""
    return {name: getattr(config, own) for own, name in _PUBLISHED.items()} | {"num_hidden_layers": config.read_layer}


def own_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields out of a published `text_config`."""
    return {own: text[name] for own, name in _PUBLISHED.items()}
