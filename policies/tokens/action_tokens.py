"""Chunks of actions as tokens: bins of [-1, 1], one token per number.

Shape legend: B batch;  C actions per chunk;  D = 7 real action dimensions;  N tokens of a chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vla_rl.episode import ACTION_DIM


class ActionTokenizer(Protocol):
    """Normalised actions to tokens and back. Tokens count from 0; their place in the vocabulary is `Vocabulary`'s business."""

    size: int
    """Number of different tokens."""
    length: int
    """N: most tokens of a chunk."""
    fixed_length: bool
    """Every chunk has `length` tokens, D per action in order; otherwise an end mark closes it."""

    def encode(self, actions_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """int64[B, N] and bool[B, N], real tokens first. `actions_BCD` float32, normalised; values beyond [-1, 1] are clipped."""
        ...

    def decode(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """float32[B, C, D] of any tokens, whoever wrote them."""
        ...


class BinTokenizer:
    """`bins` equal intervals of [-1, 1]; a token stands for the middle of its interval (RT-2).

    OpenVLA cuts [-1, 1] at 256 edges, which makes 255 intervals and a token that decodes to the last of them; here 256 bins
    are 256 intervals. So encode(decode(token)) is the token, and decode(encode(x)) is at most 1 / bins from x in [-1, 1].
    """

    fixed_length = True

    def __init__(self, bins: int, chunk_length: int) -> None:
        self.size, self.length = bins, chunk_length * ACTION_DIM

    def encode(self, actions_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """See `ActionTokenizer.encode`. In float64, where the middle of a bin is never rounded into its neighbour."""
        tokens = ((actions_BCD.double() + 1.0) * (self.size / 2)).floor().clamp(0, self.size - 1).long().flatten(1)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def decode(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """See `ActionTokenizer.decode`."""
        middles = (2.0 * tokens_BN.double() + 1.0) / self.size - 1.0
        return middles.float().unflatten(1, (-1, ACTION_DIM))


class OpenVlaTokenizer:
    """OpenVLA's count of the same (`prismatic/vla/action_tokenizer.py`): `bins` edges, and tokens from the highest value down.

    A value is the number 1 ... bins of edges at or below it, and token `bins - number` of the last `bins` rows; so the first token, of
    1 exactly, means the last interval, and decodes as the second one does.
    """

    fixed_length = True

    def __init__(self, bins: int, chunk_length: int) -> None:
        self.size, self.length = bins, chunk_length * ACTION_DIM
        self._edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64, device="cpu")

    def encode(self, actions_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """See `ActionTokenizer.encode`."""
        clipped = actions_BCD.double().clamp(-1.0, 1.0)
        tokens = self.size - torch.bucketize(clipped, self._edges.to(clipped.device), right=True).flatten(1)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def decode(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """See `ActionTokenizer.decode`."""
        centers = ((self._edges[:-1] + self._edges[1:]) / 2).float().to(tokens_BN.device)
        return centers[(self.size - tokens_BN - 1).clamp(0, self.size - 2)].unflatten(1, (-1, ACTION_DIM))
