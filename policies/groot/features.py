"""What a backbone gives the action head.

Shape legend: B batch; P feature tokens; M width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from vla_rl.policies.base import Batch


@dataclass(frozen=True)
class Features:
    """Tokens of images and prompt, and which is which."""

    tokens_BPM: Tensor
    """float32[B, P, M]."""
    mask_BP: Tensor
    """bool[B, P]: real tokens, no padding."""
    image_mask_BP: Tensor
    """bool[B, P]: tokens of images; the others are text."""


class Backbone(Protocol):
    """A vision-language model that the action head reads. Implementations are `nn.Module`s."""

    def __call__(self, batch: Batch) -> Features:
        """Features of images and prompt."""
        ...

    def layers(self) -> list[nn.Module]:
        """The repeated modules, in the order in which they run."""
        ...

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the published weights contain and no feature depends on."""
        ...
