"""The pieces together, on a bandit: a small flow policy learns to hit a target through its own densities.

A wrong sign anywhere between the denoise step and the loss makes it worse instead of better.
"""

import pytest
import torch

from vla_rl.algorithms.advantages import Moments, group_advantages, normalize
from vla_rl.algorithms.health import check_on_policy, log_prob_gap
from vla_rl.algorithms.losses import ClipSettings, policy_loss
from vla_rl.algorithms.reductions import LogProbReduction, Unit, element_mask, reduce_per_action
from vla_rl.algorithms.weights import element_weights
from vla_rl.policies.flow import Flow, TimeDirection
from vla_rl.policies.flow_stochastic import Exploration, StochasticDraws, chain_log_prob, recorded_steps, sample_chain

ROWS, CHUNK, DIMS, REAL, STEPS = 128, 2, 3, 2, 4
TARGET = 0.5


class FlowBandit(torch.nn.Module):
    """velocity = MLP(x, t), with a noise head; its initial actions are spread around 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(CHUNK * DIMS + 1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2 * CHUNK * DIMS))

    def forward(self, x_BCA: torch.Tensor, time_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(torch.cat((x_BCA.flatten(1), time_B[:, None]), 1)).view(-1, 2, CHUNK, DIMS)
        return out[:, 0], out[:, 1]


def distance(actions_BCA: torch.Tensor, exploration: Exploration) -> torch.Tensor:
    """float[B]: mean squared distance of the two real dimensions to the target; of the chunk's mean, where noise moves nothing else."""
    if exploration.noise_over == "chunk":
        actions_BCA = actions_BCA.mean(1, keepdim=True)
    return (actions_BCA[..., :REAL] - TARGET).square().mean((1, 2))


def evaluate(flow: Flow, field: FlowBandit, noise_BCA: torch.Tensor, exploration: Exploration) -> float:
    """Mean distance of the deterministic policy."""
    with torch.no_grad():
        return float(distance(flow.euler(lambda x, t: field(x, t)[0], noise_BCA, STEPS), exploration).mean())


@pytest.mark.parametrize(
    ("exploration", "direction", "unit"),
    [
        (Exploration("flow_sde", "one"), TimeDirection.NOISE_AT_ONE, "chunk"),
        (Exploration("flow_sde", "one"), TimeDirection.NOISE_AT_ZERO, "action"),
        (Exploration("flow_sde", "all"), TimeDirection.NOISE_AT_ZERO, "chunk"),
        (Exploration("flow_noise", "all"), TimeDirection.NOISE_AT_ONE, "chunk"),
        (Exploration("flow_noise", "last", noise_over="chunk"), TimeDirection.NOISE_AT_ONE, "chunk"),
    ],
)
def test_a_flow_policy_learns(exploration: Exploration, direction: TimeDirection, unit: Unit):
    torch.manual_seed(0)
    flow, field = Flow(direction), FlowBandit()
    reduction = LogProbReduction(unit, actions="mean" if exploration.noise_over == "chunk" else "sum")
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    mask_BC = torch.ones(ROWS, CHUNK, dtype=torch.bool)
    mask_BU = element_mask(mask_BC, unit)
    weights = element_weights(mask_BU, torch.arange(ROWS), "element_mean")
    kept = recorded_steps(exploration, STEPS)
    noise_BCA = torch.randn(ROWS, CHUNK, DIMS)
    before = evaluate(flow, field, noise_BCA, exploration)
    for _ in range(25):
        noise_BCA = torch.randn(ROWS, CHUNK, DIMS)
        draws = StochasticDraws(torch.randn(ROWS, STEPS, CHUNK, DIMS), torch.randint(STEPS, (ROWS,)))
        chain = sample_chain(flow, field, noise_BCA, draws, exploration, range(REAL))
        score_B = -distance(chain.actions_BCA, exploration)
        advantage_B = group_advantages(score_B, torch.arange(ROWS) // 8, "leave_one_out", "none")
        every_B = torch.ones(ROWS, dtype=torch.bool)
        advantage_B = normalize(advantage_B, Moments.of(advantage_B, every_B)).float()
        old_BU = reduce_per_action(chain.log_prob_BC, mask_BC, reduction, REAL, kept)
        for epoch in range(2):
            log_prob_BC, _ = chain_log_prob(
                flow, field, chain.x_t_BKCA, chain.x_next_BKCA, chain.denoise_index_BK, STEPS, exploration, range(REAL)
            )
            if epoch == 0:
                check_on_policy(log_prob_gap(log_prob_BC, chain.log_prob_BC, mask_BC), same_batch_shape=True)
            log_prob_BU = reduce_per_action(log_prob_BC, mask_BC, reduction, REAL, kept)
            term = policy_loss(log_prob_BU, old_BU, advantage_B[:, None].expand_as(mask_BU), weights, ClipSettings(0.2, 0.28, 3.0))
            optimizer.zero_grad()
            (term.loss_sum / weights.count()).backward()
            optimizer.step()
    # Seen with 256 rows: 0.02 to 0.2 of the start for all twelve combinations of method, direction and unit.
    assert evaluate(flow, field, noise_BCA, exploration) < 0.5 * before
