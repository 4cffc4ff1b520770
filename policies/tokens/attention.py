"""Who sees whom: prefix, reasoning and actions in one sequence.

Shape legend: B batch;  S positions of the whole sequence;  Q positions that are computed now;  K positions they may see.

    prefix      images, prompt, state: all of each other (PaliGemma), or only what comes before (Qwen-VL)
    reasoning   the prefix, and the reasoning before
    actions     prefix and reasoning; in parallel decoding all action placeholders, else only the actions before

OpenVLA-OFT has no such order: all positions see all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """The segments of a sequence, in order."""

    prefix: int
    """Positions of images, prompt and state."""
    reasoning: int
    """Positions of the reasoning, its opening mark included; 0 without."""
    actions: int
    """Positions of the actions (placeholders, or the opening mark and all tokens but the last)."""
    bidirectional_prefix: bool
    """Prefix positions see each other in both directions."""
    parallel_actions: bool
    """Action positions do."""
    unordered: bool = False
    """Every position sees every other (OpenVLA-OFT)."""

    @property
    def length(self) -> int:
        """S."""
        return self.prefix + self.reasoning + self.actions

    def allowed(self, device: torch.device) -> Tensor:
        """bool[S, S]: whether position q (row) may see position k (column), padding aside."""
        allowed_SS = torch.ones(self.length, self.length, dtype=torch.bool, device=device)
        if self.unordered:
            return allowed_SS
        allowed_SS = allowed_SS.tril()
        if self.bidirectional_prefix:
            allowed_SS[: self.prefix, : self.prefix] = True
        if self.parallel_actions:
            allowed_SS[self.length - self.actions :, self.length - self.actions :] = True
        return allowed_SS

    def mask(self, valid_BK: Tensor, queries: slice) -> Tensor:
        """bool[B, 1, Q, K] for scaled dot product attention: `allowed`, and only real positions (`valid_BK`)."""
        return self.allowed(valid_BK.device)[None, None, queries, : valid_BK.shape[1]] & valid_BK[:, None, None, :]


def positions(valid_BK: Tensor) -> Tensor:
    """int64[B, K]: the place of each real position among the real ones; padding takes none."""
    return (valid_BK.cumsum(1) - 1).clamp(min=0)
