"""Eagle 3 as a backbone: GR00T N1.6's, at any size. SigLIP 2 and Qwen3 are transformers', the connector between them is here.

Shape legend: B batch; V views; L prompt tokens, image tokens among them (this is P too); M width; G patches of a side;
K patches of a picture, K = G * G; H, W pixels.
Maths and parameter names as in Isaac-GR00T, `gr00t/model/modules/eagle_backbone.py` and `nvidia/Eagle-Block2A-2B-v2/`
(`modeling_eagle3_vl.py`, `modeling_siglip2.py`, whose config turns rotary positions and windows off).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3Model, Siglip2VisionConfig, Siglip2VisionModel

from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import EagleBackboneConfig, EagleVisionConfig
from vla_rl.policies.groot.features import Features
from vla_rl.policies.groot.qwen_text import text_config

_MAX_POSITIONS = 40_960
"""Longest sequence that the published rotary positions were made for; nothing is allocated for it."""


class EagleModel(nn.Module):
    """The published model's parts, under its names, without the vocabulary head that nothing reads."""

    def __init__(self, config: EagleBackboneConfig) -> None:
        super().__init__()
        joined = config.vision.width * config.vision.merge**2
        self.vision_model = Siglip2VisionModel(_vision_config(config.vision))
        self.mlp1 = nn.Sequential(nn.LayerNorm(joined), nn.Linear(joined, config.width), nn.GELU(), nn.Linear(config.width, config.width))
        self.language_model = nn.ModuleDict({"model": Qwen3Model(_language_config(config))})


class EagleBackbone(nn.Module):
    """Images where the prompt has image tokens; features are what leaves language layer `read_layer`, normed."""

    def __init__(self, config: EagleBackboneConfig, image_token_id: int) -> None:
        super().__init__()
        self.config, self.image_token_id = config, image_token_id
        self.model = EagleModel(config)
        with torch.device("cpu"):  # rotary frequencies are no weights: they must exist where weights are only promised (`meta`)
            language = self._language
            language.rotary_emb = type(language.rotary_emb)(language.config)

    def forward(self, batch: Batch) -> Features:
        """See `Backbone`. `batch.tokens_BL` holds the image token as often as each image has tokens."""
        image_mask_BL = batch.tokens_BL == self.image_token_id
        text_BLM = self._language.embed_tokens(batch.tokens_BL)
        images = self._image_tokens(batch.images_BVCHW.flatten(0, 1))
        output = self._language(
            inputs_embeds=text_BLM.masked_scatter(image_mask_BL[..., None], images.to(text_BLM.dtype)),
            attention_mask=batch.token_mask_BL,
            use_cache=False,
        )
        return Features(output.last_hidden_state, batch.token_mask_BL, image_mask_BL)

    def layers(self) -> list[nn.Module]:
        """See `Backbone`."""
        return [*self._vision.encoder.layers, *self._language.layers]

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """Those of SigLIP's attention pooling, which the published weights contain."""
        return self._vision.head.parameters()

    def _image_tokens(self, images: Tensor) -> Tensor:
        """float32[B V tokens, M]: pictures float32[B V, 3, H, W] in [-1, 1] as tokens of the language model, one after the other."""
        vision, merge = self._vision, self.config.vision.merge
        side = images.shape[-1] // self.config.vision.patch_size
        embedded = vision.embeddings.patch_embedding(patches(images, self.config.vision.patch_size)) + self._positions(side)
        seen = vision.post_layernorm(vision.encoder(inputs_embeds=embedded).last_hidden_state)
        grid = seen.transpose(1, 2).unflatten(2, (side, side))
        joined = F.pixel_unshuffle(grid, merge).flatten(2).transpose(1, 2)
        return self.model.mlp1(joined).flatten(0, 1)

    def _positions(self, side: int) -> Tensor:
        """[K, M]: the learned grid at the picture's number of patches; antialiasing needs float32 on a CPU."""
        weight = self._vision.embeddings.position_embedding.weight
        grid = weight.float().t().unflatten(1, (isqrt(len(weight)), -1))[None]
        resized = F.interpolate(grid, (side, side), mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).t().to(weight.dtype)

    @property
    def _vision(self) -> Any:
        return self.model.vision_model.vision_model

    @property
    def _language(self) -> Any:
        return cast(Any, self.model.language_model)["model"]


def patches(images: Tensor, size: int) -> Tensor:
    """float32[B V, 3, H, W] -> float32[B V, K, size * size * 3]: patches row by row, each as (row, column, channel)."""
    cells = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # picture, channel, patch row, row, patch column, column
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _vision_config(vision: EagleVisionConfig) -> Siglip2VisionConfig:
    return Siglip2VisionConfig.from_dict(
        {
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp_width,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.heads,
            "patch_size": vision.patch_size,
            "num_patches": vision.positions,
        }
    )


def _language_config(config: EagleBackboneConfig) -> Qwen3Config:
    return Qwen3Config.from_dict(
        {
            **text_config(config),
            "max_position_embeddings": _MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }
    )
