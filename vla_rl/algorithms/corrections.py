"""Data that older weights produced: three ways to use it, each an explicit choice.

Shape legend: B chunks (rows);  U ratios per chunk.

Three policies take part: `behaviour` acted (its log-probs are in the record), `proximal` is the trainer at the start of the update
(recomputed), and theta learns.

    none             on-policy data; the PPO ratio is theta / old, and old is behaviour or, recomputed, proximal
    behaviour_clip   theta / behaviour, clipped: plain PPO against who acted
    truncated        theta / proximal, clipped, times min(proximal / behaviour, cap) (truncated importance sampling, Ionides 2008)
    decoupled        theta / proximal, clipped, times proximal / behaviour where that is at most the cap, else 0 (decoupled PPO, Hilton
                     et al. 2022; AReaL's form)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.algorithms.losses import MAX_LOG_RATIO
from vla_rl.algorithms.shapes import require_shape
from vla_rl.config import ConfigError

CorrectionKind = Literal["none", "behaviour_clip", "truncated", "decoupled"]


@dataclass(frozen=True)
class Correction:
    """How data of older weights is used."""

    kind: CorrectionKind = "none"
    """See the module's docstring; `none` only where no data is older than the weights (`max_staleness` 0)."""
    cap: float = 2.0
    """Largest importance weight of `truncated` (larger ones become it) and `decoupled` (larger ones become 0); at least 1."""

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ConfigError(f"correction.cap is {self.cap}; allowed: at least 1, so that on-policy data keeps its weight")

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer recomputes log-probabilities at the start of an update."""
        return self.kind in ("truncated", "decoupled")


@dataclass(frozen=True)
class OldPolicy:
    """What the PPO ratio is taken against, and how much each ratio is worth."""

    log_prob_BU: Tensor
    """float[B, U]: the denominator of the ratio."""
    importance_BU: Tensor | None
    """float[B, U]: factor of the loss; None means 1."""


def old_policy(correction: Correction, behaviour_BU: Tensor, proximal_BU: Tensor | None) -> OldPolicy:
    """Denominator and importance weights of a batch, without gradient.

    `behaviour_BU` are the log-probs of the record, `proximal_BU` the recomputed ones, both reduced alike (masked entries are 0, so their
    weight is 1 and never used). Raises ValueError where the correction needs recomputed ones that are not there, or has no use for them.
    """
    if correction.needs_proximal and proximal_BU is None:
        raise ValueError(f"correction {correction.kind!r} needs the proximal log-probabilities; recompute them before the first update")
    if proximal_BU is None:
        return OldPolicy(behaviour_BU.detach(), None)
    if correction.kind == "behaviour_clip":
        raise ValueError("correction 'behaviour_clip' takes the ratio against the record's log-probabilities; do not recompute them")
    require_shape("proximal_BU", proximal_BU, behaviour_BU.shape)
    if correction.kind == "none":
        return OldPolicy(proximal_BU.detach(), None)
    log_weight = (proximal_BU - behaviour_BU).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_BU = log_weight.exp()
    if correction.kind == "truncated":
        return OldPolicy(proximal_BU.detach(), weight_BU.clamp(max=correction.cap))
    return OldPolicy(proximal_BU.detach(), torch.where(weight_BU <= correction.cap, weight_BU, 0.0))


def effective_sample_share(weight_BU: Tensor, mask_BU: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) over unmasked weights: the share of the batch that its weights leave (Kish 1965); 1 for equal weights."""
    require_shape("mask_BU", mask_BU, weight_BU.shape)
    kept = weight_BU[mask_BU].double()
    square = float(kept.square().sum())
    return float(kept.sum()) ** 2 / (len(kept) * square) if square > 0 else 0.0
