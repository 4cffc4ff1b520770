"""One LIBERO episode in progress, and the compiled parts it runs on.

Imports the simulator: `env.py` imports this module after the OpenGL variables are set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from vla_rl.episode import ROBOT_STATE_DIM, VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, EnvConfig, Look, ResetReply
from vla_rl.sim.libero import tasks
from vla_rl.sim.libero.observe import Proprioception, Truth
from vla_rl.sim.libero.physics import Physics
from vla_rl.sim.libero.predicates import compile_goal
from vla_rl.sim.libero.render import Renderer, oriented
from vla_rl.sim.libero.restore import restart
from vla_rl.sim.libero.scene import Scene, global_seed


@dataclass
class Parts:
    """A compiled task and everything that is bound to it."""

    scene: Scene
    physics: Physics
    renderer: Renderer
    truth: Truth

    def close(self) -> None:
        """Free the renderer's textures; the rest goes with the object."""
        self.renderer.close()


def build(task: tasks.Task, config: EnvConfig) -> Parts:
    """Compile a task. Its construction draws random numbers, which must not depend on or disturb the caller's."""
    with global_seed(0):
        scene = Scene(task)
    return Parts(scene, Physics(scene), Renderer(scene, config.resolution, config.render_profile), Truth(scene))


def start(parts: Parts, config: EnvConfig, spec: EpisodeSpec, look: Look) -> tuple[EpisodeRun, ResetReply]:
    """Put the scene of `spec` up, settle it, and observe it for the first time; the reply's timing has the parts, not the whole."""
    run = EpisodeRun(parts, config, spec, look)
    restarted = restart(parts.scene, spec)
    run.begin()
    placed = time.perf_counter()
    for _ in range(spec.protocol.settle_steps):
        run.advance(np.asarray(spec.protocol.settle_action, np.float64))
    settled = time.perf_counter()
    provenance = {
        "fixture_poses": parts.scene.fixture_poses(),
        "initial_state_sha256": restarted.sha256,
        "initial_state": restarted.initial_state.tolist(),
        "placement_retries": restarted.retries,
    }
    observation = run.observation(look.views)
    timing = {"settle": settled - placed, "physics": run.physics_s, "render": run.render_s}
    return run, ResetReply(0, spec, observation, provenance, timing)


@dataclass
class _ChunkRecord:
    """What a chunk leaves behind, one entry per executed action."""

    rewards: list[float] = field(default_factory=list)
    frames: dict[int, Observation] = field(default_factory=dict)
    sim_states: list[np.ndarray] = field(default_factory=list)
    robot_states: list[np.ndarray] = field(default_factory=list)


class EpisodeRun:
    """One episode in progress: counts steps, records what is looked at, tells how it ends."""

    def __init__(self, parts: Parts, config: EnvConfig, spec: EpisodeSpec, look: Look) -> None:
        self.parts, self.config, self.spec, self.look = parts, config, spec, look
        self.prompt = spec.prompt or tasks.prompt(spec.suite, spec.task, config.prompt_source)
        self.goal_holds = compile_goal(parts.scene, tasks.goal_of(spec))
        self.control_step = 0
        self.physics_s = self.render_s = 0.0
        self.proprioception: Proprioception
        self._pictures: dict[str, np.ndarray] = {}

    def begin(self) -> None:
        """After a restart: a new controller, and what observables see before anything moves."""
        self.parts.physics.controller.restart()
        self._observe()

    def advance(self, action_A: np.ndarray) -> None:
        """One control step; action_A: float64[7].

        Burners show their state from here on: after the previous step's pictures and before this one's, as in stock.
        """
        began = time.perf_counter()
        self.parts.scene.update_visual_state()
        self.parts.physics.step(action_A, self._observe)
        self.physics_s += time.perf_counter() - began

    def run_chunk(self, actions_CA: np.ndarray, preempt_requested: Callable[[], bool], views: tuple[str, ...] | None = None) -> ChunkReply:
        """Execute up to C actions (float32[C, 7]); see `LiberoEnv.step_chunk`."""
        began, physics_before, render_before = time.perf_counter(), self.physics_s, self.render_s
        record = _ChunkRecord()
        success = truncated = preempted = False
        while len(record.rewards) < len(actions_CA) and not (success or truncated):
            preempted = preempt_requested()
            if preempted:
                break
            self._record_before(record)
            self.advance(np.asarray(actions_CA[len(record.rewards)], np.float64))
            self.control_step += 1
            success = self.goal_holds()
            record.rewards.append(float(success))
            truncated = not success and self.control_step >= self.spec.protocol.max_steps
        executed = len(record.rewards)
        observation = self.observation(VIEWS if truncated else self.look.views if views is None else views)
        timing = {"physics": self.physics_s - physics_before, "render": self.render_s - render_before, "step": time.perf_counter() - began}
        states = self.look.record_states
        return ChunkReply(
            env=0,
            observation=observation,
            executed_EA=actions_CA[:executed],
            reward_E=np.array(record.rewards, np.float32),
            success=success,
            terminated=success,
            truncated=truncated,
            preempted=preempted,
            frames=record.frames,
            sim_states_ED=np.array(record.sim_states).reshape(executed, len(self.parts.scene.state())) if states else None,
            robot_states_ER=np.array(record.robot_states).reshape(executed, ROBOT_STATE_DIM) if states else None,
            timing=timing,
        )

    def observation(self, views: tuple[str, ...]) -> Observation:
        """What is seen now, with the given views rendered."""
        privileged: Mapping[str, np.ndarray] = self.parts.truth.read() if self.look.privileged else {}
        images = {view: self._picture(view) for view in views}
        return Observation(images, self.proprioception.state(), self.prompt, privileged)

    def _record_before(self, record: _ChunkRecord) -> None:
        """Keep what the recorder asked for, before the coming action."""
        if self.look.record_states:
            record.sim_states.append(self.parts.scene.state())
            record.robot_states.append(self.proprioception.robot_state())
        if self.look.record_every and self.control_step % self.look.record_every == 0:
            record.frames[self.control_step] = self.observation(VIEWS)

    def _observe(self) -> None:
        self.proprioception = Proprioception.sample(self.parts.scene)
        self.parts.renderer.snapshot()
        self._pictures = {}

    def _picture(self, view: str) -> np.ndarray:
        if view not in self._pictures:
            began = time.perf_counter()
            self._pictures[view] = oriented(self.parts.renderer.draw(view), self.config.orientation)
            self.render_s += time.perf_counter() - began
        return self._pictures[view]
