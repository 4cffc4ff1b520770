"""OpenVLA's eyes: DINOv2 and SigLIP over the same patches, side by side, and the projector behind them.

The transformers are timm's, as in OpenVLA (`prismatic/extern/hf/modeling_prismatic.py`), read at their last layer but one. What lies
behind it (the last layer, the final norm, SigLIP's pooling) is carried, because the published weights contain it, and never computed.

Shape legend: B batch; V views; N patches; M width. Images are float32[B, V, 3, H, W] in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.policies.tokens.config import PrismaticConfig, VitConfig

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer  # slow to import; every command imports this file

DINO_MEAN = (0.484375, 0.455078125, 0.40625)
DINO_STD = (0.228515625, 0.2236328125, 0.224609375)
"""ImageNet's statistics of [0, 1], rounded to bfloat16 as in OpenVLA's `preprocessor_config.json`. SigLIP's are 0.5 and 0.5: [-1, 1]."""


class FusedTower(nn.Module):
    """Both transformers; a patch's token is DINOv2's features and then SigLIP's."""

    def __init__(self, config: PrismaticConfig) -> None:
        super().__init__()
        self.width = config.dino.width + config.siglip.width
        dino = {"init_values": 1e-5, "reg_tokens": config.registers, "no_embed_class": True}
        self.dino = _transformer(config, config.dino, **dino)
        self.siglip = _transformer(config, config.siglip, class_token=False, global_pool="map")

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that are computed, in order."""
        return [*_blocks(self.dino)[:-1], *_blocks(self.siglip)[:-1]]

    def forward(self, images_BVCHW: Tensor) -> Tensor:
        """Tokens float32[B, V * N, M], view after view."""
        images = images_BVCHW.flatten(0, 1)
        mean, std = (images.new_tensor(values)[:, None, None] for values in (DINO_MEAN, DINO_STD))
        tokens = torch.cat((_patches(self.dino, ((images + 1.0) / 2.0 - mean) / std), _patches(self.siglip, images)), -1)
        return tokens.unflatten(0, images_BVCHW.shape[:2]).flatten(1, 2)

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """Of everything behind the layers that are computed."""
        for transformer in (self.dino, self.siglip):
            for part in (_blocks(transformer)[-1], transformer.norm, transformer.attn_pool):
                if part is not None:
                    yield from part.parameters()


class FusedProjector(nn.Module):
    """Three linear layers around exact GELUs, four times as wide as the tower after the first."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B, N, tower] -> float32[B, N, language]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x_BNM)))))


def _transformer(config: PrismaticConfig, sizes: VitConfig, **more: bool | int | float | str) -> VisionTransformer:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        mlp_ratio=(sizes.mlp_width + 0.5) / sizes.width,  # timm multiplies and cuts off
        num_classes=0,
        **more,  # pyright: ignore[reportArgumentType] -- the callers' literals
    )


def _blocks(transformer: VisionTransformer) -> list[nn.Module]:
    return list(transformer.blocks.children())


def _patches(transformer: VisionTransformer, images: Tensor) -> Tensor:
    """Tokens of the patches [.., N, M] after the last layer but one, without norm, class token and registers."""
    index = len(_blocks(transformer)) - 2
    found = transformer.forward_intermediates(images, indices=[index], stop_early=True, output_fmt="NLC", intermediates_only=True)
    assert isinstance(found, list), "with intermediates_only"
    return found[0]
