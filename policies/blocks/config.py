"""Sizes of the building blocks that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


def require_least(config: Any, least: Mapping[str, int]) -> None:
    """For configs. Raises ValueError for a field, or a number of a field that is a list, below its least value."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if min(value if isinstance(value, tuple) else (value,), default=smallest) < smallest:
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{name} is {shown}, it must be at least {smallest}")


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a Gemma-style transformer."""

    width: int = 128
    """Model width; even, at least 2."""
    depth: int = 3
    """Number of layers; at least 1. (pi0's language model and action expert share attention, so depth and heads of both agree.)"""
    mlp_width: int = 512
    """Hidden width of the gated MLP."""
    heads: int = 4
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int = 4
    """Key and value heads; divides `heads`."""
    head_width: int = 32
    """Width of one head; even."""

    def __post_init__(self) -> None:
        require_least(self, dict.fromkeys(("width", "depth", "mlp_width", "heads", "kv_heads", "head_width"), 1))
        for name in ("width", "head_width"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be even (sines and cosines, rotary pairs)")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, it must be a multiple of kv_heads, which is {self.kv_heads}")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower."""

    stem: Literal["patch", "conv"] = "conv"
    """`patch`: SigLIP's patch embedding, shared by the views (as published). `conv`: strided convolutions, one stack per
    view, for small data."""
    image_size: int = 64
    """Pixels of a side of the model's input; a multiple of `patch_size`."""
    patch_size: int = 16
    """Pixels of a side of one token's cell; divides `image_size`. For `conv` it must be 2 to the number of `conv_channels`."""
    conv_channels: tuple[int, ...] = (32, 32, 64, 64)
    """Output channels of the strided convolutions (only for `conv`)."""
    summary_tokens: int = 4
    """Further tokens per view, each a linear map of all cells (only for `conv`): they carry where things are in the whole view."""
    width: int = 128
    """Width of the tower's transformer layers, and of its output."""
    depth: int = 0
    """Number of transformer layers; at least 0."""
    mlp_width: int = 512
    """Hidden width of their MLPs."""
    heads: int = 4
    """Attention heads; divides `width`."""

    def __post_init__(self) -> None:
        require_least(self, dict.fromkeys(("image_size", "patch_size", "conv_channels", "width", "mlp_width", "heads"), 1))
        require_least(self, {"summary_tokens": 0, "depth": 0})
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size is {self.image_size}, it must be a multiple of patch_size, which is {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}, it must be a multiple of heads, which is {self.heads}")
        if self.stem == "conv" and 2 ** len(self.conv_channels) != self.patch_size:
            raise ValueError(
                f"patch_size is {self.patch_size}, but {len(self.conv_channels)} conv_channels halve the image to cells of "
                f"{2 ** len(self.conv_channels)} pixels; make them agree"
            )

    @property
    def tokens(self) -> int:
        """Tokens per view."""
        return self.cells + (self.summary_tokens if self.stem == "conv" else 0)

    @property
    def cells(self) -> int:
        """Cells of the image, one token each."""
        return (self.image_size // self.patch_size) ** 2
