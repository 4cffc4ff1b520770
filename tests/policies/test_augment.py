"""Random shifts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vla_rl.policies.augment import random_shift


def slow_shift(image: torch.Tensor, rows: int, columns: int, pixels: int) -> torch.Tensor:
    """Pad by repeating edges, then cut the shifted window out."""
    padded = F.pad(image, (pixels,) * 4, mode="replicate")
    size = image.shape[-1]
    return padded[..., pixels + rows : pixels + rows + size, pixels + columns : pixels + columns + size]


def test_equals_padding_and_cropping_for_every_sample_and_view() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 2, 3, 16, 16, generator=generator)
    uniform = torch.rand(6, 4, generator=generator)
    shifted = random_shift(images, uniform, 3)
    amounts = (uniform * 7).floor().int() - 3
    for sample in range(6):
        for view in range(2):
            rows, columns = int(amounts[sample, view]), int(amounts[sample, 2 + view])
            assert torch.equal(shifted[sample, view], slow_shift(images[sample, view], rows, columns, 3))
    assert len({tuple(row) for row in amounts.tolist()}) > 1, "samples must move by their own amounts"


def test_ends_of_the_range_and_no_shift() -> None:
    images = torch.arange(5.0).expand(1, 1, 3, 5, 5)
    left = random_shift(images, torch.tensor([[0.5, 0.0]]), 2)
    right = random_shift(images, torch.tensor([[0.5, 0.999]]), 2)
    assert left[0, 0, 0, 0].tolist() == [0, 0, 0, 1, 2]
    assert right[0, 0, 0, 0].tolist() == [2, 3, 4, 4, 4]
    assert random_shift(images, torch.rand(1, 2), 0) is images
