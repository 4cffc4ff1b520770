"""Experts on real LIBERO: one object into the basket, another one that the task does not name, a bowl onto the plate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vla_rl.episode import EpisodeSpec, StepProtocol, noise_seed
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.experts.expert import make_expert
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.tasks import goal_of


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv(EnvConfig(resolution=64))
    yield env
    env.close()


def steps_to_success(env: LiberoEnv, spec: EpisodeSpec, noise: float = 0.0) -> int | None:
    """Control steps until the goal held, None if it did not within the protocol's limit."""
    observation = env.reset(spec, Look(privileged=True)).observation
    expert = make_expert(spec, goal_of(spec), noise, noise_seed(spec, 0, "expert"))
    for step in range(spec.protocol.max_steps):
        action, _ = expert.act(observation)
        reply = env.step_chunk(action[None])
        if reply.success:
            return step + 1
        observation = reply.observation
    return None


@pytest.mark.parametrize(
    ("suite", "task", "limit", "goal"),
    [
        ("libero_object", 0, 280, ""),
        ("libero_object", 0, 280, "(And (In salad_dressing_1 basket_1_contain_region))"),
        ("libero_spatial", 2, 220, ""),
    ],
)
def test_reaches_the_goal(env: LiberoEnv, suite: str, task: int, limit: int, goal: str) -> None:
    spec = EpisodeSpec(suite, task, "benchmark:7", "test", StepProtocol(max_steps=limit), goal=goal)
    steps = steps_to_success(env, spec)
    assert steps is not None
    assert steps < 150


def test_noise_is_survived_and_repeats_itself(env: LiberoEnv) -> None:
    spec = EpisodeSpec("libero_object", 0, "sampled:11", "demonstrations", StepProtocol(max_steps=280))
    first = steps_to_success(env, spec, noise=0.3)
    assert first is not None
    assert steps_to_success(env, spec, noise=0.3) == first
