"""The flow-matching loss as a likelihood: hand-computed numbers, both directions of time, rollout against trainer."""

import pytest
import torch

from vla_rl.errors import UserError
from vla_rl.policies.flow import Flow, TimeDirection
from vla_rl.policies.flow_matching import matching_chain, matching_log_prob, matching_noise, matching_times
from vla_rl.policies.flow_stochastic import Exploration, recorded_steps

DIRECTIONS = [Flow(TimeDirection.NOISE_AT_ONE), Flow(TimeDirection.NOISE_AT_ZERO)]
ROWS, CHUNK, DIMS, DRAWS = 3, 2, 4, 5
LIVE = [0, 3]


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
def test_hand_computed_surrogate(flow: Flow):
    # One action of two dimensions, two draws. Away from data the velocity is noise - action, and the field gives 0.5.
    # Draw 0: noise (1, -1), action (0.2, 0.4): target (.8, -1.4); errors -.3 and 1.9: .09 + 3.61 = 3.70.
    # Draw 1: noise (0, 0.4): target (-.2, 0); errors .7 and .5: .49 + .25 = .74. Surrogate -1/2 (3.70 + .74) / 2 = -1.11.
    away = 1.0 if flow.direction is TimeDirection.NOISE_AT_ONE else -1.0
    actions = torch.tensor([0.2, 0.4]).expand(1, 2, 1, 2)
    noise = torch.tensor([[1.0, -1.0], [0.0, 0.4]]).view(1, 2, 1, 2)
    log_prob_BC = matching_log_prob(flow, lambda x, t: torch.full_like(x, 0.5 * away), actions, noise, torch.tensor([[0, 1]]), 2, [0, 1])
    assert log_prob_BC.tolist() == [[pytest.approx(-1.11, abs=1e-6)]]
    one_dim = matching_log_prob(flow, lambda x, t: torch.full_like(x, 0.5 * away), actions, noise, torch.tensor([[0, 1]]), 2, [1])
    assert one_dim.tolist() == [[pytest.approx(-0.5 * (3.61 + 0.25) / 2, abs=1e-6)]]


@pytest.mark.parametrize("flow", DIRECTIONS, ids=lambda flow: flow.direction.value)
def test_the_field_is_asked_on_the_straight_line_at_the_quantiles_of_training_times(flow: Flow):
    # Beta(1.5, 1): x = u^(2/3); u = .25 and .75 give .3968503 and .8254818; share of noise = .999 x + .001
    shares = [0.999 * 0.3968503 + 0.001, 0.999 * 0.8254818 + 0.001]
    times = shares if flow.direction is TimeDirection.NOISE_AT_ONE else [1 - share for share in shares]
    assert matching_times(flow, 2).tolist() == pytest.approx(times, abs=1e-6)
    asked: list[tuple[float, float]] = []

    def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        asked.append((float(t), float(x)))
        return torch.zeros_like(x)

    actions, noise = torch.full((1, 2, 1, 1), 2.0), torch.full((1, 2, 1, 1), -1.0)
    matching_log_prob(flow, field, actions, noise, torch.tensor([[1, 0]]), 2, [0])
    wanted = [(times[index], -shares[index] + 2 * (1 - shares[index])) for index in (1, 0)]
    assert asked == [pytest.approx(pair, abs=1e-5) for pair in wanted]


def test_rollout_and_trainer_compute_the_same_and_rows_do_not_depend_on_each_other():
    flow, generator = DIRECTIONS[0], torch.Generator().manual_seed(0)
    weight = torch.randn(DIMS, DIMS, generator=generator, requires_grad=True)
    actions_BCA = torch.randn(ROWS, CHUNK, DIMS, generator=generator)

    def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x @ weight) * t[:, None, None]

    chain = matching_chain(flow, field, actions_BCA, (7, 8, 9), DRAWS, LIVE)
    again = matching_log_prob(flow, field, chain.x_next_BKCA, chain.x_t_BKCA, chain.denoise_index_BK, DRAWS, LIVE)
    assert again.equal(chain.log_prob_BC) and again.requires_grad and again.shape == (ROWS, CHUNK)
    assert chain.actions_BCA.equal(actions_BCA)
    assert chain.x_t_BKCA[1:2].equal(matching_noise([8], DRAWS, (CHUNK, DIMS), torch.device("cpu")))
    with pytest.raises(ValueError, match=r"holds 5 draws per chunk, but exploration\.matching_draws is 4"):
        matching_log_prob(flow, field, chain.x_next_BKCA, chain.x_t_BKCA, chain.denoise_index_BK, 4, LIVE)


def test_settings_that_contradict_each_other():
    assert recorded_steps(Exploration(likelihood="matching", matching_draws=3), denoise_steps=5) == 3
    with pytest.raises(UserError, match="belongs to 'flow_sde'"):
        Exploration("flow_noise", likelihood="matching")
    with pytest.raises(UserError, match="matching_draws is 0"):
        Exploration(likelihood="matching", matching_draws=0)
