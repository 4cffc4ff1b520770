"""Reach: LIBERO's contract in a small scene, determined by the spec, solvable only by looking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from equality import require_same

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEWS, EpisodeSpec, SpecError, StepProtocol
from vla_rl.sim.base import ChunkReply, Env, EnvConfig, EpisodeOver, Look
from vla_rl.sim.factory import make_env
from vla_rl.sim.reach_expert import ReachExpert
from vla_rl.sim.reach_layout import BENCHMARK_STATES, COLOURS, MIN_SEPARATION, TABLE_HALF, sample_layout
from vla_rl.sim.reach_progress import closeness

CONFIG = EnvConfig("reach", resolution=64)
PROTOCOL = StepProtocol(max_steps=20, settle_steps=1)
RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    made = make_env(CONFIG)
    yield made
    made.close()
    made.close()


def spec(number: int, task: int = 0, **other: Any) -> EpisodeSpec:
    return EpisodeSpec("reach", task, f"benchmark:{number}", "test", PROTOCOL, **other)


def actions(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, 7)).astype(np.float32)


def play_expert(env: Env, episode: EpisodeSpec, noise: float, seed: int = 0) -> tuple[ChunkReply, int]:
    """Run one episode of the expert; the last reply and the number of control steps."""
    expert = ReachExpert(episode, noise, seed)
    observation, steps = env.reset(episode, Look(privileged=True)).observation, 0
    while True:
        action, label = expert.act(observation)
        assert noise or np.array_equal(action, label)
        reply = env.step_chunk(action[None])
        observation, steps = reply.observation, steps + 1
        if reply.terminated or reply.truncated:
            return reply, steps


def test_the_observation_has_the_contracts_shapes(env: Env) -> None:
    observation = env.reset(spec(0, task=2), Look(VIEWS)).observation
    assert {view: (picture.shape, picture.dtype.name) for view, picture in observation.images.items()} == dict.fromkeys(
        VIEWS, ((64, 64, 3), "uint8")
    )
    assert (observation.state.shape, observation.state.dtype.name) == ((8,), "float32")
    assert (observation.prompt, dict(observation.privileged)) == ("reach the blue block", {})
    assert env.spec.views == VIEWS and env.spec.resolution == 64


@pytest.mark.parametrize("task", range(len(COLOURS)))
def test_the_named_block_can_be_seen_and_the_state_does_not_tell_where_it_is(env: Env, task: int) -> None:
    direction = np.array(RGB[COLOURS[task]], np.float32)
    for number in range(0, BENCHMARK_STATES, 5):
        seen = env.reset(spec(number, task), Look(VIEWS[:1])).observation.images["image"].astype(np.float32) / 255
        of_colour = (seen * direction).sum(-1) / direction.sum() - (seen * (1 - direction)).sum(-1) / (1 - direction).sum()
        assert (of_colour > 0.3).sum() >= 4, f"state {number}: fewer than 4 pixels of the target"
    near = spec(0, task)
    layout, other = sample_layout(near), sample_layout(replace(near, goal=f"(Reach {_other_colour(near)}_block)"))
    assert layout.target != other.target
    state = env.reset(near, Look()).observation.state
    require_same(state, env.reset(replace(near, goal=f"(Reach {other.target}_block)"), Look()).observation.state)


def _other_colour(episode: EpisodeSpec) -> str:
    layout = sample_layout(episode)
    return next(colour for colour in layout.blocks if colour != layout.target)


def test_a_spec_gives_the_same_bits_in_any_order_and_in_another_env(env: Env) -> None:
    look = Look(VIEWS, privileged=True, record_every=1, record_states=True)

    def episode(of: Env, number: int) -> list[Any]:
        return [of.reset(spec(number), look), of.step_chunk(actions(6, seed=number))]

    first, second = episode(env, 1), episode(env, 2)
    other = make_env(CONFIG)
    require_same([second, first], [episode(other, 2), episode(other, 1)], ignore=("timing",))
    other.close()
    with pytest.raises(AssertionError):
        require_same(first, second, ignore=("timing",))


def test_layouts_are_on_the_table_apart_and_all_different() -> None:
    sampled = [EpisodeSpec("reach", 1, f"sampled:{1_000_000 + n}", "train") for n in range(200)]
    layouts = [sample_layout(s) for s in [*(spec(n) for n in range(BENCHMARK_STATES)), *sampled]]
    positions = np.array([list(layout.blocks.values()) for layout in layouts])
    assert np.abs(positions).max() <= TABLE_HALF
    assert np.linalg.norm(positions[:, 0] - positions[:, 1], axis=-1).min() >= MIN_SEPARATION
    assert len({positions[index].tobytes() for index in range(len(positions))}) == len(positions)
    assert {colour for layout in layouts for colour in layout.blocks} == set(COLOURS)


def test_chunks_change_nothing_but_when_somebody_looks(env: Env) -> None:
    look = Look(VIEWS, record_every=3, record_states=True)
    env.reset(spec(3), look)
    whole = env.step_chunk(actions(8))
    env.reset(spec(3), Look(VIEWS, record_states=True))
    single = [env.step_chunk(action[None]) for action in actions(8)]
    require_same(whole.observation, single[-1].observation)
    assert list(whole.frames) == [0, 3, 6]
    for t in (3, 6):
        require_same(whole.frames[t], single[t - 1].observation)
    for name in ("sim_states_ED", "robot_states_ER", "executed_EA", "reward_E"):
        require_same(getattr(whole, name), np.concatenate([getattr(reply, name) for reply in single]))


def test_a_reset_says_how_long_all_of_it_took(env: Env) -> None:
    timing = env.reset(spec(3), Look(VIEWS)).timing
    assert list(timing) == ["reset", "settle", "physics", "render"]
    assert 0 < timing["settle"] + timing["render"] < timing["reset"]


def test_recorded_states_begin_with_the_provenance(env: Env) -> None:
    reset = env.reset(spec(3), Look(record_states=True))
    reply = env.step_chunk(actions(2))
    assert reply.sim_states_ED is not None and reply.robot_states_ER is not None
    assert reply.sim_states_ED[0].tolist() == reset.provenance["initial_state"]
    assert reply.robot_states_ER.shape == (2, 16)
    assert reply.robot_states_ER[0, 2:5].astype(np.float32).tolist() == reset.observation.state[:3].tolist()


def test_success_ends_the_episode_and_the_env_does_not_reset_itself(env: Env) -> None:
    reply, _ = play_expert(env, spec(4), noise=0.0)
    assert reply.success and reply.terminated and not reply.truncated and reply.reward_E.tolist() == [1.0]
    assert not reply.observation.images, "nobody looks"
    with pytest.raises(EpisodeOver, match="reset"):
        env.step_chunk(actions(1))


def test_success_stops_inside_a_chunk(env: Env) -> None:
    _, steps = play_expert(env, spec(4), noise=0.0)
    expert = ReachExpert(spec(4), 0.0, 0)
    observation = env.reset(spec(4), Look(privileged=True)).observation
    taken = []
    for _ in range(steps):
        taken.append(expert.act(observation)[0])
        observation = env.step_chunk(taken[-1][None]).observation
    env.reset(spec(4), Look())
    reply = env.step_chunk(np.array(taken + [taken[-1]] * 5))
    assert reply.terminated and len(reply.executed_EA) == steps
    assert reply.reward_E.tolist() == [0.0] * (steps - 1) + [1.0]


def test_a_slow_expert_means_the_same_movements_scaled(env: Env) -> None:
    observation = env.reset(spec(4), Look(privileged=True)).observation
    fast, slow = ReachExpert(spec(4), 0.0, 0), ReachExpert(spec(4), 0.0, 0, speed=0.25)
    expected = fast.act(observation)[1]
    expected[:3] *= 0.25
    np.testing.assert_array_equal(slow.act(observation)[1], expected)
    assert np.abs(expected[:3]).max() == 0.25, "full speed along the longest axis"


def test_closeness_is_minus_the_distance_to_the_named_block_before_every_chunk(env: Env) -> None:
    reset = env.reset(spec(4), Look())
    replies = [env.step_chunk(actions(2, seed)) for seed in range(2)]
    observations = [reset.observation, *(reply.observation for reply in replies)]
    steps = [SimpleNamespace(observation=observation) for observation in observations[:-1]]
    episode: Any = SimpleNamespace(spec=spec(4), provenance=reset.provenance, steps=steps, final_observation=observations[-1])
    block = [*reset.provenance["blocks"][COLOURS[0]], 0.04]
    expected = [-np.linalg.norm(observation.state[:3] - block) / 0.1 for observation in observations]
    np.testing.assert_allclose(closeness(episode), expected, rtol=1e-6)  # float32 positions
    with pytest.raises(ValueError, match="episodes of reach that started"):
        closeness(SimpleNamespace(spec=spec(4), final_observation=None))  # type: ignore[arg-type]


def test_the_time_limit_truncates_and_shows_both_views(env: Env) -> None:
    env.reset(spec(5), Look())
    reply = env.step_chunk(np.zeros((100, 7), np.float32))
    assert (len(reply.executed_EA), reply.truncated, reply.terminated, reply.success) == (20, True, False, False)
    assert set(reply.observation.images) == set(VIEWS)


def test_actions_are_clipped_to_one_and_move_the_tip_that_way(env: Env) -> None:
    for axis in range(3):
        action = np.zeros((1, 7), np.float32)
        action[0, axis] = 5.0
        before = env.reset(spec(6), Look()).observation.state
        reply = env.step_chunk(action)
        moved = (reply.observation.state - before)[:3]
        assert 0.010 < moved[axis] <= 0.015 and np.abs(np.delete(moved, axis)).max() < 1e-4
        assert reply.executed_EA[0, axis] == 1.0


@pytest.mark.parametrize("bad", [np.zeros((2, 6), np.float32), np.zeros(7, np.float32), np.full((1, 7), np.nan, np.float32)])
def test_actions_of_another_shape_or_not_finite_are_refused(env: Env, bad: np.ndarray) -> None:
    env.reset(spec(6), Look())
    with pytest.raises(ValueError, match=r"must be finite numbers of shape \(C, 7\)"):
        env.step_chunk(bad)


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (EpisodeSpec("libero_goal", 0, "benchmark:0", "test"), "libero_goal task 0 is not one of reach 0 to 3"),
        (EpisodeSpec("reach", 4, "benchmark:0", "test"), r"reach task 4 is not one of reach 0 to 3 \(red, green, blue, yellow\)"),
        (EpisodeSpec("reach", 0, "benchmark:50", "test"), "must be benchmark:0 to benchmark:49"),
        (EpisodeSpec("reach", 0, "benchmark:0", "test", goal="(Reach pink_block)"), r"must be empty or one of \(Reach red_block\)"),
    ],
)
def test_a_spec_that_names_nothing_is_refused(env: Env, episode: EpisodeSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        env.reset(episode, Look())


def test_a_goal_must_be_on_the_table(env: Env) -> None:
    absent = next(colour for colour in COLOURS if colour not in sample_layout(spec(0)).blocks)
    with pytest.raises(SpecError, match=f"{absent}_block.*not on the table; there are red, "):
        env.reset(spec(0, goal=f"(Reach {absent}_block)"), Look())


def test_another_goal_and_prompt_in_the_same_scene(env: Env) -> None:
    goal = f"(Reach {_other_colour(spec(7))}_block)"
    same_scene = spec(7, goal=goal, prompt="touch the other one")
    require_same(env.reset(spec(7), Look(VIEWS)).observation.images, env.reset(same_scene, Look(VIEWS)).observation.images)
    assert env.reset(same_scene, Look()).observation.prompt == "touch the other one"
    assert play_expert(env, same_scene, noise=0.0)[0].success


@pytest.mark.parametrize(("noise", "at_least"), [(0.0, 50), (0.4, 49)])
def test_the_expert_reaches_the_block_within_the_time_limit(env: Env, noise: float, at_least: int) -> None:
    results = [play_expert(env, spec(number, task=number % 4), noise, seed=number) for number in range(BENCHMARK_STATES)]
    assert sum(reply.success for reply, _ in results) >= at_least
    assert np.mean([steps for _, steps in results]) < 12


def test_acting_without_looking_does_not_reach_it(env: Env) -> None:
    def blind(seed: int) -> bool:
        env.reset(spec(seed, task=seed % 4), Look())
        return env.step_chunk(np.repeat(actions(1, seed), 20, axis=0)).success

    assert sum(blind(seed) for seed in range(50)) <= 5


def test_orientations_are_turns_of_the_raw_picture() -> None:
    pictures = {}
    for orientation in Orientation:
        made = make_env(EnvConfig("reach", resolution=32, orientation=orientation))
        assert made.spec.conventions.orientation is orientation
        pictures[orientation] = made.reset(spec(0), Look(VIEWS)).observation.images["image"]
        made.close()
    raw = pictures[Orientation.RAW]
    assert np.array_equal(pictures[Orientation.VERTICAL_FLIP], raw[::-1])
    assert np.array_equal(pictures[Orientation.ROTATED_180], raw[::-1, ::-1])
    assert raw[-4:].mean() < raw[4:8].mean(), "rows are bottom-up: the dark background beyond the table comes last"


def test_a_preempted_chunk_says_how_many_actions_ran() -> None:
    answers = iter([False, False, True])
    made = make_env(CONFIG, lambda: next(answers))
    made.reset(spec(0), Look())
    reply = made.step_chunk(actions(5))
    made.close()
    assert reply.preempted and len(reply.executed_EA) == 2 and not reply.truncated


def test_a_profile_that_reach_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="render_profile is 'fast', and kind 'reach' has only 'exact'"):
        EnvConfig("reach", render_profile="fast")
