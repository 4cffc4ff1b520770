"""Observations, statistics and small policies for the tests of `policies/`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.groot.config import GROOT_PRESETS
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

sys.path.insert(0, str(Path(__file__).parent))  # test helpers beside the tests
PROMPT = "pick up the milk and place it in the basket"


@pytest.fixture(scope="session")
def statistics() -> Statistics:
    """Statistics of random states and actions."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(500, STATE_DIM))
    actions = generator.uniform(-1, 1, size=(500, ACTION_DIM))
    return Statistics({STATE: FeatureStats.from_values(states), ACTION: FeatureStats.from_values(actions)})


@pytest.fixture(scope="session")
def observe() -> Callable[..., list[Observation]]:
    """`observe(count, resolution=64, prompt=PROMPT, seed=0)`: random observations."""

    def make(count: int, resolution: int = 64, prompt: str = PROMPT, seed: int = 0) -> list[Observation]:
        generator = np.random.default_rng(seed)
        shape = (resolution, resolution, 3)
        return [
            Observation(
                images={view: generator.integers(0, 256, shape, dtype=np.uint8) for view in VIEWS},
                state=generator.normal(size=STATE_DIM).astype(np.float32),
                prompt=prompt,
            )
            for _ in range(count)
        ]

    return make


FLOW_FAMILIES = {"pi0": PI0_PRESETS["tiny"], "pi05": PI0_PRESETS["tiny_pi05"], "groot": GROOT_PRESETS["tiny"]}
"""A tiny config of each family that denoises actions."""


@pytest.fixture(params=FLOW_FAMILIES)
def policy(request: pytest.FixtureRequest, statistics: Statistics) -> FlowPolicy:
    """A tiny policy of each of these families, in evaluation mode."""
    config = FLOW_FAMILIES[request.param]
    policy = make_policy(config, statistics, policy_spec(config, resolution=64)).eval()
    assert isinstance(policy, FlowPolicy)
    return policy


@pytest.fixture
def tiny(statistics: Statistics) -> Pi0Policy:
    """A tiny pi0, in evaluation mode."""
    config = PI0_PRESETS["tiny"]
    policy = make_policy(config, statistics, policy_spec(config, resolution=64)).eval()
    assert isinstance(policy, Pi0Policy)
    return policy
