"""A policy that the scripted operator corrects: DAgger's data without a person, as fast as the machine can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from vla_rl.actors import Actor
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control
from vla_rl.collection.devices.scripted import ScriptedOperator
from vla_rl.collection.operated_actor import SCRIPT, OperatedActor
from vla_rl.collection.operators import ScriptedOperatorConfig
from vla_rl.collection.plan import noisy_expert
from vla_rl.collection.watched_pool import WatchedPool
from vla_rl.episode import Episode, EpisodeSpec
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvPool


def acting_policy(config: CollectConfig) -> Actor | None:
    """The policy of the recipe's checkpoint; None without one. Raises the checkpoint's own errors."""
    if config.checkpoint is None:
        return None
    from vla_rl.policies.checkpoint import load_policy
    from vla_rl.policy_actor import PolicyActor

    return PolicyActor(load_policy(config.checkpoint), batch_size=config.pool.workers, name=config.checkpoint)


def corrected_episodes(config: CollectConfig, pool: EnvPool, specs: Sequence[EpisodeSpec]) -> Iterator[Episode]:
    """Episodes as they end, with the operators of each in its provenance."""
    assert isinstance(config.operator, ScriptedOperatorConfig), "a person needs a session"
    watched = WatchedPool(pool, None, (), lambda picture: None)
    script = ScriptedOperator(config.operator.switching, lambda spec: noisy_expert(config, spec))
    control = Control(pool.num_envs, has_policy=True)
    control.join(SCRIPT)
    actor = OperatedActor(control, acting_policy(config), {SCRIPT: script}, None, watched.meters, watched.preempt)
    look = look_of(actor.needs, config.frame_every if config.render == "live" else 0, record_states=True)
    with closing(actor):
        for episode in run_episodes(watched, actor, ListSource(specs), lambda spec: look):
            log = actor.logs.pop(episode.spec.key)
            yield replace(episode, provenance={**episode.provenance, "operators": log.operators})
