"""Flow matching in both directions of time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.policies.flow import Flow, TimeDirection, row_noise

CPU = torch.device("cpu")
DIRECTIONS = list(TimeDirection)


@pytest.fixture(params=DIRECTIONS, ids=[direction.value for direction in DIRECTIONS])
def flow(request: pytest.FixtureRequest) -> Flow:
    return Flow(request.param)


def test_ends_of_the_path_by_hand() -> None:
    actions, noise = torch.full((2, 1, 1), 3.0), torch.full((2, 1, 1), 7.0)
    time = torch.tensor([0.0, 0.25])
    at_one = Flow(TimeDirection.NOISE_AT_ONE).path(actions, noise, time)
    at_zero = Flow(TimeDirection.NOISE_AT_ZERO).path(actions, noise, time)
    assert at_one.flatten().tolist() == [3.0, 4.0]
    assert at_zero.flatten().tolist() == [7.0, 6.0]


def test_target_is_the_derivative_of_the_path(flow: Flow) -> None:
    generator = torch.Generator().manual_seed(0)
    actions, noise = (torch.randn(4, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    time, step = torch.rand(4, generator=generator, dtype=torch.float64), 1e-6
    slope = (flow.path(actions, noise, time + step) - flow.path(actions, noise, time - step)) / (2 * step)
    torch.testing.assert_close(slope, flow.target(actions, noise), atol=1e-8, rtol=0)  # float64 differences of a linear function


def test_euler_follows_a_constant_velocity_to_the_actions_in_any_number_of_steps(flow: Flow) -> None:
    generator = torch.Generator().manual_seed(0)
    actions, noise = torch.randn(4, 3, 2, generator=generator), torch.randn(4, 3, 2, generator=generator)
    for steps in (1, 4, 10):
        reached = flow.euler(lambda x, time: flow.target(actions, noise), noise, steps)
        torch.testing.assert_close(reached, actions, atol=2e-6, rtol=0)  # a few float32 additions


def test_euler_grids_by_hand() -> None:
    seen: list[float] = []

    def velocity(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        seen.append(float(time[0]))
        return torch.zeros_like(x)

    Flow(TimeDirection.NOISE_AT_ONE).euler(velocity, torch.zeros(1, 1, 1), 4)
    Flow(TimeDirection.NOISE_AT_ZERO).euler(velocity, torch.zeros(1, 1, 1), 4)
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0, 0.25, 0.5, 0.75]


def test_both_directions_sample_the_same_actions_from_mirrored_models() -> None:
    def velocity(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return torch.sin(3 * x) + share[:, None, None]

    noise = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    at_one = Flow(TimeDirection.NOISE_AT_ONE).euler(velocity, noise, 7)
    at_zero = Flow(TimeDirection.NOISE_AT_ZERO).euler(lambda x, time: -velocity(x, 1 - time), noise, 7)
    torch.testing.assert_close(at_one, at_zero, atol=1e-6, rtol=0)  # 1 - t rounds differently from t


@given(share=st.floats(0, 1), value=st.floats(-3, 3), noise=st.floats(-3, 3))
def test_endpoints_invert_the_path(share: float, value: float, noise: float) -> None:
    for direction in DIRECTIONS:
        flow = Flow(direction)
        actions_111, noise_111 = torch.full((1, 1, 1), value), torch.full((1, 1, 1), noise)
        time = flow.time_of(torch.tensor([share]))
        x = flow.path(actions_111, noise_111, time)
        found = flow.endpoints(x, flow.target(actions_111, noise_111), time)
        torch.testing.assert_close(torch.stack(found), torch.stack((actions_111, noise_111)), atol=2e-6, rtol=0)


def test_training_times_have_the_published_distribution(flow: Flow) -> None:
    uniform = (torch.arange(100_000) + 0.5) / 100_000
    share = flow.time_of(flow.sample_time(uniform))
    beta = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0))
    assert share.min() >= 0.001
    assert share.max() <= 1.0
    assert math.isclose(float(share.mean()), float(beta.mean) * 0.999 + 0.001, abs_tol=1e-4)
    assert math.isclose(float(share.std()), float(beta.stddev) * 0.999, abs_tol=1e-4)


def test_noise_of_a_row_depends_on_its_seed_alone() -> None:
    alone = row_noise([17], (8, 7), 4, CPU)
    among = row_noise([3, 17, 2**62 + 5], (8, 7), 4, CPU)
    for one, many in zip((alone.noise_BCA, alone.uniform_B, alone.shift_BK), (among.noise_BCA, among.uniform_B, among.shift_BK)):
        assert torch.equal(one[0], many[1])
    assert not torch.equal(among.noise_BCA[0], among.noise_BCA[2])


def test_noise_is_standard_normal_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    numbers = row_noise(range(2000), (8, 7), 4, CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    assert abs(float(numbers.noise_BCA.mean())) < 5 / math.sqrt(numbers.noise_BCA.numel())  # five standard errors
    assert abs(float(numbers.noise_BCA.std()) - 1) < 5 / math.sqrt(2 * numbers.noise_BCA.numel())
