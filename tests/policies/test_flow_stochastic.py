"""Denoise steps as densities: golden numbers, both directions of time, a slow reference, and rollout against trainer."""

import math
from dataclasses import replace

import pytest
import torch

from vla_rl.algorithms.health import OnPolicyError, check_on_policy, log_prob_gap
from vla_rl.algorithms.reductions import LogProbReduction, reduce_per_action
from vla_rl.errors import UserError
from vla_rl.policies.flow import Flow, TimeDirection
from vla_rl.policies.flow_stochastic import (
    Exploration,
    StochasticDraws,
    chain_log_prob,
    gaussian_entropy,
    gaussian_log_prob,
    learned_std,
    recorded_steps,
    sample_chain,
    sde_std,
    stochastic_draws,
)

DIRECTIONS = [Flow(TimeDirection.NOISE_AT_ONE), Flow(TimeDirection.NOISE_AT_ZERO)]
ROWS, CHUNK, DIMS, REAL, STEPS = 3, 4, 5, [0, 2], 5


class Field(torch.nn.Module):
    """A nonlinear velocity with a noise head, float32, whose rows do not depend on each other."""

    def __init__(self, flow: Flow, seed: int = 0) -> None:
        super().__init__()
        self.flow = flow
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(0.5 * torch.randn(DIMS, DIMS, generator=generator))
        self.spread = torch.nn.Parameter(torch.randn(DIMS, DIMS, generator=generator))

    def forward(self, x_BCA: torch.Tensor, time_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share_B11 = self.flow.time_of(time_B)[:, None, None]
        away_BCA = torch.tanh(x_BCA @ self.weight) * (0.5 + share_B11)
        sign = 1.0 if self.flow.direction is TimeDirection.NOISE_AT_ONE else -1.0
        return sign * away_BCA, x_BCA @ self.spread + share_B11


def chain_of(flow: Flow, exploration: Exploration, seeds=(11, 12, 13), steps: int = STEPS):
    field = Field(flow)
    draws = stochastic_draws(seeds, steps, (CHUNK, DIMS), torch.device("cpu"))
    noise_BCA = torch.randn(len(seeds), CHUNK, DIMS, generator=torch.Generator().manual_seed(1))
    return field, noise_BCA, draws, sample_chain(flow, field, noise_BCA, draws, exploration, REAL)


def recomputed(flow: Flow, field: Field, chain, exploration: Exploration, steps: int = STEPS):
    return chain_log_prob(flow, field, chain.x_t_BKCA, chain.x_next_BKCA, chain.denoise_index_BK, steps, exploration, REAL)


def test_sde_std_is_the_published_table():
    # a = 0.5, N = 5, tau = 1, .8, .6, .4, .2: s = a sqrt(tau / (1 - tau)) = a sqrt(5), 1, .61237, .40825, .25; std = s sqrt(1/5)
    assert sde_std(5, 0.5) == pytest.approx([0.5, 0.4472136, 0.2738613, 0.1825742, 0.1118034], abs=5e-8)
    assert sde_std(4, 0.5)[-1] == pytest.approx(0.1443376, abs=5e-8)  # .5 sqrt(.25 / .75) sqrt(1/4)
    assert sde_std(1, 0.3) == [0.3]  # tau_0 = 1 and the next grid point is data: a sqrt(1 / 1)


def rlinf_pi0_step(x: float, v: float, t: float, delta: float, a: float, first: bool) -> tuple[float, float]:
    """algorithms.md 1.8, t = 1 noise, in its own variables: data and noise estimates with their weights."""
    sigma = a * math.sqrt(t / (1 - (t - delta if first else t)))
    data, noise = x - v * t, x + v * (1 - t)
    return data * (1 - (t - delta)) + noise * (t - delta - sigma**2 * delta / (2 * t)), sigma * math.sqrt(delta)


def gr00t_step(x: float, v: float, t: float, delta: float, a: float, first: bool) -> tuple[float, float]:
    """algorithms.md 1.10, t = 0 noise: x0 is the noise estimate and x1 the data estimate."""
    sigma = a * math.sqrt((1 - t) / (t + delta if first else t))
    noise, data = x - v * t, x + v * (1 - t)
    return noise * (1 - (t + delta) - sigma**2 * delta / (2 * (1 - t))) + data * (t + delta), sigma * math.sqrt(delta)


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
@pytest.mark.parametrize("step", range(STEPS))
def test_sde_step_is_the_published_one_in_both_directions_of_time(flow: Flow, step: int):
    reference = rlinf_pi0_step if flow.direction is TimeDirection.NOISE_AT_ONE else gr00t_step
    time = flow.grid(STEPS)[step]
    mean, std = reference(0.7, -1.3, time, 1 / STEPS, 0.5, first=step == 0)

    def velocity(x_BCA, time_B):
        assert time_B.tolist() == pytest.approx([time])
        return torch.full_like(x_BCA, -1.3), None

    x_next = torch.full((1, 1, 1, 1), 0.9)
    log_prob_BC, entropy_BC = chain_log_prob(
        flow, velocity, torch.full((1, 1, 1, 1), 0.7), x_next, torch.tensor([[step]]), STEPS, Exploration(), [0]
    )
    expected = -0.5 * ((0.9 - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    assert float(log_prob_BC) == pytest.approx(expected, rel=1e-5)  # float32 arithmetic
    assert float(entropy_BC) == pytest.approx(math.log(std) + 0.5 * math.log(2 * math.pi * math.e), rel=1e-6)


def test_hand_computed_mean_of_the_second_step():
    # N = 5, i = 1, tau = .8, s = 1, delta = .2; x = 1, u = .5: ode = 1 - .1 = .9; noise = 1 + .2 * .5 = 1.1;
    # pull = 1 * .2 / (2 * .8) = .125; mean = .9 - .125 * 1.1 = .7625; at the mean, log N = -log(.4472136) - .9189385 = -.1142196
    x_next = torch.full((1, 1, 1, 1), 0.7625)
    log_prob_BC, _ = chain_log_prob(
        DIRECTIONS[0],
        lambda x, t: (torch.full_like(x, 0.5), None),
        torch.ones(1, 1, 1, 1),
        x_next,
        torch.tensor([[1]]),
        5,
        Exploration(),
        [0],
    )
    assert float(log_prob_BC) == pytest.approx(-0.1142196, abs=1e-6)


def test_gaussian_log_prob_counts_live_dimensions_only():
    # two live dimensions of three: z = 1 and -2 with std .5 and 1: -.5 + .6931472 - .9189385, -2 - 0 - .9189385; sum -3.6447298
    x = torch.tensor([[[0.5, 99.0, -2.0]]])
    std = torch.tensor([[[0.5, 1e-3, 1.0]]])
    assert float(gaussian_log_prob(x, torch.zeros(1, 1, 3), std, [0, 2])) == pytest.approx(-3.6447298, abs=1e-6)
    # entropies: log .5 + 1.4189385 and 0 + 1.4189385
    assert float(gaussian_entropy(std, torch.Size((1, 1, 3)), [0, 2])) == pytest.approx(2.1447299, abs=1e-6)


def test_noise_over_a_chunk_has_the_density_of_what_was_drawn():
    # a chunk of two actions, one dimension, u = 0, so that the ODE stands still; last step of 5: tau = .2, s = .5 sqrt(.2 / .8) = .25,
    # std = .25 sqrt(.2) = .1118034, noise estimate = x, pull = .25^2 * .2 / (2 * .2) = .03125.
    # x = 1 and 3, so the mean's mean is 2 * (1 - .03125) = 1.9375; x_next = 2 and 2.1: mean 2.05, z = .1125 / .1118034 = 1.0062306;
    # log N = -z^2 / 2 - log .1118034 - .9189385 = .7658248, for each action the same number
    x, x_next = torch.tensor([[[[1.0], [3.0]]]]), torch.tensor([[[[2.0], [2.1]]]])
    log_prob_BC, entropy_BC = chain_log_prob(
        DIRECTIONS[0],
        lambda x, t: (torch.zeros_like(x), None),
        x,
        x_next,
        torch.tensor([[4]]),
        5,
        Exploration("flow_sde", "last", noise_over="chunk"),
        [0],
    )
    assert log_prob_BC.tolist() == [pytest.approx([0.7658248] * 2, abs=1e-5)]
    for executed in ([[True, True]], [[True, False]]):  # the draw is what it is, also where the episode ends inside the chunk
        total_B1 = reduce_per_action(log_prob_BC, torch.tensor(executed), LogProbReduction(actions="mean"), 1, 1)
        assert float(total_B1) == pytest.approx(0.7658248, abs=1e-5)
    # entropy of one number with std .1118034: log std + 1.4189385 = -.7720743
    assert entropy_BC.tolist() == [pytest.approx([-0.7720743] * 2, abs=1e-6)]


@pytest.mark.parametrize("method", ["flow_sde", "flow_noise"])
def test_noise_over_a_chunk_moves_its_actions_alike(method):
    """The last step of each row: the ODE's point and one number per dimension, the same for all actions."""
    flow, exploration = DIRECTIONS[1], Exploration(method, "last", noise_over="chunk")
    field, noise_BCA, draws, chain = chain_of(flow, exploration)
    quiet = replace(draws, noise_BNCA=torch.zeros_like(draws.noise_BNCA))
    moved_BCA = chain.actions_BCA - sample_chain(flow, field, noise_BCA, quiet, exploration, REAL).actions_BCA
    assert torch.allclose(moved_BCA, moved_BCA[:, :1].expand_as(moved_BCA), atol=1e-6)  # float32 differences of numbers near 1
    assert chain.denoise_index_BK.tolist() == [[STEPS - 1]] * ROWS
    if method == "flow_sde":
        assert torch.allclose(moved_BCA[:, 0], sde_std(STEPS, 0.5)[-1] * draws.noise_BNCA[:, STEPS - 1, 0], atol=1e-6)


def test_learned_std_covers_its_interval_evenly_in_log_variance():
    low, middle, high = learned_std(torch.tensor([-30.0, 0.0, 30.0]), 0.08, 0.16).tolist()
    assert (low, high) == pytest.approx((0.08, 0.16), rel=1e-6)
    assert middle == pytest.approx(math.sqrt(0.08 * 0.16), rel=1e-6)


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
def test_flow_noise_has_the_mean_of_the_ode_and_the_std_of_the_head(flow: Flow):
    exploration = Exploration("flow_noise", "all")
    field, _, draws, chain = chain_of(flow, exploration)
    grid = flow.grid(STEPS)
    log_prob_BC = torch.zeros(ROWS, CHUNK)
    for step in range(STEPS):
        x_BCA = chain.x_t_BKCA[:, step]
        velocity_BCA, raw_BCA = field(x_BCA, torch.full((ROWS,), grid[step]))
        mean_BCA, std_BCA = x_BCA + (grid[step + 1] - grid[step]) * velocity_BCA, learned_std(raw_BCA, 0.08, 0.16)
        torch.testing.assert_close(chain.x_next_BKCA[:, step], mean_BCA + std_BCA * draws.noise_BNCA[:, step])
        log_prob_BC += torch.distributions.Normal(mean_BCA, std_BCA).log_prob(chain.x_next_BKCA[:, step])[..., REAL].sum(-1)
    torch.testing.assert_close(chain.log_prob_BC, log_prob_BC.detach(), atol=1e-4, rtol=1e-5)  # ten float32 terms of size 10


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
def test_one_stochastic_step_leaves_the_others_to_the_ode(flow: Flow):
    field, noise_BCA, draws, chain = chain_of(flow, Exploration())
    grid = flow.grid(STEPS)
    for row in range(ROWS):
        x = noise_BCA[row : row + 1]
        for step in range(STEPS):
            if step == int(draws.index_B[row]):
                torch.testing.assert_close(chain.x_t_BKCA[row, 0], x[0])
                x = chain.x_next_BKCA[row, 0][None]
            else:
                x = x + (grid[step + 1] - grid[step]) * field(x, torch.full((1,), grid[step]))[0]
        torch.testing.assert_close(chain.actions_BCA[row], x[0].detach())
    assert chain.denoise_index_BK[:, 0].equal(draws.index_B)


def test_a_chain_without_noise_is_the_euler_sampler_bit_for_bit():
    flow = DIRECTIONS[0]
    field = Field(flow)
    noise_BCA = torch.randn(ROWS, CHUNK, DIMS)
    draws = stochastic_draws((1, 2, 3), STEPS, (CHUNK, DIMS), torch.device("cpu"))
    flow_noise = Exploration("flow_noise", "all", std_min=1e-30, std_max=1e-30)  # x + 1e-30 is x in float32
    chain = sample_chain(flow, field, noise_BCA, draws, flow_noise, REAL)
    assert chain.actions_BCA.equal(flow.euler(lambda x, t: field(x, t)[0], noise_BCA, STEPS))


EXPLORATIONS = [
    Exploration(method, steps, noise_over=over)
    for method in ("flow_sde", "flow_noise")
    for steps in ("one", "last", "all")
    for over in ("action", "chunk")
]


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
@pytest.mark.parametrize("exploration", EXPLORATIONS, ids=lambda e: f"{e.method}-{e.stochastic_steps}-{e.noise_over}")
def test_trainer_recomputes_the_rollouts_log_prob_exactly(flow: Flow, exploration: Exploration):
    field, _, _, chain = chain_of(flow, exploration)
    log_prob_BC, entropy_BC = recomputed(flow, field, chain, exploration)
    assert log_prob_BC.equal(chain.log_prob_BC)
    check_on_policy(log_prob_gap(log_prob_BC, chain.log_prob_BC, torch.ones(ROWS, CHUNK, dtype=torch.bool)), same_batch_shape=True)
    assert entropy_BC.shape == (ROWS, CHUNK)
    kept = recorded_steps(exploration, STEPS)
    assert chain.x_t_BKCA.shape == chain.x_next_BKCA.shape == (ROWS, kept, CHUNK, DIMS)
    log_prob_BC.sum().backward()
    assert field.weight.grad is not None and bool(field.weight.grad.any())
    assert (field.spread.grad is not None) == (exploration.method == "flow_noise")


@pytest.mark.parametrize("exploration", EXPLORATIONS, ids=lambda e: f"{e.method}-{e.stochastic_steps}-{e.noise_over}")
def test_a_planted_mismatch_trips_the_check(exploration: Exploration):
    flow = DIRECTIONS[0]
    field, _, _, chain = chain_of(flow, exploration)
    mask = torch.ones(ROWS, CHUNK, dtype=torch.bool)
    wrong_grid = replace(chain, denoise_index_BK=(chain.denoise_index_BK + 1) % STEPS)
    wrong_sigma = replace(exploration, noise_level=0.45, std_max=0.15)
    for settings_, record in ((exploration, wrong_grid), (wrong_sigma, chain)):
        log_prob_BC, _ = recomputed(flow, field, record, settings_)
        with pytest.raises(OnPolicyError, match="denoise grid and step index, noise level"):
            check_on_policy(log_prob_gap(log_prob_BC.detach(), chain.log_prob_BC, mask), same_batch_shape=False)
    if exploration.stochastic_steps == "one":
        log_prob_BC, _ = recomputed(flow, field, chain, exploration, steps=2 * STEPS)  # another number of denoise steps
        with pytest.raises(OnPolicyError):
            check_on_policy(log_prob_gap(log_prob_BC.detach(), chain.log_prob_BC, mask), same_batch_shape=False)


def test_rows_do_not_depend_on_their_batch():
    flow, exploration = DIRECTIONS[0], Exploration("flow_sde", "one")
    together = stochastic_draws((5, 6, 7), STEPS, (CHUNK, DIMS), torch.device("cpu"))
    alone = stochastic_draws((7,), STEPS, (CHUNK, DIMS), torch.device("cpu"))
    assert alone.noise_BNCA[0].equal(together.noise_BNCA[2]) and alone.index_B[0] == together.index_B[2]
    field = Field(flow)
    noise_BCA = torch.randn(3, CHUNK, DIMS)
    chain = sample_chain(flow, field, noise_BCA, together, exploration, REAL)
    single = sample_chain(flow, field, noise_BCA[2:], alone, exploration, REAL)
    torch.testing.assert_close(single.actions_BCA[0], chain.actions_BCA[2])
    torch.testing.assert_close(single.log_prob_BC[0], chain.log_prob_BC[2], atol=1e-4, rtol=0)  # the on-policy bound for float32


def test_draws_are_another_stream_than_the_initial_noise_and_steps_are_uniform():
    draws = stochastic_draws(range(2000), 4, (1, 1), torch.device("cpu"))
    first = torch.stack([torch.randn(1, generator=torch.Generator().manual_seed(seed)) for seed in range(2000)])[:, 0]
    correlation = float(torch.corrcoef(torch.stack((first, draws.noise_BNCA[:, 0, 0, 0])))[0, 1])
    assert abs(correlation) < 0.1  # 4.5 standard errors of 2000 independent pairs
    counts = torch.bincount(draws.index_B, minlength=4)
    assert counts.min() > 420  # 500 expected, standard deviation 19


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
@pytest.mark.parametrize("level", [0.3, 1.0])
def test_sde_reaches_the_same_distribution_as_the_ode(flow: Flow, level: float):
    """For data N(0, s^2) the exact velocity is u = (tau - (1 - tau) s^2) / (tau^2 + (1 - tau)^2 s^2) x; the end must be N(0, s^2).

    A wrong sign or size of the pull towards data would leave the noise in, or take too much out: without it the std comes out as
    0.75 (level 0.3) and 1.66 (level 1) where it should be 0.6.
    """
    scale, steps, rows = 0.6, 100, 20_000

    def velocity(x_BCA, time_B):
        tau = flow.time_of(time_B)[:, None, None]
        away = (tau - (1 - tau) * scale**2) / (tau**2 + (1 - tau) ** 2 * scale**2) * x_BCA
        return (1.0 if flow.direction is TimeDirection.NOISE_AT_ONE else -1.0) * away, None

    generator = torch.Generator().manual_seed(3)
    draws = StochasticDraws(torch.randn(rows, steps, 1, 1, generator=generator), torch.zeros(rows, dtype=torch.int64))
    exploration = Exploration("flow_sde", "all", noise_level=level)
    chain = sample_chain(flow, velocity, torch.randn(rows, 1, 1, generator=generator), draws, exploration, [0])
    # standard error of the std: 0.6 / sqrt(2 * 20000) = 0.003; the step's own error at N = 100 is below 0.01
    assert float(chain.actions_BCA.std()) == pytest.approx(scale, abs=0.02)


def test_contradictions_are_refused():
    with pytest.raises(UserError, match=r"noise_level is 0.*above 0"):
        Exploration(noise_level=0)
    with pytest.raises(UserError, match=r"std_min is 0.2 and std_max is 0.1"):
        Exploration(std_min=0.2, std_max=0.1)
    flow = DIRECTIONS[0]
    field, _, _, chain = chain_of(flow, Exploration("flow_sde", "one"))
    with pytest.raises(ValueError, match=r"holds 1 transitions.*'all' of 5 denoise steps"):
        recomputed(flow, field, chain, Exploration("flow_sde", "all"))
    with pytest.raises(ValueError, match="no noise head"):
        sample_chain(
            flow,
            lambda x, t: (x, None),
            chain.actions_BCA,
            stochastic_draws((1, 2, 3), STEPS, (CHUNK, DIMS), torch.device("cpu")),
            Exploration("flow_noise"),
            REAL,
        )


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 9e-5, 101.0, float("nan")])
def test_temperatures_that_logits_cannot_be_divided_by_are_refused(temperature: float) -> None:
    """At 1e-40 float32 logits overflow, and every log-probability was NaN."""
    with pytest.raises(UserError, match=r"exploration.temperature is .*; allowed: 0.0001 to 100"):
        Exploration(method="tokens", temperature=temperature)
