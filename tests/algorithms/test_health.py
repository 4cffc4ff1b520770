"""The on-policy check, explained variance and the gradient's signal-to-noise ratio."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.advantages import Moments
from vla_rl.algorithms.health import OnPolicyError, check_on_policy, exceeds_target_kl, explained_variance, gradient_noise, log_prob_gap

RECORDED = torch.tensor([[-3.0, -4.0], [-5.0, -6.0]])
MASK = torch.tensor([[True, True], [True, False]])


def test_gap_by_hand():
    gap = log_prob_gap(RECORDED + torch.tensor([[0.25, -0.5], [0.0, 99.0]]), RECORDED, MASK)
    assert (gap.largest, gap.mean) == (0.5, 0.25)
    assert log_prob_gap(RECORDED, RECORDED, torch.zeros(2, 2, dtype=torch.bool)).largest == 0.0


@pytest.mark.parametrize(
    ("difference", "same_shape", "precision", "passes"),
    [
        (0.0, True, "fp32", True),
        (2e-6, True, "fp32", False),  # exactly 0 where the shapes are equal
        (5e-5, False, "fp32", True),
        (2e-4, False, "fp32", False),
        (0.4, False, "bf16", True),
        (0.4, True, "bf16", True),
        (0.6, False, "bf16", False),
        (float("nan"), False, "bf16", False),
    ],
)
def test_on_policy_bounds(difference, same_shape, precision, passes):
    gap = log_prob_gap(RECORDED + torch.tensor([[0.0, difference], [0.0, 0.0]]), RECORDED, MASK)
    if passes:
        check_on_policy(gap, same_shape, precision)
        return
    with pytest.raises(OnPolicyError, match=r"differs by up to .* nats .*where both have the same weights; allowed: .*Check that both use"):
        check_on_policy(gap, same_shape, precision)


def test_gap_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"recorded_BC has shape \[2, 1\]; it must be \[2, 2\]"):
        log_prob_gap(RECORDED, RECORDED[:, :1], MASK)
    with pytest.raises(ValueError, match=r"log_prob_BC has shape \[2\]; it must have 2 dimensions"):
        log_prob_gap(RECORDED[0], RECORDED[0], MASK[0])


@pytest.mark.parametrize(("kl", "target", "stops"), [(0.029, 0.02, False), (0.031, 0.02, True), (9.0, None, False)])
def test_target_kl(kl, target, stops):
    assert exceeds_target_kl(kl, target) is stops


def test_explained_variance_by_hand():
    # returns 0, 2, 4 (variance 8/3); values 0, 2, 3: errors 0, 0, 1 (variance 2/9): 1 - 1/12
    returns, values, mask = torch.tensor([0.0, 2, 4]), torch.tensor([0.0, 2, 3]), torch.ones(3, dtype=torch.bool)
    target = Moments.of(returns, mask)
    assert explained_variance(Moments.of(returns - values, mask), target) == pytest.approx(11 / 12)
    assert explained_variance(Moments.of(returns - 2.0, mask), target) == pytest.approx(0.0)
    assert math.isnan(explained_variance(target, Moments.of(torch.ones(3), mask)))


def noise_of(gradients_MP: torch.Tensor):
    return gradient_noise(gradients_MP.double().square().sum(1), float(gradients_MP.double().mean(0).square().sum()))


def test_gradient_noise_by_hand():
    # g = (3, 1), (3, -1): mean (3, 0); q = 10, m = 9; tr = 2 (10 - 9) = 2 (the unbiased variance of 1, -1); signal = 9 - 1 = 8
    noise = noise_of(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))
    assert (noise.signal_square, noise.noise_trace) == pytest.approx((8.0, 2.0))
    assert (noise.signal_to_noise, noise.noise_scale) == pytest.approx((8.0, 0.25))


def test_pure_noise_and_pure_signal():
    noise = noise_of(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # m = 0, tr = 2, signal -1
    assert noise.signal_to_noise == -1.0 and noise.noise_scale == math.inf
    signal = noise_of(torch.ones(4, 3))
    assert signal.signal_to_noise == math.inf and signal.noise_scale == 0.0
    with pytest.raises(ValueError, match="at least 2 parts, got 1"):
        gradient_noise(torch.ones(1), 1.0)


@settings(deadline=None, max_examples=20)
@given(parts=st.integers(2, 8), seed=st.integers(0, 100))
def test_noise_trace_is_the_sample_covariances(parts, seed):
    gradients = torch.randn(parts, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = noise_of(gradients)
    assert noise.noise_trace == pytest.approx(float(torch.cov(gradients.T).diagonal().sum()), rel=1e-9)
    assert noise.signal_square == pytest.approx(float(gradients.mean(0).square().sum()) - noise.noise_trace / parts, abs=1e-9)


def test_the_estimates_are_unbiased():
    """Gradients N((1, 0, 0, 0), 2^2) of 4 parts: |E g|^2 = 1, tr = 16; the mean of 4,000 estimates."""
    generator = torch.Generator().manual_seed(0)
    estimates = [noise_of(torch.tensor([1.0, 0, 0, 0]) + 2 * torch.randn(4, 4, generator=generator)) for _ in range(4000)]
    signal = torch.tensor([estimate.signal_square for estimate in estimates], dtype=torch.float64)
    trace = torch.tensor([estimate.noise_trace for estimate in estimates], dtype=torch.float64)
    assert float(signal.mean()) == pytest.approx(1.0, abs=5 * float(signal.std()) / 4000**0.5)
    assert float(trace.mean()) == pytest.approx(16.0, abs=5 * float(trace.std()) / 4000**0.5)
