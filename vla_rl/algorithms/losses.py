"""Losses as weighted sums, so that one global divisor serves all micro-batches, ranks and terms.

Shape legend: B chunks (rows);  U ratios per chunk (`reductions.py`);  C actions per chunk;  A action dimensions of the model.

Each function returns a `LossTerm`: the sum over elements of weight times loss, and metrics as sums of share times value; both are to be
divided by the count of the same weights (`weights.py`). Masked elements have weight 0 and, by `reductions.py`, finite values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from vla_rl.algorithms.shapes import require_rank, require_shape
from vla_rl.algorithms.weights import ElementWeights
from vla_rl.config import ConfigError

KlKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp, so that one wild element (exp(89) overflows float32) cannot make the sum NaN."""


@dataclass(frozen=True)
class LossTerm:
    """One part of a loss, as sums over the same weights."""

    loss_sum: Tensor
    """Scalar with gradient."""
    metrics: dict[str, Tensor]
    """Scalars without gradient, each a sum of share times value."""


@dataclass(frozen=True)
class ClipSettings:
    """PPO's clipped objective (Schulman et al. 2017)."""

    low: float = 0.2
    """The ratio is clipped below at 1 - low; in (0, 1)."""
    high: float = 0.2
    """The ratio is clipped above at 1 + high; above 0. Larger than `low` keeps exploring (clip-higher, DAPO, Yu et al. 2025)."""
    dual: float | None = None
    """For negative advantages the loss is at most -dual * advantage (dual clip, Ye et al. 2020); above 1, none turns it off."""

    def __post_init__(self) -> None:
        if not 0 < self.low < 1:
            raise ConfigError(f"clip.low is {self.low}; allowed: above 0 and below 1")
        if not self.high > 0:
            raise ConfigError(f"clip.high is {self.high}; allowed: above 0")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"clip.dual is {self.dual}; allowed: above 1, or none")


def policy_loss(
    log_prob_BU: Tensor,
    old_log_prob_BU: Tensor,
    advantage_BU: Tensor,
    weights: ElementWeights,
    clip: ClipSettings,
    importance_BU: Tensor | None = None,
) -> LossTerm:
    """-min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -dual A, times the importance weight; r = exp(log_prob - old).

    All inputs float[B, U]; only `log_prob_BU` has a gradient. Metrics: `ratio`, `clip_fraction` (where the clip decides),
    `dual_clip_fraction`, `kl` = r - 1 - log r (k3 against the old policy), `importance`.
    """
    _require_elements(weights, log_prob_BU=log_prob_BU, old_log_prob_BU=old_log_prob_BU, advantage_BU=advantage_BU)
    log_ratio = (log_prob_BU - old_log_prob_BU.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, advantage = log_ratio.exp(), advantage_BU.detach()
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(plain, clipped)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if clip.dual is not None:
        ceiling = -advantage * clip.dual
        dual = (advantage < 0) & (loss > ceiling)
        loss = torch.where(dual, ceiling, loss)
    values = {"ratio": ratio, "clip_fraction": clipped > plain, "dual_clip_fraction": dual, "kl": ratio - 1 - log_ratio}
    if importance_BU is not None:
        _require_elements(weights, importance_BU=importance_BU)
        loss = loss * importance_BU.detach()
        values["importance"] = importance_BU
    return _term(loss, weights, values)


def value_loss(
    value_B: Tensor,
    old_value_B: Tensor,
    return_B: Tensor,
    weight_B: Tensor,
    value_clip: float | None = None,
    huber_delta: float | None = None,
) -> LossTerm:
    """Squared error e^2 / 2 of the value, or Huber's loss (quadratic up to delta, then linear with slope delta).

    With `value_clip`, the larger of the losses of V and of V_old + clip(V - V_old, -value_clip, value_clip) (Schulman et al. 2017's code).
    All inputs float[B]; `weight_B` is `ElementWeights.count_B`. Metrics: `value_clip_fraction`, `value`.
    """
    require_rank("value_B", value_B, 1)
    for name, tensor in (("old_value_B", old_value_B), ("return_B", return_B), ("weight_B", weight_B)):
        require_shape(name, tensor, value_B.shape)
    target_B = return_B.detach().to(value_B)
    loss_B = _regression(value_B, target_B, huber_delta)
    clipped_B = torch.zeros_like(loss_B, dtype=torch.bool)
    if value_clip is not None:
        old_B = old_value_B.detach().to(value_B)
        held_B = _regression(old_B + (value_B - old_B).clamp(-value_clip, value_clip), target_B, huber_delta)
        clipped_B = held_B > loss_B
        loss_B = torch.maximum(loss_B, held_B)
    weight_B = weight_B.detach()
    metrics = {"value_clip_fraction": (weight_B * clipped_B).sum(), "value": (weight_B * value_B.detach()).sum()}
    return LossTerm((weight_B * loss_B).sum(), metrics)


def entropy_bonus(entropy_BU: Tensor, weights: ElementWeights) -> LossTerm:
    """Minus the entropy: with a positive coefficient it keeps the policy exploring. Constant (no gradient) for Flow-SDE."""
    _require_elements(weights, entropy_BU=entropy_BU)
    return _term(-entropy_BU, weights, {"entropy": entropy_BU})


def kl_estimate(kind: KlKind, log_prob_BU: Tensor, reference_BU: Tensor) -> Tensor:
    """float[B, U]: estimates of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL divergence").

    With d = log policy - log reference: k1 = d (unbiased, noisy, can be negative), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    require_shape("reference_BU", reference_BU, log_prob_BU.shape)
    d = (log_prob_BU - reference_BU.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return d
    return 0.5 * d.square() if kind == "k2" else torch.exp(-d) - 1 + d


def kl_loss(kind: KlKind, log_prob_BU: Tensor, reference_BU: Tensor, weights: ElementWeights) -> LossTerm:
    """The estimate as a loss. Raises ValueError for k1, whose expected gradient, E[grad log policy], is zero: it belongs in the reward.

    k2's gradient is that of KL(policy || reference), k3's is that of KL(reference || policy), both on samples of the current policy.
    """
    if kind == "k1":
        raise ValueError("the gradient of k1 is zero in expectation: as a loss it does nothing; use k2 or k3, or put k1 into the reward")
    _require_elements(weights, log_prob_BU=log_prob_BU)
    estimate = kl_estimate(kind, log_prob_BU, reference_BU)
    return _term(estimate, weights, {"kl_reference": estimate})


def velocity_error(velocity_BCA: Tensor, target_BCA: Tensor, action_dims: int) -> Tensor:
    """float[B, C]: squared difference to another policy's velocity at the same x_t and t, mean over the real dimensions.

    As a regulariser this is the Kullback-Leibler divergence of a Flow-SDE step up to a factor of the step (Liu et al. 2025); against a
    teacher, at points the student visited, it is on-policy distillation by regression.
    """
    require_rank("velocity_BCA", velocity_BCA, 3)
    require_shape("target_BCA", target_BCA, velocity_BCA.shape)
    return (velocity_BCA - target_BCA.detach())[..., :action_dims].square().mean(-1)


def regression_loss(error_BU: Tensor, weights: ElementWeights) -> LossTerm:
    """Any error per element as a loss; metric: `error`."""
    _require_elements(weights, error_BU=error_BU)
    return _term(error_BU, weights, {"error": error_BU})


def distillation_advantage(student_BU: Tensor, teacher_BU: Tensor, bound: float) -> Tensor:
    """float[B, U]: log teacher - log student on the student's own samples, clamped to +-bound, without gradient.

    As the advantage of `policy_loss`, on-policy, its expected gradient is that of KL(student || teacher). It must differ between
    actions: an advantage that does not depend on the sample has no expected gradient.
    """
    require_shape("teacher_BU", teacher_BU, student_BU.shape)
    return (teacher_BU - student_BU).detach().clamp(-bound, bound)


def cloning_coefficient(coefficient: float, kl: float, full_at_kl: float | None) -> float:
    """Weight of behaviour cloning beside RL: constant, or growing with the policy's KL up to `full_at_kl` (VLA-RFT).

    coefficient * clamp(kl / full_at_kl, 0, 1): demonstrations hold the policy only as far as it moves.
    """
    return coefficient if full_at_kl is None else coefficient * min(max(kl / full_at_kl, 0.0), 1.0)


def add_terms(terms: Mapping[str, tuple[float, LossTerm]]) -> LossTerm:
    """Sum of coefficient times term, over one count. Metrics keep their names; `loss_NAME` is a term without its coefficient."""
    total = sum((coefficient * term.loss_sum for coefficient, term in terms.values()), torch.zeros(()))
    metrics = {f"loss_{name}": term.loss_sum.detach() for name, (_, term) in terms.items()}
    for name, (_, term) in terms.items():
        twice = metrics.keys() & term.metrics.keys()
        if twice:
            raise ValueError(f"term {name!r} has metrics that another term has: {', '.join(sorted(twice))}")
        metrics |= term.metrics
    return LossTerm(total, metrics)


def _term(loss_BU: Tensor, weights: ElementWeights, values: Mapping[str, Tensor]) -> LossTerm:
    share = weights.share_BU.detach()
    metrics = {name: (share * value.detach()).sum() for name, value in values.items()}
    return LossTerm((weights.loss_BU.detach() * loss_BU).sum(), metrics)


def _regression(value_B: Tensor, target_B: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (value_B - target_B).square()
    return huber_loss(value_B, target_B, reduction="none", delta=huber_delta)


def _require_elements(weights: ElementWeights, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require_shape(name, tensor, weights.loss_BU.shape)
