"""The LIBERO environment: real simulation behind the `Env` contract of `sim/base.py`."""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, VIEWS, EpisodeSpec
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvSpec, EpisodeOver, Look, ResetReply
from vla_rl.sim.libero import egl, packaging, tasks

if TYPE_CHECKING:
    from vla_rl.sim.libero import run

SCENE_CACHE_SIZE = 1
"""Compiled tasks an env keeps (the least recently used is freed). Each takes about 1.5 GiB with software rendering, nearly all
of it textures, and 2 to 5 s to compile; specs come task by task, so that one is enough."""


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
        from vla_rl.sim.libero import run  # imports the simulator, which reads the variables that `egl.configure` sets

        self._run_module = run
        self._parts: OrderedDict[tuple[str, int], run.Parts] = OrderedDict()
        self._run: run.EpisodeRun | None = None
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
        began = time.perf_counter()
        self._run = None
        egl.context()  # another renderer of this process may have taken over
        parts = self._parts_of(spec)
        self._run, reply = self._run_module.start(parts, self.config, spec, look)
        reply.timing = {"reset": time.perf_counter() - began, **reply.timing}
        return reply

    def step_chunk(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> ChunkReply:
        """Execute actions until the chunk, the episode or the time limit ends, or a preemption is requested.

        actions_CA: [C, 7], clipped to [-1, 1]. Raises EpisodeOver when the episode has ended or none was started, ValueError for
        actions of another shape or not finite.
        """
        run = self._run
        if run is None:
            raise EpisodeOver("step_chunk without a running episode: call reset first, and again after terminated or truncated")
        actions = _executable(actions_CA)
        reply = run.run_chunk(actions, self._preempt_requested, views)
        if reply.terminated or reply.truncated:
            self._run = None
        return reply

    def close(self) -> None:
        """Free everything; may be called twice."""
        self._run = None
        if self._parts:
            egl.context()
            self._free_down_to(0)

    def _parts_of(self, spec: EpisodeSpec) -> run.Parts:
        key = (spec.suite, spec.task)
        if key not in self._parts:
            task = tasks.load_task(*key)
            self._free_down_to(SCENE_CACHE_SIZE - 1)
            self._parts[key] = self._run_module.build(task, self.config)
        self._parts.move_to_end(key)
        return self._parts[key]

    def _free_down_to(self, count: int) -> None:
        if len(self._parts) <= count:
            return
        while len(self._parts) > count:
            self._parts.popitem(last=False)[1].close()
        gc.collect()  # LIBERO's objects refer to each other, so that a dropped scene would linger

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


def _executable(actions_CA: np.ndarray) -> np.ndarray:
    """float32[C, 7] in [-1, 1]. Raises ValueError for another shape or numbers that are not finite."""
    actions = np.asarray(actions_CA, np.float32)
    if actions.ndim != 2 or actions.shape[1] != ACTION_DIM:
        raise ValueError(f"actions have shape {actions.shape}, expected (C, {ACTION_DIM})")
    if not np.isfinite(actions).all():
        raise ValueError(f"actions hold numbers that are not finite: {actions[~np.isfinite(actions).all(axis=1)][0].tolist()}")
    return np.clip(actions, -1.0, 1.0)
