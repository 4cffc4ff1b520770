"""Weight sync inside one process: the trainer's weights, as of the last push, for any number of policies.

`push` copies, so that an optimizer step that follows does not reach into policies that act with the version before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vla_rl.weights.digest import combined_digest, require_same_digests, tensor_digest
from vla_rl.weights.errors import LayoutMismatch, WeightSyncError
from vla_rl.weights.layout import held_weights
from vla_rl.weights.times import require_newer


class InPlaceSync:
    """One copy of the weights, with a version that only grows."""

    def __init__(self) -> None:
        self.version = -1
        """Version of the last push; -1 before the first."""
        self._weights: dict[str, Tensor] = {}

    def push(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over full tensors under the plain policy's names. Raises VersionError unless `version` is newer than the last."""
        require_newer(version, self.version)
        with torch.no_grad():
            for name, tensor in named_weights:
                if name in self._weights:
                    self._weights[name].copy_(tensor)
                else:
                    self._weights[name] = tensor.detach().clone()
        self.version = version

    def pull(self, policy: nn.Module) -> int:
        """Copy the pushed weights into `policy` (its dtypes and device are kept) and return their version.

        Raises WeightSyncError before the first push, and LayoutMismatch where names or shapes differ (then nothing is copied).
        """
        if self.version < 0:
            raise WeightSyncError("weights were pulled before the first push; push before any policy acts")
        own = held_weights(policy)
        unlike = sorted(own.keys() ^ self._weights.keys())
        unlike += [name for name in own.keys() & self._weights.keys() if own[name].shape != self._weights[name].shape]
        if unlike:
            raise LayoutMismatch(f"the pushed weights do not fit the policy; these differ in presence or shape: {', '.join(unlike)}")
        for name, tensor in own.items():
            tensor.copy_(self._weights[name])
        return self.version

    def verify(self, policy: nn.Module) -> str:
        """The digest (hex) of `policy`. Raises WeightSyncError unless it holds the pushed weights, cast to its dtypes."""
        own = held_weights(policy)
        held = {name: tensor_digest(tensor) for name, tensor in own.items()}
        pushed = {name: tensor_digest(tensor.to(own[name].dtype)) for name, tensor in self._weights.items()}
        require_same_digests(held, pushed, self.version)
        return combined_digest(held)
