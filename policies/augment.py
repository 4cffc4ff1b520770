"""Image augmentation in training.

Shape legend: B batch; V views; H, W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(images_BVCHW: Tensor, uniform_BK: Tensor, pixels: int) -> Tensor:
    """Shift every view of every sample by whole pixels in [-pixels, pixels], edges repeated (DrQ, Kostrikov et al. 2020).

    `uniform_BK` is float32[B, 2 V] in [0, 1): the row shifts of the views, then the column shifts. Each sample and view
    moves by its own amount: one shift for a whole batch would leave the batch's samples in fixed relation.
    """
    if pixels == 0:
        return images_BVCHW
    views, (height, width) = images_BVCHW.shape[1], images_BVCHW.shape[-2:]
    shift_B2V = (uniform_BK * (2 * pixels + 1)).long() - pixels
    rows = _shifted_index(shift_B2V[:, :views], height)
    columns = _shifted_index(shift_B2V[:, views:], width)
    images = images_BVCHW.gather(3, rows[:, :, None, :, None].expand_as(images_BVCHW))
    return images.gather(4, columns[:, :, None, None, :].expand_as(images))


def _shifted_index(shift_BV: Tensor, length: int) -> Tensor:
    """int64[B, V, length]: which source index each target index shows."""
    return (torch.arange(length, device=shift_BV.device) + shift_BV[..., None]).clamp_(0, length - 1)
