"""The fast path equals stock LIBERO bit for bit: states, rewards, success, and every picture that is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.episode import VIEWS, EpisodeSpec, StepProtocol
from vla_rl.sim.base import Look
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.reference import StockEnv, compare_frame

CHUNK = 8
STEPS = 40


def rough_actions(seed: int, count: int) -> np.ndarray:
    """Random walks in action space: smooth enough that the arm travels and touches things."""
    rng = np.random.default_rng(seed)
    return np.clip(np.repeat(rng.uniform(-1.5, 1.5, (count // 5 + 1, 7)), 5, axis=0)[:count], -1, 1).astype(np.float32)


def play_other_episodes(env: LiberoEnv, suite: str, task: int, count: int) -> None:
    """Several episodes that leave the gripper closed, goals turned, fixtures and objects elsewhere, and pictures drawn."""
    for number in range(count):
        spec = EpisodeSpec(suite, task, f"sampled:{1_000_000 + number}", "train", protocol=StepProtocol(max_steps=16))
        env.reset(spec, Look(views=VIEWS))
        env.step_chunk(rough_actions(number, 16))


@pytest.mark.parametrize(
    ("suite", "task", "init", "split"),
    [
        pytest.param("libero_object", 0, "benchmark:3", "test", marks=pytest.mark.slow),
        pytest.param("libero_goal", 7, "sampled:1000005", "train", marks=pytest.mark.slow),
    ],
)
def test_equals_stock_after_other_episodes(env: LiberoEnv, suite: str, task: int, init: str, split: str) -> None:
    play_other_episodes(env, suite, task, 3)
    spec = EpisodeSpec(suite, task, init, split, protocol=StepProtocol(max_steps=1000))
    actions = rough_actions(99, STEPS)

    reply = env.reset(spec, Look(views=VIEWS, record_every=CHUNK // 2, record_states=True))
    chunks = [env.step_chunk(actions[begin : begin + CHUNK]) for begin in range(0, STEPS, CHUNK)]

    stock = StockEnv(suite, task, spec.init_kind)
    initial = stock.reset(spec)
    assert np.array_equal(initial, reply.provenance["initial_state"])
    assert stock.fixture_poses() == reply.provenance["fixture_poses"]
    assert compare_frame(stock.frame(), reply.observation.images, None, None) == []
    looked_at = 0
    for step, action in enumerate(actions):
        chunk, offset = chunks[step // CHUNK], step % CHUNK
        assert chunk.sim_states_ED is not None and chunk.robot_states_ER is not None
        images = chunk.frames[step].images if step in chunk.frames else {}
        looked_at += len(images)
        assert compare_frame(stock.frame(), images, chunk.robot_states_ER[offset], chunk.sim_states_ED[offset]) == [], f"step {step}"
        reward, success = stock.step(action)
        assert reward == chunk.reward_E[offset]
        if offset == CHUNK - 1:
            assert success == chunk.success
            assert compare_frame(stock.frame(), chunk.observation.images, None, None) == [], f"end of chunk at step {step}"
            looked_at += len(chunk.observation.images)
    assert looked_at == 2 * (STEPS // (CHUNK // 2) + STEPS // CHUNK)
    stock.close()


def test_same_scene_in_two_orders(env: LiberoEnv) -> None:
    """Fixtures are sampled at reset and are no part of the state: two specs, played in both orders, are identical."""
    first, second = (EpisodeSpec("libero_goal", 7, f"benchmark:{number}", "test") for number in (4, 11))
    actions = rough_actions(1, 8)
    seen = []
    for order in ((first, second), (second, first)):
        for spec in order:
            reply = env.reset(spec, Look(record_states=True))
            chunk = env.step_chunk(actions)
            seen.append((spec, reply.provenance, chunk.sim_states_ED))
    (_, poses_a, states_a), (_, poses_b, states_b), (_, poses_b2, states_b2), (_, poses_a2, states_a2) = seen
    assert poses_a == poses_a2 and poses_b == poses_b2
    assert len(poses_a["fixture_poses"]) == 3 and poses_a["fixture_poses"] != poses_b["fixture_poses"]
    assert np.array_equal(states_a, states_a2) and np.array_equal(states_b, states_b2)


def test_pictures_equal_plain_drawing(env: LiberoEnv) -> None:
    """Leaving out meshes and reusing pixels changes nothing, also where a stove reflects the scene."""
    env.reset(EpisodeSpec("libero_goal", 7, "benchmark:2", "test"), Look())
    run = env._run
    assert run is not None
    renderer = run.parts.renderer
    for action in rough_actions(5, 12).astype(np.float64):
        run.advance(action)
        for view in VIEWS:
            assert np.array_equal(renderer.draw(view), renderer.draw_plain(view))
