"""The loss of one micro-batch: the algorithm's terms, added up over one count.

Shape legend: B rows of the step;  W rows of a micro-batch;  U ratios per row;  C actions per chunk;  K recorded denoise steps;
              A action dimensions of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.corrections import OldPolicy
from vla_rl.algorithms.losses import (
    LossTerm,
    add_terms,
    entropy_bonus,
    kl_loss,
    policy_loss,
    regression_loss,
    value_loss,
    velocity_error,
)
from vla_rl.algorithms.reductions import reduce_per_action
from vla_rl.algorithms.weights import ElementWeights
from vla_rl.episode import ACTION_DIM
from vla_rl.phases.rl_batches import TrainingRows
from vla_rl.policies.base import LossSums, RecordBatch, ScoredTransitions


@dataclass(frozen=True)
class Targets:
    """The rows of a step with everything that stays fixed during its update."""

    rows: TrainingRows
    weights: ElementWeights
    """How much each ratio counts."""
    old: OldPolicy
    """Denominator of the ratios, and importance weights."""
    advantage_BU: Tensor
    return_B: Tensor
    reference_BU: Tensor | None
    """float32[B, U]: reduced log-probabilities of the reference, for KL."""
    reference_velocity_BKCA: Tensor | None
    teacher_velocity_BKCA: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of `Targets`; rows that only fill the shape up have weight 0."""

    index_W: Tensor
    """int64[W]: which rows."""
    record: RecordBatch
    mask_WC: Tensor
    behaviour_WC: Tensor
    weights: ElementWeights
    old_WU: Tensor
    importance_WU: Tensor | None
    advantage_WU: Tensor
    return_W: Tensor
    value_W: Tensor
    reference_WU: Tensor | None
    reference_velocity_WKCA: Tensor | None
    teacher_velocity_WKCA: Tensor | None

    @classmethod
    def of(cls, targets: Targets, index_W: Tensor, real_W: Tensor) -> MicroBatch:
        """The rows `index_W`, those that are not `real_W` bool[W] with weight 0."""
        rows, weights = targets.rows, targets.weights.select(index_W)
        real_W1 = real_W[:, None].float()
        return cls(
            index_W=index_W,
            record=rows.record.select(index_W),
            mask_WC=rows.mask_BC[index_W],
            behaviour_WC=rows.behaviour_BC[index_W],
            weights=ElementWeights(weights.loss_BU * real_W1, weights.share_BU * real_W1),
            old_WU=targets.old.log_prob_BU[index_W],
            importance_WU=_select(targets.old.importance_BU, index_W),
            advantage_WU=targets.advantage_BU[index_W],
            return_W=targets.return_B[index_W],
            value_W=rows.value_B[index_W],
            reference_WU=_select(targets.reference_BU, index_W),
            reference_velocity_WKCA=_select(targets.reference_velocity_BKCA, index_W),
            teacher_velocity_WKCA=_select(targets.teacher_velocity_BKCA, index_W),
        )


def _select(tensor: Tensor | None, index_W: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[index_W]


def row_loss(scored: ScoredTransitions, micro: MicroBatch, algorithm: AlgorithmConfig, policy_coefficient: float) -> LossSums:
    """All terms of the algorithm as sums over the count of `micro.weights`; see `algorithms/losses.py` for each."""
    log_prob_WU = _reduce(scored.log_prob_BC.cpu(), micro, algorithm)
    policy = policy_loss(log_prob_WU, micro.old_WU, micro.advantage_WU, micro.weights, algorithm.clip, micro.importance_WU)
    terms: dict[str, tuple[float, LossTerm]] = {"policy": (policy_coefficient, policy)}
    if algorithm.critic is not None:
        assert scored.value_B is not None, "a policy for this algorithm was given a critic"
        value = value_loss(
            scored.value_B.cpu(),
            micro.value_W,
            micro.return_W,
            micro.weights.count_B,
            algorithm.critic.value_clip,
            algorithm.critic.huber_delta,
        )
        terms["value"] = (algorithm.critic.coefficient, value)
    if algorithm.entropy_coefficient:
        bonus = entropy_bonus(_reduce(scored.entropy_BC.cpu(), micro, algorithm), micro.weights)
        terms["entropy"] = (policy_coefficient * algorithm.entropy_coefficient, bonus)
    terms |= _regularisers(scored, log_prob_WU, micro, algorithm, policy_coefficient)
    total = add_terms(terms)
    return LossSums(total.loss_sum, micro.weights.count_B.sum(), total.metrics)


def _regularisers(
    scored: ScoredTransitions, log_prob_WU: Tensor, micro: MicroBatch, algorithm: AlgorithmConfig, policy_coefficient: float
) -> dict[str, tuple[float, LossTerm]]:
    """KL to the reference, and regression to the teacher's velocity."""
    terms: dict[str, tuple[float, LossTerm]] = {}
    kl, distillation = algorithm.kl, algorithm.distillation
    if kl.kind == "velocity":
        terms["kl_reference"] = (
            policy_coefficient * kl.coefficient,
            _velocity_term(scored, micro.reference_velocity_WKCA, micro, algorithm),
        )
    elif kl.kind != "none" and kl.place == "loss":
        assert micro.reference_WU is not None, "scored before the update"
        terms["kl_reference"] = (policy_coefficient * kl.coefficient, kl_loss(kl.kind, log_prob_WU, micro.reference_WU, micro.weights))
    if distillation.kind == "velocity":
        term = _velocity_term(scored, micro.teacher_velocity_WKCA, micro, algorithm)
        terms["distillation"] = (policy_coefficient * distillation.coefficient, LossTerm(term.loss_sum, {}))
    return terms


def _velocity_term(scored: ScoredTransitions, target_WKCA: Tensor | None, micro: MicroBatch, algorithm: AlgorithmConfig) -> LossTerm:
    """Squared difference of velocities: mean over dimensions and recorded steps, mean over the unmasked actions of a ratio."""
    assert target_WKCA is not None, "scored before the update"
    pairs = zip(scored.velocity_BKCA.cpu().unbind(1), target_WKCA.unbind(1), strict=True)
    error_WC = torch.stack([velocity_error(velocity, target, ACTION_DIM) for velocity, target in pairs]).mean(0)
    error_WC = torch.where(micro.mask_WC, error_WC, 0.0)
    if algorithm.log_prob.unit == "action":
        return regression_loss(error_WC, micro.weights)
    return regression_loss(error_WC.sum(1, keepdim=True) / micro.mask_WC.sum(1, keepdim=True).clamp(min=1), micro.weights)


def _reduce(value_WC: Tensor, micro: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    return reduce_per_action(value_WC, micro.mask_WC, algorithm.log_prob, ACTION_DIM, micro.record.kept_steps)
