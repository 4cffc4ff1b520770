"""LeRobot's own pi0 and pi0.5 at small sizes with our weights: the peer of `vla-rl bench policy`.

LeRobot fixes its sizes in the code, so its size table and the two constructors that hard-code sizes are replaced while it builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from torch import Tensor

from vla_rl.episode import ACTION_DIM, STATE_DIM
from vla_rl.policies.base import Batch
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.processor import IMAGES
from vla_rl.policies.statistics import ACTION, STATE

TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"
"""LeRobot's keys of the tokenized prompt."""


def lerobot_policy(ours: PolicyModule) -> Any:
    """LeRobot's `PI0Policy` or `PI05Policy` with the sizes and weights of our policy, in evaluation mode."""
    config: Pi0Config = ours.config
    pi05 = config.family == "pi05"
    module: Any = modeling_pi05 if pi05 else modeling_pi0
    size = (config.vision.image_size, config.vision.image_size)
    pictures = {IMAGES + view: PolicyFeature(FeatureType.VISUAL, (3, *size)) for view in ours.spec.views}
    fields = (PI05Config if pi05 else PI0Config)(
        device="cpu",
        dtype="float32",
        chunk_size=config.chunk_length,
        n_action_steps=config.executed_horizon,
        max_state_dim=config.model_state_dim,
        max_action_dim=config.model_action_dim,
        num_inference_steps=config.denoise_steps,
        min_period=config.time_min_period,
        image_resolution=size,
        input_features=pictures | {STATE: PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
    )
    with lerobot_sizes(module, config):
        policy = (module.PI05Policy if pi05 else module.PI0Policy)(fields).eval()
    policy.load_state_dict(ours.published_weights(ours.state_dict()), strict=True)
    return policy


def lerobot_batch(batch: Batch, views: tuple[str, ...]) -> dict[str, Tensor]:
    """Our batch under LeRobot's keys; pictures back in [0, 1], as its policies take them."""
    pictures = {IMAGES + view: batch.images_BVCHW[:, index] / 2.0 + 0.5 for index, view in enumerate(views)}
    return pictures | {STATE: batch.state_BS[:, :STATE_DIM], TOKENS: batch.tokens_BL, TOKEN_MASK: batch.token_mask_BL}


def lerobot_chunk(policy: Any, batch: dict[str, Tensor], noise_BCA: Tensor) -> Tensor:
    """LeRobot's own `predict_action_chunk`, float32[B, C, 7], from the noise given."""
    with torch.no_grad():
        return policy.predict_action_chunk(dict(batch), noise=noise_BCA.clone())


@contextmanager
def lerobot_sizes(module: Any, config: Pi0Config) -> Iterator[None]:
    """Inside, LeRobot's `modeling_pi0` or `modeling_pi05` builds models of our sizes in place of those that it hard-codes."""
    sizes = {"gemma_2b": config.language, "gemma_300m": config.expert}
    paligemma, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def gemma(variant: str) -> Any:
        size = sizes[variant]
        return module.GemmaConfig(size.width, size.depth, size.mlp_width, size.heads, size.kv_heads, size.head_width)

    def small_paligemma(config: Any, ours: Pi0Config = config) -> Any:
        vision, tower = config.vision_config, ours.vision
        vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads = tower.width, tower.depth, tower.heads
        vision.intermediate_size, vision.patch_size, vision.projection_dim = tower.mlp_width, tower.patch_size, ours.language.width
        config.text_config.vocab_size = ours.vocabulary
        return paligemma(config=config)

    def small_expert(config: Any, vocabulary: int = config.vocabulary) -> Any:
        config.vocab_size = vocabulary
        return expert(config=config)

    patched = {
        "get_gemma_config": gemma,
        "PaliGemmaForConditionalGenerationWithPiGemma": small_paligemma,
        "PiGemmaForCausalLM": small_expert,
    }
    with mock.patch.multiple(module, **patched):
        yield
