"""Numbers that tell whether learning can work: on-policy check, explained variance, gradient signal-to-noise ratio.

Shape legend: B chunks (rows);  C actions per chunk;  M micro-batches or groups of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.algorithms.advantages import Moments
from vla_rl.algorithms.shapes import require_rank, require_shape

Precision = Literal["fp32", "bf16"]

ON_POLICY_BOUNDS: dict[Precision, float] = {"fp32": 1e-4, "bf16": 0.5}
"""Largest |log-ratio| of an action (nats; summed over its dimensions and recorded denoise steps) that rounding explains, where the forward
batch has another shape than the rollout's, and sums another order. Measured with tiny pi0 (velocities of size 0.5, batches of 32 against
1, all 5 steps stochastic at noise level 0.2, which has the smallest spread): 3e-5 in float32, 0.15 where both sides compute in bfloat16;
velocities after training are 2 to 3 times larger, and the difference grows with them. With equal shapes both were exactly 0, on a CPU.
Different precisions of rollout and trainer gave 0.46, which is why rollouts compute in the engine's."""


class OnPolicyError(RuntimeError):
    """Trainer and rollout do not compute the same log-probabilities."""


@dataclass(frozen=True)
class LogProbGap:
    """How far the trainer's log-probabilities are from the rollout's, per unmasked action."""

    largest: float
    """Largest absolute difference (nats); infinite if any is not a number."""
    mean: float
    """Mean absolute difference (nats)."""


def log_prob_gap(log_prob_BC: Tensor, recorded_BC: Tensor, mask_BC: Tensor) -> LogProbGap:
    """Recomputed against recorded log-probabilities, float[B, C] each, where `mask_BC` bool[B, C] holds."""
    require_rank("log_prob_BC", log_prob_BC, 2)
    require_shape("recorded_BC", recorded_BC, log_prob_BC.shape)
    require_shape("mask_BC", mask_BC, log_prob_BC.shape)
    gap = (log_prob_BC.detach().double() - recorded_BC.double())[mask_BC].abs()
    if not len(gap):
        return LogProbGap(0.0, 0.0)
    gap = torch.where(gap.isfinite(), gap, torch.inf)
    return LogProbGap(float(gap.max()), float(gap.mean()))


def check_on_policy(gap: LogProbGap, same_batch_shape: bool, precision: Precision = "fp32") -> None:
    """Raises OnPolicyError unless the first minibatch of fresh data has log-ratios of 0.

    With equal weights the ratio is 1 by definition, so a difference is a mismatch between the sampler and the trainer (ReinFlow aborts
    likewise). Allowed: exactly 0 in float32 where the forward batch has the rollout's shape, else `ON_POLICY_BOUNDS`.
    """
    bound = 0.0 if same_batch_shape and precision == "fp32" else ON_POLICY_BOUNDS[precision]
    if gap.largest <= bound:
        return
    raise OnPolicyError(
        f"the log-probability of an action differs by up to {gap.largest:.3g} nats (mean {gap.mean:.3g}) between rollout and trainer on "
        f"the first minibatch, where both have the same weights; allowed: {bound:g} "
        f"({'same' if same_batch_shape else 'another'} batch shape, {precision}). No hyperparameter explains that. Check that both "
        "use the same weights version, denoise grid and step index, noise level, preprocessing (no image shift, no dropout in the "
        "trainer), precision, and number of real action dimensions."
    )


def exceeds_target_kl(kl: float, target_kl: float | None) -> bool:
    """Whether to stop the epochs over this batch: the mean KL to the old policy is above 1.5 times the target (Spinning Up's rule)."""
    return target_kl is not None and kl > 1.5 * target_kl


def explained_variance(error: Moments, target: Moments) -> float:
    """1 - Var(return - value) / Var(return), from statistics summed over ranks: 1 is a perfect critic, 0 a constant one.

    Not a number where all returns are equal: then there is nothing to explain.
    """
    return 1.0 - error.variance / target.variance if target.variance > 0 else float("nan")


@dataclass(frozen=True)
class GradientNoise:
    """How much of a gradient is signal; see `gradient_noise`."""

    signal_square: float
    """Unbiased estimate of |E g|^2; noise can make it negative."""
    noise_trace: float
    """Trace of the covariance of one micro-batch's gradient."""
    signal_to_noise: float
    """|E g|^2 over the expected squared error of the mean gradient; below 1 the step is mostly noise."""
    noise_scale: float
    """Micro-batches at which signal and noise of the mean are equal (infinite where no signal is seen)."""


def gradient_noise(square_norms_M: Tensor, mean_square_norm: float) -> GradientNoise:
    """Signal and noise of a gradient from its M >= 2 independent parts of equal size.

    With q = mean of |g_i|^2 (`square_norms_M` float[M]) and m = |mean of g_i|^2: tr(Cov) = M / (M - 1) (q - m), |E g|^2 = m - tr(Cov) / M,
    both unbiased; signal_to_noise = |E g|^2 / (tr(Cov) / M); noise_scale = tr(Cov) / |E g|^2 (the "simple noise scale" of McCandlish et
    al. 2018, in micro-batches; their appendix A.1 is the same estimate from two batch sizes). For RL, parts should be whole groups or
    episodes: chunks of one episode share its noise.
    """
    require_rank("square_norms_M", square_norms_M, 1)
    parts = len(square_norms_M)
    if parts < 2:
        raise ValueError(f"gradient noise needs the gradients of at least 2 parts, got {parts}; use more micro-batches")
    square = float(square_norms_M.double().mean())
    trace = max(parts / (parts - 1) * (square - mean_square_norm), 0.0)
    signal = mean_square_norm - trace / parts
    ratio = signal / (trace / parts) if trace > 0 else float("inf")
    return GradientNoise(signal, trace, ratio, trace / signal if signal > 0 else float("inf"))
