"""Weight sync inside one process: the trainer's weights, as of the last push, for any number of policies.

`push` copies, so that an optimizer step that follows does not reach into policies that act with the version before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vla_rl.weights.digest import weights_digest


class WeightSyncError(RuntimeError):
    """Weights that do not fit, are older than what is there, or did not arrive."""


class InPlaceSync:
    """One copy of the weights, with a version that only grows."""

    def __init__(self) -> None:
        self.version = -1
        """Version of the last push; -1 before the first."""
        self._weights: dict[str, Tensor] = {}

    def push(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over full tensors under the plain policy's names. Raises WeightSyncError unless `version` is newer than the last."""
        if version <= self.version:
            raise WeightSyncError(f"weights of version {version} were pushed after version {self.version}; versions must grow")
        with torch.no_grad():
            for name, tensor in named_weights:
                if name in self._weights:
                    self._weights[name].copy_(tensor)
                else:
                    self._weights[name] = tensor.detach().clone()
        self.version = version

    def pull(self, policy: nn.Module) -> int:
        """Copy the pushed weights into `policy` (its dtypes and device are kept) and return their version.

        Raises WeightSyncError before the first push, and where names or shapes differ (then nothing is copied).
        """
        own = policy.state_dict()
        if self.version < 0:
            raise WeightSyncError("weights were pulled before the first push; push before any policy acts")
        unlike = sorted(own.keys() ^ self._weights.keys())
        unlike += [name for name in own.keys() & self._weights.keys() if own[name].shape != self._weights[name].shape]
        if unlike:
            raise WeightSyncError(f"the pushed weights do not fit the policy; these differ in presence or shape: {', '.join(unlike[:10])}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self._weights[name])
        return self.version

    def verify(self, policy: nn.Module) -> str:
        """The digest of `policy`. Raises WeightSyncError unless it is that of the pushed weights."""
        held, pushed = weights_digest(policy.state_dict()), weights_digest(self._weights)
        if held != pushed:
            raise WeightSyncError(f"the policy holds weights {held[:12]}, pushed were {pushed[:12]} (version {self.version}): pull first")
        return held
