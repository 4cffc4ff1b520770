"""Resets that keep the compiled model and the GL context, bit-equal to a fresh stock environment.

Reference: build a stock environment, `np.random.seed(scene_seed)`, `reset()`, `set_init_state(state)`, settle.
What a hard reset renews, and how it is renewed here (the restore list):

* compiled model: fixtures' `body_pos`/`body_quat` (placed by the samplers) and `site_rgba` (visualisation) are put back;
* simulation data: `mj_resetData` (zeroes ctrl, time, warm start and warnings);
* the solver's warm start: the reference runs forward passes when it creates the simulation and its render context and at
  the end of its reset, so they run here too, in the same states;
* controller, its goals and rest posture: LIBERO's own `_reset_internal` makes a new controller;
* the gripper's `current_action`, which lives in the gripper model that a hard reset rebuilds: zeroed;
* joint-property samplers: each (re)load of the model appends them again, so that a fresh env holds two copies at its
  first reset and one more after each failed placement; they draw random numbers, so the count matters;
* burner and other visual states of objects: recomputed by LIBERO's `_post_process`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import mujoco
import numpy as np
from robosuite.utils.errors import RandomizationError  # pyright: ignore[reportMissingImports]

from vla_rl.episode import EpisodeSpec, SpecError
from vla_rl.sim.libero.scene import Scene, SceneError, global_seed

PLACEMENT_ATTEMPTS = 100
"""Resets tried before a scene whose objects cannot be placed is an error (stock tries for ever)."""
SAMPLED_JOINT_NOISE = 0.02
"""Standard deviation (rad) of the arm's initial joints for `sampled:SEED`, LIBERO's own value for its published states."""


@dataclass(frozen=True)
class Restart:
    """How a scene was set up."""

    initial_state: np.ndarray
    """float64[D]: the flattened state before settling."""
    retries: int
    """Placements that failed before one succeeded."""

    @property
    def sha256(self) -> str:
        """Digest of the initial state's bytes."""
        return hashlib.sha256(np.ascontiguousarray(self.initial_state).tobytes()).hexdigest()


def restart(scene: Scene, spec: EpisodeSpec) -> Restart:
    """Put up the scene of `spec`, before settling.

    Raises SpecError for a published state that does not exist, SceneError if placement fails.
    """
    state = published_state(scene, spec) if spec.init_kind == "benchmark" else None
    noise = 0.0 if state is not None else SAMPLED_JOINT_NOISE
    with global_seed(spec.scene_seed):
        retries = _place(scene, noise)
    if state is None:
        state = scene.state()
    set_initial_state(scene, state)
    return Restart(state, retries)


def published_state(scene: Scene, spec: EpisodeSpec) -> np.ndarray:
    """float64[D]: the published state of a `benchmark:K` spec."""
    states = scene.init_states
    if spec.init_number >= len(states):
        raise SpecError(f"init {spec.init!r}: {spec.suite} task {spec.task} has published states 0 to {len(states) - 1}")
    state = states[spec.init_number]
    expected = 1 + scene.model.nq + scene.model.nv
    if len(state) != expected:
        raise SceneError(f"{scene.task.name}: published states have {len(state)} numbers, the compiled model needs {expected}")
    return state


def set_initial_state(scene: Scene, state: np.ndarray) -> None:
    """LIBERO's `set_init_state`: time, qpos and qvel, a forward pass, and the objects' visual state."""
    data, nq = scene.data, scene.model.nq
    data.time = state[0]
    data.qpos[:] = state[1 : 1 + nq]
    data.qvel[:] = state[1 + nq :]
    mujoco.mj_forward(scene.model, data)
    scene.env._post_process()


def _place(scene: Scene, joint_noise: float) -> int:
    for retries in range(PLACEMENT_ATTEMPTS):
        try:
            _reset_once(scene, joint_noise, retries)
        except RandomizationError:
            continue
        return retries
    raise SceneError(f"{scene.task.suite} task {scene.task.index}: objects could not be placed in {PLACEMENT_ATTEMPTS} attempts")


def _reset_once(scene: Scene, joint_noise: float, retries: int) -> None:
    model, data, env = scene.model, scene.data, scene.env
    model.body_pos[:] = scene.base_body_pos
    model.body_quat[:] = scene.base_body_quat
    model.site_rgba[:] = scene.base_site_rgba
    scene.robot.gripper.current_action = np.zeros_like(scene.robot.gripper.current_action)
    scene.robot.initialization_noise["magnitude"] = joint_noise
    env.object_property_initializers[:] = scene.property_samplers * (2 + retries)
    mujoco.mj_resetData(model, data)
    mujoco.mj_forward(model, data)  # robosuite's _initialize_sim
    mujoco.mj_forward(model, data)  # its render context
    env._reset_internal()
    mujoco.mj_forward(model, data)  # the end of its reset
    env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))
