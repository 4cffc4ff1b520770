"""A backbone for small data: the vision tower and Gemma-style layers that pi0 has too, read at their last layer.

Shape legend: B batch; V views; L prompt tokens; P = V * tokens per view + L; M width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from vla_rl.policies.base import Batch
from vla_rl.policies.blocks.gemma import Transformer, rotary_angles
from vla_rl.policies.blocks.vision import VisionTower
from vla_rl.policies.groot.config import ConvBackboneConfig
from vla_rl.policies.groot.features import Features


class ConvBackbone(nn.Module):
    """Image tokens, then prompt tokens; all real ones see each other."""

    def __init__(self, config: ConvBackboneConfig, views: int) -> None:
        super().__init__()
        self.config = config
        self.vision = VisionTower(config.vision, views)
        self.projector = nn.Linear(config.vision.width, config.language.width)
        self.language = Transformer(config.language, vocabulary=config.vocabulary)

    def forward(self, batch: Batch) -> Features:
        """See `Backbone`."""
        images = self.projector(self.vision(batch.images_BVCHW))
        x_BPM = torch.cat((images, self.language.embed(batch.tokens_BL).to(images.dtype)), 1)
        image_mask_BP = torch.zeros(x_BPM.shape[:2], dtype=torch.bool, device=x_BPM.device)
        image_mask_BP[:, : images.shape[1]] = True
        mask_BP = image_mask_BP.clone()
        mask_BP[:, images.shape[1] :] = batch.token_mask_BL
        rotary = rotary_angles(mask_BP.cumsum(1) - 1, self.config.language.head_width).to(x_BPM.dtype)
        for layer in self.language.layers:
            x_BPM, _ = layer(x_BPM, rotary, mask_BP[:, None, None])
        return Features(self.language.norm(x_BPM)[0], mask_BP, image_mask_BP)

    def layers(self) -> list[nn.Module]:
        """See `Backbone`."""
        return [*self.vision.layers, *self.language.layers]

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """None: every parameter is read."""
        yield from ()
