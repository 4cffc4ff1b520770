"""The loss of a micro-batch against numbers worked out by hand: which terms there are, over which count, and which way each one pushes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rl_recipe import GRPO, PPO

from vla_rl.algorithms.config import AlgorithmConfig, CriticSettings, DistillationSettings, KlSettings
from vla_rl.algorithms.corrections import OldPolicy
from vla_rl.algorithms.losses import ClipSettings
from vla_rl.algorithms.reductions import LogProbReduction
from vla_rl.algorithms.weights import element_weights
from vla_rl.phases.rl_batches import TrainingRows
from vla_rl.phases.rl_loss import MicroBatch, Targets, row_loss
from vla_rl.policies.base import ScoredTransitions, TransitionBatch

ROWS, CHUNK, DIMS = 3, 2, 7
EXACT = {"atol": 1e-5, "rtol": 1e-5}
"""float32 sums of a few numbers of order 1."""
PLAIN = replace(PPO, critic=CriticSettings(coefficient=0.5, value_clip=None, huber_delta=None), clip=ClipSettings(0.2, 0.2))
"""PPO per chunk, sums everywhere, squared value errors."""


def targets(algorithm: AlgorithmConfig, advantage: list[float], **others: Any) -> Targets:
    """Rows 0 and 1 belong to one episode, row 2 to another; the last action of row 1 was not executed. Old log-probs are 0."""
    mask_BC = torch.tensor([[True, True], [True, False], [True, True]])
    record = TransitionBatch(torch.zeros(ROWS, 1, CHUNK, DIMS), torch.zeros(ROWS, 1, CHUNK, DIMS), torch.zeros(ROWS, 1, dtype=torch.int64))
    rows = TrainingRows(
        mask_BC=mask_BC,
        value_B=torch.tensor([0.1, 0.2, 0.3]),
        episode_B=torch.tensor([0, 0, 1]),
        version_B=torch.zeros(ROWS, dtype=torch.int64),
        rank_B=torch.zeros(ROWS, dtype=torch.int64),
        observations={},
        record=record,
        behaviour_BC=torch.zeros(ROWS, CHUNK),
    )
    ratios = CHUNK if algorithm.log_prob.unit == "action" else 1
    mask_BU = mask_BC if ratios == CHUNK else mask_BC.any(1, keepdim=True)
    values: dict[str, Any] = {"reference_BU": None, "reference_velocity_BKCA": None, "teacher_velocity_BKCA": None}
    return Targets(
        rows=rows,
        weights=element_weights(mask_BU, rows.episode_B, algorithm.aggregation, algorithm.fixed_divisor),
        old=OldPolicy(torch.zeros(ROWS, ratios), None),
        advantage_BU=torch.tensor(advantage)[:, None].expand(ROWS, ratios),
        return_B=torch.tensor([1.0, 0.0, 0.5]),
        **(values | others),
    )


def scored(log_prob: list[list[float]], value: list[float] | None = None, velocity: float = 0.0) -> ScoredTransitions:
    """What the policy says now; log-probabilities and values are leaves that collect gradients."""
    return ScoredTransitions(
        log_prob_BC=torch.tensor(log_prob, requires_grad=True),
        entropy_BC=torch.full((ROWS, CHUNK), 2.0),
        velocity_BKCA=torch.full((ROWS, 1, CHUNK, DIMS), velocity),
        value_B=None if value is None else torch.tensor(value, requires_grad=True),
    )


def every(wanted: Targets) -> MicroBatch:
    return MicroBatch.of(wanted, torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool))


def test_ppo_is_the_clipped_ratio_of_what_was_executed_plus_the_values_error() -> None:
    """Ratios exp(0.1 + 0.2), exp(-0.3) (its second action was not executed), exp(-0.4); advantages 1, -1, 2."""
    now = scored([[0.1, 0.2], [-0.3, 9.0], [-0.5, 0.1]], [0.5, 0.5, 0.5])
    sums = row_loss(now, every(targets(PLAIN, [1.0, -1.0, 2.0])), PLAIN, 1.0)
    policy = -1.2 + 0.8 - 2 * math.exp(-0.4)  # the first two are clipped at 1 + 0.2 and 1 - 0.2
    value = 0.5 * (0.5**2 + 0.5**2 + 0.0**2)
    torch.testing.assert_close(sums.loss_sum, torch.tensor(policy + 0.5 * value), **EXACT)
    assert float(sums.count) == ROWS
    torch.testing.assert_close(sums.metrics["clip_fraction"], torch.tensor(2.0), **EXACT)
    torch.testing.assert_close(sums.metrics["loss_value"], torch.tensor(value), **EXACT)


def test_a_step_down_the_loss_makes_good_chunks_likelier_and_bad_ones_less_likely() -> None:
    now = scored([[0.0, 0.0]] * ROWS, [0.0] * ROWS)
    row_loss(now, every(targets(PLAIN, [1.0, -1.0, 2.0])), PLAIN, 1.0).loss_sum.backward()
    assert now.log_prob_BC.grad is not None and now.value_B is not None and now.value_B.grad is not None
    torch.testing.assert_close(now.log_prob_BC.grad, torch.tensor([[-1.0, -1.0], [1.0, 0.0], [-2.0, -2.0]]), **EXACT)
    torch.testing.assert_close(now.value_B.grad, -0.5 * torch.tensor([1.0, 0.0, 0.5]), **EXACT)


def test_rows_that_fill_a_shape_count_nothing() -> None:
    wanted = targets(PLAIN, [1.0, -1.0, 2.0])
    filled = MicroBatch.of(wanted, torch.arange(ROWS), torch.tensor([True, True, False]))
    whole, now = every(wanted), scored([[0.1, 0.0], [0.1, 0.0], [0.1, 0.0]], [0.5] * ROWS)
    short, full = row_loss(now, filled, PLAIN, 1.0), row_loss(now, whole, PLAIN, 1.0)
    third = -2 * math.exp(0.1)  # value 0.5 is right there
    torch.testing.assert_close(full.loss_sum - short.loss_sum, torch.tensor(third), **EXACT)
    assert float(short.count) == ROWS - 1


def test_while_the_critic_warms_up_only_its_error_is_left() -> None:
    algorithm = replace(PLAIN, entropy_coefficient=0.1, kl=KlSettings("k2", "loss", 0.3))
    now = scored([[0.1, 0.2], [-0.3, 0.0], [-0.5, 0.1]], [0.5] * ROWS)
    wanted = targets(algorithm, [1.0, -1.0, 2.0], reference_BU=torch.ones(ROWS, 1))
    sums = row_loss(now, every(wanted), algorithm, 0.0)
    torch.testing.assert_close(sums.loss_sum, torch.tensor(0.5 * 0.25), **EXACT)
    sums.loss_sum.backward()
    assert now.log_prob_BC.grad is not None and not now.log_prob_BC.grad.any()


@pytest.mark.parametrize(
    ("algorithm", "others", "expected"),
    [
        (replace(GRPO, entropy_coefficient=0.1), {}, -0.1 * (4 + 2 + 4)),
        (replace(GRPO, kl=KlSettings("k2", "loss", 0.3)), {"reference_BU": torch.full((ROWS, 1), 0.5)}, 0.3 * 3 * 0.5**2 / 2),
        (
            replace(GRPO, kl=KlSettings("velocity", "loss", 0.3)),
            {"reference_velocity_BKCA": torch.full((ROWS, 1, CHUNK, DIMS), 0.5)},
            0.3 * 3 * 0.5**2,
        ),
        (
            replace(GRPO, distillation=DistillationSettings("velocity", 0.3)),
            {"teacher_velocity_BKCA": torch.full((ROWS, 1, CHUNK, DIMS), 2.0)},
            0.3 * 3 * 2.0**2,
        ),
    ],
    ids=["entropy", "kl", "velocity-kl", "distillation"],
)
def test_each_further_term_is_what_is_left_without_advantage(algorithm: AlgorithmConfig, others: dict[str, Any], expected: float) -> None:
    """Log-probabilities are 0 as the old ones, so the policy's term is 0; entropies are 2 per executed action."""
    sums = row_loss(scored([[0.0, 0.0]] * ROWS), every(targets(algorithm, [0.0] * ROWS, **others)), algorithm, 1.0)
    torch.testing.assert_close(sums.loss_sum, torch.tensor(expected), **EXACT)


def test_a_ratio_per_action_counts_executed_actions() -> None:
    algorithm = replace(GRPO, log_prob=LogProbReduction(unit="action"))
    now = scored([[0.1, -0.1], [0.1, 9.0], [0.0, 0.0]])
    sums = row_loss(now, every(targets(algorithm, [1.0, 1.0, 1.0])), algorithm, 1.0)
    torch.testing.assert_close(sums.loss_sum, torch.tensor(-(2 * math.exp(0.1) + math.exp(-0.1) + 2)), **EXACT)
    assert float(sums.count) == 5
