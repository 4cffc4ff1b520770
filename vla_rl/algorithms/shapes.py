"""Shapes are checked where tensors enter, because broadcasting turns [B] against [B, 1] into [B, B] without a word."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def require_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError, naming the tensor and both shapes, unless `tensor` has exactly this shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}, exactly (nothing is broadcast)")


def require_rank(name: str, tensor: Tensor, rank: int) -> None:
    """Raises ValueError, naming the tensor and its shape, unless it has `rank` dimensions."""
    if tensor.ndim != rank:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {rank} dimension{'s' if rank != 1 else ''}")
