"""Losses by hand, and their gradients against the quantity they claim to follow."""

import math

import pytest
import torch

from vla_rl.algorithms.corrections import Correction, effective_sample_share, old_policy
from vla_rl.algorithms.losses import (
    ClipSettings,
    LossTerm,
    add_terms,
    cloning_coefficient,
    distillation_advantage,
    entropy_bonus,
    kl_estimate,
    kl_loss,
    policy_loss,
    regression_loss,
    value_loss,
    velocity_error,
)
from vla_rl.algorithms.weights import ElementWeights
from vla_rl.config import ConfigError


def ones(*shape: int) -> ElementWeights:
    return ElementWeights(torch.ones(shape), torch.ones(shape))


def one_loss(ratio: float, advantage: float, clip: ClipSettings, importance: float | None = None) -> tuple[float, float, dict[str, float]]:
    """(loss, its gradient by the log-probability, metrics) of one element."""
    log_prob = torch.tensor([[math.log(ratio) - 3.0]], dtype=torch.float64, requires_grad=True)
    old, weight = torch.full((1, 1), -3.0, dtype=torch.float64), None if importance is None else torch.tensor([[importance]])
    term = policy_loss(log_prob, old, torch.tensor([[advantage]], dtype=torch.float64), ones(1, 1), clip, weight)
    (gradient,) = torch.autograd.grad(term.loss_sum, log_prob)
    return float(term.loss_sum.detach()), float(gradient), {name: float(value) for name, value in term.metrics.items()}


CLIP = ClipSettings(low=0.2, high=0.28)
DUAL = ClipSettings(low=0.2, high=0.28, dual=3.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss", "gradient", "clipped", "dual"),
    [
        (1.0, 2.0, CLIP, -2.0, -2.0, 0, 0),  # on-policy: the gradient is that of -A log p
        (1.25, 2.0, CLIP, -2.5, -2.5, 0, 0),  # inside the higher clip
        (1.5, 2.0, CLIP, -2.56, 0.0, 1, 0),  # good and already likelier: held at 1.28
        (0.5, 2.0, CLIP, -1.0, -1.0, 0, 0),  # good and less likely: pulled back
        (0.5, -2.0, CLIP, 1.6, 0.0, 1, 0),  # bad and already rarer: held at 0.8
        (1.5, -2.0, CLIP, 3.0, 3.0, 0, 0),  # bad and likelier: pushed down
        (5.0, -2.0, CLIP, 10.0, 10.0, 0, 0),  # without bound
        (5.0, -2.0, DUAL, 6.0, 0.0, 0, 1),  # dual clip: at most 3 * 2
        (5.0, 2.0, DUAL, -2.56, 0.0, 1, 0),  # which leaves good ones alone
    ],
)
def test_policy_loss_by_hand(ratio, advantage, clip, loss, gradient, clipped, dual):
    got, slope, metrics = one_loss(ratio, advantage, clip)
    assert (got, slope) == pytest.approx((loss, gradient), rel=1e-9)
    assert (metrics["clip_fraction"], metrics["dual_clip_fraction"]) == (clipped, dual)
    assert metrics["ratio"] == pytest.approx(ratio)
    assert metrics["kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_importance_scales_loss_and_gradient():
    loss, gradient, metrics = one_loss(1.25, 2.0, CLIP, importance=0.5)
    assert (loss, gradient, metrics["importance"]) == pytest.approx((-1.25, -1.25, 0.5))


def test_a_wild_log_ratio_stays_finite():
    log_prob = torch.tensor([[200.0, 0.0]], requires_grad=True)
    weights = ElementWeights(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    term = policy_loss(log_prob, torch.zeros(1, 2), torch.ones(1, 2), weights, CLIP)
    (gradient,) = torch.autograd.grad(term.loss_sum, log_prob)
    assert float(term.loss_sum.detach()) == -1.0 and gradient.tolist() == [[0.0, -1.0]]  # inf * 0 would be NaN
    assert float(term.metrics["ratio"]) == 1.0


def test_loss_and_metrics_use_their_own_weights():
    # losses -1, -2 with weights 1, 1 (an episode's sum) and shares .5, .5 (its mean)
    weights = ElementWeights(torch.ones(1, 2), torch.full((1, 2), 0.5))
    term = policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), weights, CLIP)
    assert float(term.loss_sum) == -3.0 and float(term.metrics["ratio"]) == 1.0


@pytest.mark.parametrize("name", ["log_prob_BU", "old_log_prob_BU", "advantage_BU", "importance_BU"])
@pytest.mark.parametrize("shape", [(4,), (4, 8), (1, 4)])
def test_b_and_b1_cannot_be_confused(name: str, shape: tuple[int, ...]):
    inputs = {n: torch.zeros(4, 1) for n in ("log_prob_BU", "old_log_prob_BU", "advantage_BU", "importance_BU")}
    inputs[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"{name} has shape \[.*\]; it must be \[4, 1\]"):
        policy_loss(weights=ones(4, 1), clip=CLIP, **inputs)


@pytest.mark.parametrize("name", ["value_B", "old_value_B", "return_B", "weight_B"])
def test_values_are_b_and_never_b1(name: str):
    inputs = {n: torch.zeros(4) for n in ("value_B", "old_value_B", "return_B", "weight_B")}
    inputs[name] = torch.zeros(4, 1)
    with pytest.raises(ValueError, match=rf"{name} has shape \[4, 1\]"):
        value_loss(**inputs)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "huber", "loss", "gradient"),
    [
        (2.0, 2.0, 5.0, None, None, 4.5, -3.0),  # 3^2 / 2
        (2.0, 2.0, 5.0, None, 1.0, 2.5, -1.0),  # Huber: 1 * (3 - 1 / 2), slope 1
        (2.0, 2.0, 2.5, None, 1.0, 0.125, -0.5),  # inside delta: e^2 / 2
        (3.0, 2.0, 5.0, 0.2, None, 3.92, 0.0),  # moved towards the target by more than the clip: (2.2 - 5)^2 / 2, no more pull
        (2.1, 2.0, 5.0, 0.2, None, 4.205, -2.9),  # within the clip
        (1.0, 2.0, 5.0, 0.2, None, 8.0, -4.0),  # moved away: the plain loss is larger, and pulls
    ],
)
def test_value_loss_by_hand(value, old, target, clip, huber, loss, gradient):
    value_B = torch.tensor([value, 100.0], dtype=torch.float64, requires_grad=True)
    weight_B = torch.tensor([2.0, 0.0])  # the second row is masked
    old_B, return_B = torch.tensor([old, 0.0], dtype=torch.float64), torch.tensor([target, 0.0], dtype=torch.float64)
    term = value_loss(value_B, old_B, return_B, weight_B, clip, huber)
    (slope,) = torch.autograd.grad(term.loss_sum, value_B)
    assert float(term.loss_sum.detach()) == pytest.approx(2 * loss) and slope.tolist() == pytest.approx([2 * gradient, 0.0])
    assert float(term.metrics["value_clip_fraction"]) == (2.0 if gradient == 0.0 else 0.0)


def test_entropy_bonus_raises_entropy():
    entropy = torch.tensor([[1.0, 3.0]], requires_grad=True)
    term = entropy_bonus(entropy, ones(1, 2))
    (gradient,) = torch.autograd.grad(term.loss_sum, entropy)
    assert float(term.loss_sum.detach()) == -4.0 and float(term.metrics["entropy"]) == 4.0 and gradient.tolist() == [[-1.0, -1.0]]


def test_kl_estimators_by_hand():
    # d = log 2: k1 = .6931472, k2 = .2402265, k3 = 1/2 - 1 + .6931472
    d = torch.tensor([[math.log(2.0)]])
    assert [float(kl_estimate(kind, d, torch.zeros(1, 1))) for kind in ("k1", "k2", "k3")] == pytest.approx(
        [0.6931472, 0.2402265, 0.1931472], abs=1e-6
    )


GRID = torch.linspace(-12, 12, 4801, dtype=torch.float64)[:, None]


def log_normal(mean: torch.Tensor | float, std: float) -> torch.Tensor:
    mean = torch.as_tensor(mean, dtype=torch.float64)
    return -0.5 * ((GRID - mean) / std).square() - math.log(std) - 0.5 * math.log(2 * math.pi)


def expectation_weights(log_prob: torch.Tensor) -> ElementWeights:
    """Weights that turn the sum over the grid into the expectation under the density."""
    density = (log_prob.exp() * (GRID[1] - GRID[0])).detach()
    return ElementWeights(density, density)


def test_kl_losses_follow_the_divergences_they_name():
    """pi = N(.3, 1), ref = N(1, 1.2^2), by quadrature.

    d KL(pi || ref) / d mean = (mean - 1) / 1.44; d KL(ref || pi) / d mean = mean - 1.
    """
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    log_prob, reference = log_normal(mean, 1.0), log_normal(1.0, 1.2)
    weights = expectation_weights(log_prob)
    (k2,) = torch.autograd.grad(kl_loss("k2", log_prob, reference, weights).loss_sum, mean, retain_graph=True)
    (k3,) = torch.autograd.grad(kl_loss("k3", log_prob, reference, weights).loss_sum, mean, retain_graph=True)
    (k1,) = torch.autograd.grad((weights.loss_BU * kl_estimate("k1", log_prob, reference)).sum(), mean)
    assert float(k2) == pytest.approx(-0.7 / 1.44, abs=1e-6)
    assert float(k3) == pytest.approx(-0.7, abs=1e-6)
    assert float(k1) == pytest.approx(0.0, abs=1e-9)
    exact = math.log(1.2) + (1 + 0.49) / 2.88 - 0.5
    assert float(kl_loss("k3", log_prob, reference, weights).metrics["kl_reference"]) == pytest.approx(exact, abs=1e-6)
    with pytest.raises(ValueError, match="gradient of k1 is zero in expectation"):
        kl_loss("k1", log_prob, reference, weights)


def test_distillation_follows_the_reverse_divergence():
    """As a policy gradient, on the student's samples: student N(.3, 1), teacher N(1, 2^2); gradient of KL as above."""
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    student, teacher = log_normal(mean, 1.0), log_normal(1.0, 2.0)
    advantage = distillation_advantage(student, teacher, bound=1e9)
    term = policy_loss(student, student.detach(), advantage, expectation_weights(student), ClipSettings())
    (gradient,) = torch.autograd.grad(term.loss_sum, mean)
    assert float(gradient) == pytest.approx(-0.7 / 4, abs=1e-6)
    assert float(distillation_advantage(student, teacher, bound=2.0).abs().max()) == 2.0


def test_velocity_error_is_over_real_dimensions_and_regresses_to_the_teacher():
    student = torch.tensor([[[1.0, 2.0, 50.0], [0.0, 0.0, 50.0]]], requires_grad=True)
    teacher = torch.tensor([[[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    error_BC = velocity_error(student, teacher, action_dims=2)
    assert error_BC.tolist() == [[2.5, 0.0]]  # (1 + 4) / 2
    term = regression_loss(error_BC, ones(1, 2))
    term.loss_sum.backward()
    assert student.grad is not None and student.grad.tolist() == [[[1.0, -2.0, 0.0], [0.0, 0.0, 0.0]]]
    assert teacher.grad is None
    with pytest.raises(ValueError, match=r"target_BCA has shape \[1, 2, 2\]; it must be \[1, 2, 3\]"):
        velocity_error(student, teacher[..., :2], 2)


@pytest.mark.parametrize(("kl", "full", "expected"), [(0.0, None, 0.01), (0.1, 0.2, 0.005), (0.5, 0.2, 0.01), (-0.1, 0.2, 0.0)])
def test_cloning_coefficient_by_hand(kl, full, expected):
    assert cloning_coefficient(0.01, kl, full) == pytest.approx(expected)


def test_terms_add_up():
    first, second = LossTerm(torch.tensor(3.0), {"ratio": torch.tensor(1.0)}), LossTerm(torch.tensor(4.0), {"value": torch.tensor(2.0)})
    total = add_terms({"policy": (1.0, first), "value": (0.5, second)})
    assert float(total.loss_sum) == 5.0
    assert {name: float(value) for name, value in total.metrics.items()} == {
        "loss_policy": 3.0, "loss_value": 4.0, "ratio": 1.0, "value": 2.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="term 'again' has metrics that another term has: ratio"):
        add_terms({"policy": (1.0, first), "again": (1.0, first)})


BEHAVIOUR = torch.log(torch.tensor([[0.5, 0.1, 0.4]]))
PROXIMAL = torch.log(torch.tensor([[0.25, 0.15, 0.4 * 4]]))  # weights 0.5, 1.5, 4


def test_corrections_by_hand():
    clip = old_policy(Correction("behaviour_clip"), BEHAVIOUR, None)
    assert clip.log_prob_BU.equal(BEHAVIOUR) and clip.importance_BU is None
    truncated = old_policy(Correction("truncated", cap=2.0), BEHAVIOUR, PROXIMAL)
    decoupled = old_policy(Correction("decoupled", cap=2.0), BEHAVIOUR, PROXIMAL)
    assert truncated.log_prob_BU.equal(PROXIMAL) and decoupled.log_prob_BU.equal(PROXIMAL)
    assert truncated.importance_BU is not None and decoupled.importance_BU is not None
    assert truncated.importance_BU[0].tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert decoupled.importance_BU[0].tolist() == pytest.approx([0.5, 1.5, 0.0])
    assert old_policy(Correction(), BEHAVIOUR, PROXIMAL).log_prob_BU.equal(PROXIMAL)


@pytest.mark.parametrize("kind", ["truncated", "decoupled"])
def test_corrections_change_nothing_on_policy(kind):
    """With proximal = behaviour the loss is plain PPO's, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    now, old, advantage = torch.randn(3, 6, 4, generator=generator)
    chosen = old_policy(Correction(kind), old, old.clone())
    corrected = policy_loss(now, chosen.log_prob_BU, advantage, ones(6, 4), DUAL, chosen.importance_BU)
    assert corrected.loss_sum.equal(policy_loss(now, old, advantage, ones(6, 4), DUAL).loss_sum)


def test_the_correction_makes_old_data_unbiased():
    """Behaviour N(0, 1), proximal = theta N(.3, 1), A = x^2: d E_theta[x^2] / d mean = 2 mean. Without a correction it is biased."""
    mean = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    behaviour, theta = log_normal(0.0, 1.0), log_normal(mean, 1.0)
    weights, wide = expectation_weights(behaviour), ClipSettings(high=1e9)
    chosen = old_policy(Correction("truncated", cap=1e6), behaviour, theta.detach())
    term = policy_loss(theta, chosen.log_prob_BU, GRID.square(), weights, wide, chosen.importance_BU)
    (gradient,) = torch.autograd.grad(term.loss_sum, mean, retain_graph=True)
    assert float(gradient) == pytest.approx(-0.6, abs=1e-6)
    recomputed = policy_loss(theta, theta.detach(), GRID.square(), weights, wide)  # miles #1829: silently recomputed
    (biased,) = torch.autograd.grad(recomputed.loss_sum, mean)
    assert abs(float(biased) + 0.6) > 0.1


def test_effective_sample_share_by_hand():
    # (1 + 3)^2 / (2 * (1 + 9)) = .8; the masked 100 does not count
    weight, mask = torch.tensor([[1.0, 3.0, 100.0]]), torch.tensor([[True, True, False]])
    assert effective_sample_share(weight, mask) == pytest.approx(0.8)
    assert effective_sample_share(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)) == 1.0
    assert effective_sample_share(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)) == 0.0


def test_contradicting_settings_are_refused():
    with pytest.raises(ConfigError, match=r"clip.low is 1.0; allowed: above 0 and below 1"):
        ClipSettings(low=1.0)
    with pytest.raises(ConfigError, match=r"clip.high is 0; allowed: above 0"):
        ClipSettings(high=0)
    with pytest.raises(ConfigError, match=r"clip.dual is 1.0; allowed: above 1"):
        ClipSettings(dual=1.0)
    with pytest.raises(ConfigError, match=r"correction.cap is 0.5; allowed: at least 1"):
        Correction("truncated", cap=0.5)
    with pytest.raises(ValueError, match="'decoupled' needs the proximal log-probabilities"):
        old_policy(Correction("decoupled"), BEHAVIOUR, None)
    with pytest.raises(ValueError, match="'behaviour_clip' takes the ratio against the record"):
        old_policy(Correction("behaviour_clip"), BEHAVIOUR, PROXIMAL)
