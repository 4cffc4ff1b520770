"""Reach: bring the gripper's tip to the block whose colour the prompt names.

A small scene with LIBERO's contract (two views, 8-D state, 7-D actions, sparse success) for tests and learning curves.
Where the blocks stand is visible only in the pictures, and which one is meant only in the prompt. The first three
action dimensions move the tip, the last one opens and closes the fingers; the rotation ones have no effect.

Shape legend: see `vla_rl/episode.py`.
"""
# mujoco is compiled and has no type stubs:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np

from vla_rl.conventions import Conventions, Orientation
from vla_rl.episode import ACTION_DIM, ROBOT_STATE_DIM, VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvSpec, EpisodeOver, Look, ResetReply
from vla_rl.sim.libero import egl
from vla_rl.sim.pictures import oriented
from vla_rl.sim.reach_layout import Layout, sample_layout, task_prompt, top_of
from vla_rl.sim.reach_scene import build_model, put_up

STEP_LENGTH = 0.015
"""How far an action of 1 moves the tip along an axis in one control step (m)."""
SUCCESS_RADIUS = 0.03
"""Success: the tip is at most this far from the middle of the target's upper face (m)."""
REACH_LOW = np.array([-0.2, -0.2, 0.03])
REACH_HIGH = np.array([0.2, 0.2, 0.2])
"""The box (m) that the gripper's tip cannot leave."""
FINGER_OPEN, FINGER_CLOSED = 0.02, 0.006
"""Distance of each finger from the middle (m)."""
_SUBSTEPS = 10
"""Physics steps of 5 ms in a control step of 1/20 s."""
_TIP_AXIS_ANGLE = (np.pi, 0.0, 0.0)
_TIP_QUATERNION_XYZW = (1.0, 0.0, 0.0, 0.0)
"""The gripper always points down, as LIBERO's does at rest."""


class ReachEnv:
    """One Reach simulator in this process. `preempt_requested` is asked before every control step."""

    def __init__(self, config: EnvConfig, preempt_requested: Callable[[], bool]) -> None:
        self._preempt_requested = preempt_requested
        self._model = build_model(config.resolution)
        self._data = mujoco.MjData(self._model)
        self._renderer = _Renderer(self._model, config.resolution, config.orientation)
        self._episode: _Episode | None = None
        self.spec = EnvSpec("reach", Conventions(orientation=config.orientation), VIEWS, config.resolution, self._provenance(config))

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        """See `Env.reset`."""
        started = time.perf_counter()
        egl.context()  # another renderer of this process may have taken over
        layout = sample_layout(spec)
        put_up(self._model, self._data, layout)
        self._episode = _Episode(self._model, self._data, self._renderer, spec, look, layout)
        placed = time.perf_counter()
        for _ in range(spec.protocol.settle_steps):
            self._episode.advance(np.asarray(spec.protocol.settle_action))
        settled = time.perf_counter()
        observation = self._episode.observation(look.views)
        rendered = time.perf_counter()
        state = self._episode.sim_state()
        return ResetReply(
            env=0,
            spec=spec,
            observation=observation,
            provenance={
                "blocks": {colour: position.tolist() for colour, position in layout.blocks.items()},
                "target": layout.target,
                "initial_state": state.tolist(),
                "initial_state_sha256": hashlib.sha256(state.tobytes()).hexdigest(),
            },
            timing={"reset": rendered - started, "settle": settled - placed, "physics": settled - placed, "render": rendered - settled},
        )

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        """See `Env.step_chunk`. Raises ValueError for actions of another shape, or that are not finite."""
        if self._episode is None or self._episode.over:
            raise EpisodeOver("step_chunk without a running episode: reset the env first, and again after success or the time limit")
        actions_CA = np.asarray(actions_CA, np.float32)
        if actions_CA.ndim != 2 or actions_CA.shape[1] != ACTION_DIM or not np.isfinite(actions_CA).all():
            raise ValueError(f"actions {actions_CA.shape} must be finite numbers of shape (C, {ACTION_DIM})")
        return self._episode.run_chunk(np.clip(actions_CA, -1, 1), self._preempt_requested, views)

    def close(self) -> None:
        """See `Env.close`."""
        self._episode = None
        self._renderer.close()

    def _provenance(self, config: EnvConfig) -> dict[str, Any]:
        renderer = egl.renderer_name()
        return {
            "mujoco": mujoco.__version__,
            "renderer": renderer,
            "software_rendering": egl.is_software(renderer),
            "render_profile": config.render_profile,
            "resolution": config.resolution,
        }


class _Episode:
    """One episode in progress."""

    def __init__(
        self, model: mujoco.MjModel, data: mujoco.MjData, renderer: _Renderer, spec: EpisodeSpec, look: Look, layout: Layout
    ) -> None:
        self._model, self._data, self._renderer = model, data, renderer
        self._spec, self._look, self._layout = spec, look, layout
        self._prompt = spec.prompt or task_prompt(spec.task)
        self._target = top_of(layout.blocks[layout.target])
        self._tip = data.site("tip").xpos
        self._tip_q = model.joint("tip_x").qposadr[0]
        self._finger_q = model.joint("finger_left").qposadr[0]
        self._pictures: dict[str, np.ndarray] = {}
        self._control_step = 0
        self.over = False

    def run_chunk(self, actions_CA: np.ndarray, preempt_requested: Callable[[], bool], views: tuple[str, ...] | None = None) -> ChunkReply:
        """Execute actions until the chunk ends, the target is reached, the time is up, or a preemption is requested."""
        started, render_s = time.perf_counter(), 0.0
        frames: dict[int, Observation] = {}
        sim_states, robot_states = [], []
        executed, success, truncated, preempted = 0, False, False, False
        for action in actions_CA:
            preempted = preempt_requested()
            if preempted:
                break
            if self._look.record_states:
                sim_states.append(self.sim_state())
                robot_states.append(self._robot_state())
            if self._look.record_every and self._control_step % self._look.record_every == 0:
                before = time.perf_counter()
                frames[self._control_step] = self.observation(VIEWS)
                render_s += time.perf_counter() - before
            self.advance(action)
            executed += 1
            self._control_step += 1
            success = bool(np.linalg.norm(self._tip - self._target) <= SUCCESS_RADIUS)
            truncated = not success and self._control_step >= self._spec.protocol.max_steps
            self.over = success or truncated
            if self.over:
                break
        before = time.perf_counter()
        observation = self.observation(VIEWS if truncated else self._look.views if views is None else views)
        ended = time.perf_counter()
        render_s += ended - before
        reward_E = np.zeros(executed, np.float32)
        reward_E[-1:] = success
        return ChunkReply(
            env=0,
            observation=observation,
            executed_EA=actions_CA[:executed],
            reward_E=reward_E,
            success=success,
            terminated=success,
            truncated=truncated,
            preempted=preempted,
            frames=frames,
            sim_states_ED=np.array(sim_states) if self._look.record_states else None,
            robot_states_ER=np.array(robot_states) if self._look.record_states else None,
            timing={"physics": ended - started - render_s, "render": render_s, "step": ended - started},
        )

    def advance(self, action_A: np.ndarray) -> None:
        """One control step: servo the tip to a point beside where it is, and the fingers apart or together."""
        control = self._data.ctrl
        goal = self._tip + STEP_LENGTH * action_A[:3]
        control[:3] = np.clip(goal, REACH_LOW, REACH_HIGH)
        opening = FINGER_OPEN if action_A[6] < 0 else FINGER_CLOSED
        control[3:5] = opening, -opening
        mujoco.mj_step(self._model, self._data, _SUBSTEPS)
        mujoco.mj_kinematics(self._model, self._data)  # a step leaves poses one substep behind
        mujoco.mj_camlight(self._model, self._data)
        self._pictures = {}

    def observation(self, views: tuple[str, ...]) -> Observation:
        """What is seen now, with the given views rendered."""
        for view in views:
            if view not in self._pictures:
                self._pictures[view] = self._renderer.draw(self._data, view)
        images = {view: self._pictures[view] for view in views}
        fingers = self._data.qpos[self._finger_q : self._finger_q + 2]
        state = np.array([*self._tip, *_TIP_AXIS_ANGLE, *fingers], np.float32)
        return Observation(images, state, self._prompt, self._truth() if self._look.privileged else {})

    def sim_state(self) -> np.ndarray:
        """float64[1 + nq + nv]: time, positions, velocities."""
        return np.concatenate([[self._data.time], self._data.qpos, self._data.qvel])

    def _robot_state(self) -> np.ndarray:
        """float64[16]: fingers, tip, its orientation; in place of seven joints the three slides and zeros."""
        fingers = self._data.qpos[self._finger_q : self._finger_q + 2]
        slides = self._data.qpos[self._tip_q : self._tip_q + 3]
        values = [*fingers, *self._tip, *_TIP_QUATERNION_XYZW, *slides]
        return np.array(values + [0.0] * (ROBOT_STATE_DIM - len(values)))

    def _truth(self) -> dict[str, np.ndarray]:
        """Simulator truth: where the tip and the blocks' upper faces are."""
        blocks = {f"{colour}_block_pos": top_of(position) for colour, position in self._layout.blocks.items()}
        return {"robot0_eef_pos": self._tip.copy(), **blocks}


class _Renderer:
    """Draws the two cameras, which are named like the views."""

    def __init__(self, model: mujoco.MjModel, resolution: int, orientation: Orientation) -> None:
        egl.context()
        self._model, self._orientation = model, orientation
        self._viewport = mujoco.MjrRect(0, 0, resolution, resolution)
        self._scene = mujoco.MjvScene(model, maxgeom=50)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION, mujoco.mjtRndFlag.mjRND_SKYBOX):
            self._scene.flags[flag] = False
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._options, self._perturbation, self._camera = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera_ids = {view: model.camera(view).id for view in VIEWS}

    def draw(self, data: mujoco.MjData, view: str) -> np.ndarray:
        """uint8[H, W, 3]: a new picture, in the configured orientation."""
        self._camera.fixedcamid = self._camera_ids[view]
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjv_updateScene(self._model, data, self._options, self._perturbation, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        picture = np.empty((self._viewport.height, self._viewport.width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, self._viewport, self._context)
        return oriented(picture, self._orientation)

    def close(self) -> None:
        """Free what the GL driver holds; may be called twice."""
        self._context.free()
