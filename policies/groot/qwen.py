"""Qwen3-VL as a backbone, through transformers: GR00T N1.7's, at any size.

Shape legend: B batch; V views; L prompt tokens, image tokens among them (this is P too); M width; G patches of a side;
H, W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLModel

from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import QwenBackboneConfig, QwenVisionConfig
from vla_rl.policies.groot.features import Features
from vla_rl.policies.groot.qwen_text import text_config

_FRAMES = 2
"""Qwen3-VL's patches span two frames; a picture is shown twice."""
_MAX_POSITIONS = 262_144
"""Longest sequence that the published rotary positions were made for; nothing is allocated for it."""


class UnreadNorm(nn.Module):
    """The language model's final norm: N1.7 reads the features before it, but the published weights contain it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BLM: Tensor) -> Tensor:
        """The tokens, unchanged."""
        return x_BLM


class QwenBackbone(nn.Module):
    """Images where the prompt has image tokens; features are what leaves language layer `read_layer`."""

    def __init__(self, config: QwenBackboneConfig, image_token_id: int) -> None:
        super().__init__()
        self.config, self.image_token_id = config, image_token_id
        self.vlm = Qwen3VLModel(_published_config(config, image_token_id))
        self.vlm.language_model.norm = UnreadNorm(config.width)  # pyright: ignore[reportAttributeAccessIssue]
        with torch.device("cpu"):  # rotary frequencies are no weights: they must exist where weights are only promised (`meta`)
            self._compute_frequencies()

    def forward(self, batch: Batch) -> Features:
        """See `Backbone`. `batch.tokens_BL` holds the image token as often as each image has tokens."""
        image_mask_BL = batch.tokens_BL == self.image_token_id
        output = self.vlm(
            input_ids=batch.tokens_BL,
            attention_mask=batch.token_mask_BL,
            pixel_values=patches(batch.images_BVCHW, self.config.vision),
            image_grid_thw=self._grid(batch),
            mm_token_type_ids=image_mask_BL.int(),
            use_cache=False,
        )
        return Features(output.last_hidden_state, batch.token_mask_BL, image_mask_BL)

    def layers(self) -> list[nn.Module]:
        """See `Backbone`."""
        return [*self.vlm.visual.blocks, *self.vlm.language_model.layers]

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """The final norm's."""
        return cast(nn.Module, self.vlm.language_model.norm).parameters()

    def _grid(self, batch: Batch) -> Tensor:
        """int64[B * V, 3]: frames, rows and columns of patches of each picture."""
        side = self.config.vision.image_size // self.config.vision.patch_size
        return torch.tensor([[1, side, side]], device=batch.tokens_BL.device).expand(batch.images_BVCHW.shape[:2].numel(), -1)

    def _compute_frequencies(self) -> None:
        text, vision = cast(Any, self.vlm.language_model), cast(Any, self.vlm.visual)
        text.rotary_emb = type(text.rotary_emb)(text.config)
        vision.rotary_pos_emb = type(vision.rotary_pos_emb)(vision.rotary_pos_emb.dim)


def patches(images_BVCHW: Tensor, config: QwenVisionConfig) -> Tensor:
    """float32[B * V * G * G, 3 * 2 * patch * patch]: the patches of every picture, those that become one token side by side.

    The layout of transformers' `Qwen2VLImageProcessor`: (token row, token column, row in it, column in it), each patch as
    (channel, frame, row, column).
    """
    size, merge = config.patch_size, config.merge
    cells = images_BVCHW.flatten(0, 1).unflatten(3, (-1, merge, size)).unflatten(2, (-1, merge, size))
    ordered = cells.permute(0, 2, 5, 3, 6, 1, 4, 7)  # picture, token row, token column, row, column, channel, pixel row, pixel column
    framed = ordered.unsqueeze(6).expand(*ordered.shape[:6], _FRAMES, size, size)
    return framed.reshape(-1, 3 * _FRAMES * size * size)


def _published_config(config: QwenBackboneConfig, image_token_id: int) -> Qwen3VLConfig:
    vision = config.vision
    return Qwen3VLConfig.from_dict(
        {
            "image_token_id": image_token_id,
            "text_config": {
                **text_config(config),
                "max_position_embeddings": _MAX_POSITIONS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": config.rope_theta,
                    "mrope_interleaved": True,
                    "mrope_section": list(config.rope_sections),
                },
            },
            "vision_config": {
                "depth": vision.depth,
                "hidden_size": vision.width,
                "intermediate_size": vision.mlp_width,
                "num_heads": vision.heads,
                "patch_size": vision.patch_size,
                "spatial_merge_size": vision.merge,
                "temporal_patch_size": _FRAMES,
                "out_hidden_size": config.width,
                "num_position_embeddings": vision.positions,
                "deepstack_visual_indexes": list(vision.deepstack),
                "hidden_act": "gelu_pytorch_tanh",
            },
        }
    )
