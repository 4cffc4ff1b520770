"""The LIBERO environment: real simulation behind the `Env` contract of `sim/base.py`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvSpec, EpisodeOver, Look, ResetReply
from vla_rl.sim.libero import egl, packaging, tasks

SCENE_CACHE_SIZE = 2
"""Compiled tasks an env keeps (least recently used is freed); each holds 0.3 to 0.7 GiB of textures."""


@dataclass
class _Parts:
    """A compiled task and everything that is bound to it."""

    scene: Any
    physics: Any
    renderer: Any
    truth: Any


class LiberoEnv:
    """One LIBERO simulator in this process.

    preempt_requested: asked before every control step; when it says so, the chunk ends there.
    worker: index among the workers of this machine, which decides the GPU that renders.
    """

    def __init__(self, config: EnvConfig, preempt_requested: Callable[[], bool] | None = None, worker: int = 0) -> None:
        self.config = config
        self._preempt_requested = preempt_requested or (lambda: False)
        self._packaging = packaging.require_packaging(config.packaging)
        packaging.check_mujoco()
        egl.configure(worker)
        self._scenes: OrderedDict[tuple[str, int], _Parts] = OrderedDict()
        self._episode: _EpisodeRun | None = None
        self.spec = EnvSpec(
            kind="libero",
            conventions=Conventions(orientation=config.orientation),
            views=VIEWS,
            resolution=config.resolution,
            provenance=self._provenance(),
        )

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        """Put the scene of `spec` up, settle it and return the first observation.

        Raises SpecError for a spec that this env cannot run, SceneError if its objects cannot be placed.
        """
        from vla_rl.sim.libero.restore import restart

        self._episode = None
        started = time.perf_counter()
        run = _EpisodeRun(self._parts(spec), self.config, spec, look)
        restarted = restart(run.parts.scene, spec)
        run.begin()
        placed = time.perf_counter()
        for _ in range(spec.protocol.settle_steps):
            run.advance(np.asarray(spec.protocol.settle_action, np.float64))
        settled = time.perf_counter()
        observation = run.observation(look.views)
        self._episode = run
        return ResetReply(
            env=0,
            spec=spec,
            observation=observation,
            provenance={
                "fixture_poses": run.parts.scene.fixture_poses(),
                "initial_state_sha256": restarted.sha256,
                "initial_state": restarted.initial_state.tolist(),
                "placement_retries": restarted.retries,
            },
            timing={"reset": placed - started, "settle": settled - placed, "physics": run.physics_s, "render": run.render_s},
        )

    def step_chunk(self, actions_CA: np.ndarray) -> ChunkReply:
        """Execute actions until the chunk, the episode or the time limit ends, or a preemption is requested.

        actions_CA: [C, 7], clipped to [-1, 1]. Raises EpisodeOver when the episode has ended or none was started, ValueError for
        actions of another shape or not finite.
        """
        run = self._episode
        if run is None:
            raise EpisodeOver("step_chunk without a running episode: call reset first, and again after terminated or truncated")
        actions = _executable(actions_CA)
        reply = run.run_chunk(actions, self._preempt_requested)
        if reply.terminated or reply.truncated:
            self._episode = None
        return reply

    def close(self) -> None:
        """Free everything; may be called twice."""
        self._episode = None
        while self._scenes:
            self._scenes.popitem()[1].renderer.close()

    def _parts(self, spec: EpisodeSpec) -> _Parts:
        key = (spec.suite, spec.task)
        if key not in self._scenes:
            task = tasks.load_task(*key)
            while len(self._scenes) >= SCENE_CACHE_SIZE:
                self._scenes.popitem(last=False)[1].renderer.close()
            self._scenes[key] = _build(task, self.config)
        self._scenes.move_to_end(key)
        return self._scenes[key]

    def _provenance(self) -> dict[str, Any]:
        renderer = egl.renderer_name()
        return {
            **packaging.versions(self._packaging),
            "renderer": renderer,
            "software_rendering": egl.is_software(renderer),
            "render_profile": self.config.render_profile,
            "prompt_source": self.config.prompt_source.value,
            "resolution": self.config.resolution,
        }


class _EpisodeRun:
    """One episode in progress: counts steps, records what is looked at, tells how it ends."""

    def __init__(self, parts: _Parts, config: EnvConfig, spec: EpisodeSpec, look: Look) -> None:
        from vla_rl.sim.libero.predicates import compile_goal

        self.parts, self.config, self.spec, self.look = parts, config, spec, look
        self.prompt = spec.prompt or tasks.prompt(spec.suite, spec.task, config.prompt_source)
        self.goal_holds = compile_goal(parts.scene, tasks.goal_of(spec))
        self.control_step = 0
        self.physics_s = self.render_s = 0.0
        self.frames: dict[int, Observation] = {}

    def begin(self) -> None:
        """After a restart: a new controller, and what observables see before anything moves."""
        self.parts.physics.controller.restart()
        self._observe()

    def advance(self, action_A: np.ndarray) -> None:
        """One control step. The burner's look changes here, after the previous step's pictures and before this one's, as in stock."""
        started = time.perf_counter()
        self.parts.scene.update_visual_state()
        self.parts.physics.step(action_A, self._observe)
        self.physics_s += time.perf_counter() - started

    def run_chunk(self, actions_CA: np.ndarray, preempt_requested: Callable[[], bool]) -> ChunkReply:
        """Execute up to C actions; see `LiberoEnv.step_chunk`."""
        started, physics_before, render_before = time.perf_counter(), self.physics_s, self.render_s
        executed, rewards, sim_states, robot_states = 0, [], [], []
        success = truncated = preempted = False
        for action in actions_CA.astype(np.float64):
            if preempt_requested():
                preempted = True
                break
            if self.look.record_states:
                sim_states.append(self.parts.scene.state())
                robot_states.append(self.proprioception.robot_state())
            self._record_frame()
            self.advance(action)
            executed += 1
            self.control_step += 1
            success = self.goal_holds()
            rewards.append(float(success))
            truncated = not success and self.control_step >= self.spec.protocol.max_steps
            if success or truncated:
                break
        observation = self.observation(VIEWS if truncated else self.look.views)
        frames, self.frames = self.frames, {}
        return ChunkReply(
            env=0,
            observation=observation,
            executed_EA=actions_CA[:executed],
            reward_E=np.array(rewards, np.float32),
            success=success,
            terminated=success,
            truncated=truncated,
            preempted=preempted,
            frames=frames,
            sim_states_ED=np.array(sim_states).reshape(executed, -1) if self.look.record_states else None,
            robot_states_ER=np.array(robot_states).reshape(executed, -1) if self.look.record_states else None,
            timing={
                "physics": self.physics_s - physics_before,
                "render": self.render_s - render_before,
                "step": time.perf_counter() - started,
            },
        )

    def observation(self, views: tuple[str, ...]) -> Observation:
        """What is seen now, with the given views rendered."""
        privileged: Mapping[str, np.ndarray] = self.parts.truth.read() if self.look.privileged else {}
        images = {view: self._picture(view) for view in views}
        return Observation(images, self.proprioception.state(), self.prompt, privileged)

    def _record_frame(self) -> None:
        """Keep the observation before the coming control step, if the recorder asked for this one."""
        every = self.look.record_every
        if every and self.control_step % every == 0:
            self.frames[self.control_step] = self.observation(VIEWS)

    def _observe(self) -> None:
        from vla_rl.sim.libero.observe import Proprioception

        self.proprioception = Proprioception.sample(self.parts.scene)
        self.parts.renderer.snapshot()
        self._pictures: dict[str, np.ndarray] = {}

    def _picture(self, view: str) -> np.ndarray:
        from vla_rl.sim.libero.render import oriented

        if view not in self._pictures:
            started = time.perf_counter()
            self._pictures[view] = oriented(self.parts.renderer.draw(view), self.config.orientation)
            self.render_s += time.perf_counter() - started
        return self._pictures[view]


def _build(task: tasks.Task, config: EnvConfig) -> _Parts:
    """Compile a task. Imports the simulator here, after `egl.configure` has set its variables."""
    from vla_rl.sim.libero.observe import Truth
    from vla_rl.sim.libero.physics import Physics
    from vla_rl.sim.libero.render import Renderer
    from vla_rl.sim.libero.scene import Scene, global_seed

    with global_seed(0):
        scene = Scene(task)
    return _Parts(scene, Physics(scene), Renderer(scene, config.resolution, config.render_profile), Truth(scene))


def _executable(actions_CA: np.ndarray) -> np.ndarray:
    """float32[C, 7] in [-1, 1]. Raises ValueError for another shape or numbers that are not finite."""
    actions = np.asarray(actions_CA, np.float32)
    if actions.ndim != 2 or actions.shape[1] != ACTION_DIM:
        raise ValueError(f"actions have shape {actions.shape}, expected (C, {ACTION_DIM})")
    if not np.isfinite(actions).all():
        raise ValueError(f"actions hold numbers that are not finite: {actions[~np.isfinite(actions).all(axis=1)][0].tolist()}")
    return np.clip(actions, -1.0, 1.0)
