"""Several envs behind one interface: `make_pool`."""

from __future__ import annotations

from vla_rl.sim.base import EnvConfig, EnvPool
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool_state import EnvState, MakeEnv, PoolConfig, PoolStartError, PoolStateError
from vla_rl.sim.process_pool import ProcessPool
from vla_rl.sim.serial_pool import SerialPool

__all__ = ["EnvState", "MakeEnv", "PoolConfig", "PoolStartError", "PoolStateError", "ProcessPool", "SerialPool", "make_pool"]


def make_pool(pool: PoolConfig, env: EnvConfig, make_env: MakeEnv = make_env) -> EnvPool:
    """The pool that `pool.backend` names. Raises PoolStartError if the first env cannot be made."""
    pools = {"process": ProcessPool, "serial": SerialPool}
    return pools[pool.backend](pool, env, make_env)
