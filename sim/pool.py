"""Several envs behind one interface: `make_pool`."""

from __future__ import annotations

import logging

from vla_rl.sim.base import EnvConfig, EnvPool
from vla_rl.sim.factory import make_env
from vla_rl.sim.libero import egl
from vla_rl.sim.pool_state import EnvState, MakeEnv, PoolConfig, PoolStartError, PoolStateError
from vla_rl.sim.process_pool import ProcessPool
from vla_rl.sim.serial_pool import SerialPool

__all__ = ["EnvState", "MakeEnv", "PoolConfig", "PoolStartError", "PoolStateError", "ProcessPool", "SerialPool", "make_pool"]

_LOG = logging.getLogger(__name__)


def make_pool(pool: PoolConfig, env: EnvConfig, make_env: MakeEnv = make_env) -> EnvPool:
    """The pool that `pool.backend` names; warns where its envs draw in software beside a GPU.

    Raises PoolStartError if the first env cannot be made.
    """
    pools = {"process": ProcessPool, "serial": SerialPool}
    made = pools[pool.backend](pool, env, make_env)
    if made.spec.provenance.get("software_rendering") and egl.num_gpus():
        _LOG.warning("envs draw in software (%s) beside a GPU: %s", made.spec.provenance["renderer"], egl.SOFTWARE_REMEDY)
    return made
