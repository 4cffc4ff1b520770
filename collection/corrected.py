"""Operators without a person, as fast as the machine can: the scripted one that corrects a policy (DAgger), and recorded hands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from vla_rl.actors import Actor
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control, Driver
from vla_rl.collection.devices.replay import ReplayHand
from vla_rl.collection.devices.scripted import ScriptedOperator
from vla_rl.collection.operated_actor import SCRIPT, OperatedActor
from vla_rl.collection.operators import ReplayOperator, ScriptedOperatorConfig
from vla_rl.collection.plan import noisy_expert, recorded_episodes
from vla_rl.collection.watched_pool import WatchedPool
from vla_rl.episode import Episode, EpisodeSpec
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvPool

REPLAY = "replay"
"""Name of the recorded hand among operators."""


def acting_policy(config: CollectConfig) -> Actor | None:
    """The policy of the recipe's checkpoint; None without one. Raises the checkpoint's own errors."""
    if config.checkpoint is None:
        return None
    from vla_rl.policies.checkpoint import load_policy
    from vla_rl.policy_actor import PolicyActor

    return PolicyActor(load_policy(config.checkpoint), batch_size=config.pool.workers, name=config.checkpoint)


def corrected_episodes(config: CollectConfig, pool: EnvPool, specs: Sequence[EpisodeSpec]) -> Iterator[Episode]:
    """Episodes as they end, with the operators of each in its provenance."""
    watched = WatchedPool(pool, None, (), lambda picture: None)
    control = Control(pool.num_envs, has_policy=config.checkpoint is not None)
    actor = _actor(config, control, watched)
    look = look_of(actor.needs, config.frame_every if config.render == "live" else 0, record_states=True)
    with closing(actor):
        for episode in run_episodes(watched, actor, ListSource(specs), lambda spec: look):
            log = actor.logs.pop(episode.spec.key)
            yield replace(episode, provenance={**episode.provenance, "operators": log.operators})


def _actor(config: CollectConfig, control: Control, pool: WatchedPool) -> OperatedActor:
    if isinstance(config.operator, ReplayOperator):
        control.join(REPLAY)
        hand = ReplayHand({info.spec.key: info for info in recorded_episodes(config, config.operator)})
        return OperatedActor(control, None, {REPLAY: hand}, None, pool.meters, pool.preempt, lambda: _replay(control, hand))
    assert isinstance(config.operator, ScriptedOperatorConfig), "a person needs a session"
    control.join(SCRIPT)
    script = ScriptedOperator(config.operator.switching, lambda spec: noisy_expert(config, spec))
    return OperatedActor(control, acting_policy(config), {SCRIPT: script}, None, pool.meters, pool.preempt)


def _replay(control: Control, hand: ReplayHand) -> None:
    """Begin every take, and end it as it was recorded to end where the simulator does not."""
    for env, state in enumerate(control.envs):
        if not state.take or state.verdict is not None:
            continue
        outcome = hand.ended(env) if state.driver is Driver.OPERATOR else None
        if state.driver is not Driver.OPERATOR:
            control.take_over(env, REPLAY)
        elif outcome is not None:
            control.judge(env, REPLAY, outcome)
