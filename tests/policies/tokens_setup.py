"""Very small token policies of every form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vla_rl.policies.base import PolicySpec
from vla_rl.policies.blocks.config import VisionConfig
from vla_rl.policies.factory import policy_spec
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, PromptTokenizer
from vla_rl.policies.tokens.config import ActionTokensConfig, LanguageConfig, TokenConfig
from vla_rl.policies.tokens.policy import TokenPolicy, build_tokens

RESOLUTION = 32
SMALL = TokenConfig(
    chunk_length=3,
    executed_horizon=3,
    action_tokens=ActionTokensConfig(bins=16),
    vision=VisionConfig(image_size=RESOLUTION, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2, summary_tokens=1),
    language=LanguageConfig(width=32, depth=2, mlp_width=64, heads=2, kv_heads=1, head_width=16),
    prompt_tokens=16,
    shift_pixels=2,
)
PARALLEL = SMALL
AUTOREGRESSIVE = replace(SMALL, decoding="autoregressive", prefix_attention="causal")
REASONING = replace(SMALL, reasoning_tokens=7)
REASONING_CAUSAL = replace(AUTOREGRESSIVE, reasoning_tokens=7, language=replace(SMALL.language, architecture="qwen3"))
FORMS = {
    "parallel": PARALLEL,
    "autoregressive": AUTOREGRESSIVE,
    "reasoning": replace(REASONING, language=replace(SMALL.language, architecture="gemma")),
    "reasoning_autoregressive": REASONING_CAUSAL,
    "skipped": replace(REASONING, skip_reasoning=True),
}


def make_tokens(config: TokenConfig, statistics: Statistics, seed: int = 0, tokenizer: str = "", **spec: Any) -> TokenPolicy:
    """A policy in evaluation mode whose tokens depend on everything (a fresh head is nearly uniform)."""
    torch.manual_seed(seed)
    made: PolicySpec = policy_spec(config, RESOLUTION, **spec)
    policy = build_tokens(config, statistics, made, PromptTokenizer(tokenizer or SHIPPED_TOKENIZER, config.prompt_tokens))
    torch.nn.init.normal_(policy.model.language.get_submodule("lm_head").weight, std=0.5)
    return policy.eval()
