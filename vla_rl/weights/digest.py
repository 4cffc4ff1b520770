"""Digests of weights, so that two processes (or two copies) can show that they hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.weights.errors import WeightSyncError

DIGEST_BYTES = 32
"""Length of a sha256."""


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8[n], the bytes of a tensor in memory order of its indices; shares memory where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> bytes:
    """sha256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}".encode())
    digest.update(bytes_of(tensor).cpu().numpy())
    return digest.digest()


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """sha256 (hex) over names and their tensors' digests, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(digests):
        digest.update(f"{name}:".encode())
        digest.update(digests[name])
    return digest.hexdigest()


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """One digest (hex) of all weights: their names, dtypes, shapes and bytes."""
    return combined_digest({name: tensor_digest(tensor) for name, tensor in weights.items()})


def require_same_digests(held: Mapping[str, bytes], pushed: Mapping[str, bytes], version: int) -> None:
    """Raise WeightSyncError, naming the tensors, unless a policy holds the bits that were pushed as `version`."""
    unlike = [name for name, digest in pushed.items() if held.get(name) != digest]
    if unlike:
        raise WeightSyncError(
            f"{len(unlike)} of {len(pushed)} tensors differ from what was pushed as version {version}: {', '.join(unlike)}; "
            "pull again, and look for code that writes to the policy's weights"
        )
