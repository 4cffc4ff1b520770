"""Likelihoods cover what is executed: no dimension that `postprocess` replaces by a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_rl.episode import ACTION_DIM, Observation
from vla_rl.policies.base import TransitionBatch
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

REACH, LIBERO_OBJECT = [0, 1, 2], [0, 1, 2, 6]
"""What moves in demonstrations of Reach (no rotation, no gripper) and of libero_object (no rotation)."""
EXPLORING = Exploration("flow_sde", "one", noise_level=0.5)


def policy_of(live: list[int], statistics: Statistics) -> Pi0Policy:
    """A policy from demonstrations in which only the dimensions `live` change."""
    actions = np.full((100, ACTION_DIM), -1.0)
    actions[:, live] = np.random.default_rng(0).uniform(-1, 1, size=(100, len(live)))
    mine = Statistics({STATE: statistics.features[STATE], ACTION: FeatureStats.from_values(actions)})
    config = PI0_PRESETS["tiny"]
    return make_policy(config, mine, policy_spec(config, resolution=64)).eval()


@pytest.mark.parametrize("live", [REACH, LIBERO_OBJECT])
def test_dimensions_that_never_change_have_no_likelihood(
    live: list[int], statistics: Statistics, tiny: Pi0Policy, observe: Callable[..., list[Observation]]
) -> None:
    policy = policy_of(live, statistics)
    assert policy.live_dims == live and tiny.live_dims == list(range(ACTION_DIM))
    batch = policy.preprocess(observe(2))
    output = policy.act(batch, range(2), EXPLORING)
    assert output.x_t_BKCA is not None and output.x_next_BKCA is not None and output.denoise_index_BK is not None
    record = TransitionBatch(output.x_t_BKCA, output.x_next_BKCA, output.denoise_index_BK)
    scored = policy.log_prob(batch, record, EXPLORING).log_prob_BC
    assert torch.equal(scored, output.log_prob_BC)
    for dim in range(ACTION_DIM):
        moved = record.x_next_BKCA.clone()
        moved[..., dim] += 0.5
        again = policy.log_prob(batch, replace(record, x_next_BKCA=moved), EXPLORING).log_prob_BC
        assert torch.equal(again, scored) == (dim not in live)
    executed = policy.postprocess(output.actions_BCA)
    still = [dim for dim in range(ACTION_DIM) if dim not in live]
    assert np.all(executed[..., still] == -1.0), "what has no likelihood is not executed either"
