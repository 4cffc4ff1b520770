"""From an `EnvConfig` to the env it names; simulators are imported only here, in the process that runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from vla_rl.sim.base import Env, EnvConfig


def make_env(
    config: EnvConfig,
    preempt_requested: Callable[[], bool] = lambda: False,
    worker: int = 0,
    gl_turn: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
) -> Env:
    """Build the env that `config.kind` names.

    preempt_requested: asked before every control step; True ends the chunk there. worker: index among the workers of
    this machine, which decides the GPU that renders. gl_turn: held while the process's GL context is created.
    MuJoCo chooses its GL library when it is first imported, so `MUJOCO_GL` is set before: to `egl`, which needs no
    display, unless the user chose.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    from vla_rl.sim.libero import egl

    if config.kind == "libero":
        egl.configure(worker)
    with gl_turn:
        egl.context()
    if config.kind == "reach":
        from vla_rl.sim.reach import ReachEnv

        return ReachEnv(config, preempt_requested)
    from vla_rl.sim.libero.env import LiberoEnv

    return LiberoEnv(config, preempt_requested, worker)
