"""A digest of weights, so that two processes (or two copies) can show that they hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 (hex) of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
