"""Demonstrations of Reach, made by the scripted expert in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.actors import scripted_actor
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import EpisodeSpec, StepProtocol
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig, make_pool
from vla_rl.sim.reach_expert import ReachExpert

FRAME_EVERY = 2


def record_reach(folder: Path, episodes: int, noise: float = 0.3, resolution: int = 64, tasks: Sequence[int] = (0,)) -> None:
    """Write `episodes` demonstrations, each of another scene, with a picture before every second action; the tasks take turns."""
    protocol = StepProtocol(max_steps=60, settle_steps=0)
    specs = [EpisodeSpec("reach", tasks[seed % len(tasks)], f"sampled:{seed}", "demonstrations", protocol) for seed in range(episodes)]
    actor = scripted_actor(lambda spec: ReachExpert(spec, noise, seed=spec.init_number))
    pool = make_pool(PoolConfig(backend="serial", workers=1), EnvConfig(kind="reach", resolution=resolution))
    store = EpisodeStore(folder)
    try:
        for episode in run_episodes(pool, actor, ListSource(specs), lambda spec: look_of(actor.needs, FRAME_EVERY, record_states=True)):
            episode.provenance = {**episode.provenance, "conventions": pool.spec.conventions.to_dict()}
            store.write(episode.spec.init_number, episode, FRAME_EVERY)
    finally:
        pool.close()
        actor.close()
