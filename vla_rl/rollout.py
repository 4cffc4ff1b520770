"""The loop that produces episodes: an actor, an env pool, and a source of specs.

Collection, RL, DAgger and evaluation differ in the actor, in what they keep, and in nothing else.
Envs and actor answer when they are ready, in any order; nothing that is recorded depends on that order:
noise comes from (spec, sample, chunk index), and which spec runs next is decided in spec order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

from vla_rl.actors import Actor, ActorNeeds
from vla_rl.conventions import require_equal
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome, Verdict
from vla_rl.errors import UserError
from vla_rl.sim.base import ChunkReply, EnvFault, EnvPool, EnvReply, EnvSpec, Look, ResetReply
from vla_rl.telemetry.spans import SpanTotals

ATTEMPTS = 2
"""How often a spec runs at the most: a crash is no failure, so it runs again once."""
POLL_S = 1.0
"""Longest sleep between two looks at the pool's deadlines (s)."""


class ConnectError(UserError):
    """An actor and an env that cannot work together."""


class SpecSource(Protocol):
    """Hands out specs, in spec order, and hears what became of them."""

    def next(self) -> EpisodeSpec | None:
        """The next spec, or None when there is none now; asked again after every `report`."""
        ...

    def report(self, episode: Episode) -> None:
        """An episode ended (also as a crash)."""
        ...


class ListSource:
    """The specs of a list, once each, in order."""

    def __init__(self, specs: Iterable[EpisodeSpec]) -> None:
        self._specs = iter(specs)

    def next(self) -> EpisodeSpec | None:
        """The next of the list; None when all were handed out."""
        return next(self._specs, None)

    def report(self, episode: Episode) -> None:
        """Nothing depends on how an episode ended."""


@dataclass
class _Running:
    """The episode that runs in one env."""

    spec: EpisodeSpec
    faults: list[str]
    """Faults of earlier attempts at the same spec."""
    started_s: float = field(default_factory=time.perf_counter)
    steps: list[ChunkStep] = field(default_factory=list[ChunkStep])
    observation: Observation | None = None
    proposed: ActionChunk | None = None
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])


_Ended = tuple[int, Episode | None] | None
"""An env that is free again, with its episode (None: the spec will run again); or None: it goes on."""


def look_of(needs: ActorNeeds, record_every: int = 0, record_states: bool = False, privileged: bool = False) -> Look:
    """What an env must show this actor, plus what a recorder or a reward asks for.

    privileged: the episode keeps simulator truth; an actor that does not need it is not shown it.
    """
    return Look(views=needs.views, privileged=needs.privileged or privileged, record_every=record_every, record_states=record_states)


def connect(env: EnvSpec, needs: ActorNeeds) -> None:
    """Check that an actor can act in an env.

    Raises ConventionMismatch for conventions or rate, ConnectError for views or resolution, naming both sides.
    """
    if needs.conventions is not None:
        require_equal(f"actor {needs.name}", needs.conventions, f"env {env.kind}", env.conventions)
    missing = [view for view in needs.views if view not in env.views]
    if missing:
        raise ConnectError(f"actor {needs.name} looks at {', '.join(missing)}; env {env.kind} has only {', '.join(env.views)}")
    if needs.resolution not in (None, env.resolution):
        raise ConnectError(
            f"actor {needs.name} was made for pictures of {needs.resolution} px; env {env.kind} renders {env.resolution} px. "
            f"Set env.resolution to {needs.resolution}."
        )


def run_episodes(pool: EnvPool, actor: Actor, specs: SpecSource, look_for: Callable[[EpisodeSpec], Look]) -> Iterator[Episode]:
    """Run every spec of the source and yield each episode when it ends, crashes included.

    A spec whose env raised, hung or died runs again once; if that fails too, its episode has outcome CRASH, no steps,
    and the faults' texts as its reason. Raises what the actor raises, and what `connect` raises.
    """
    connect(pool.spec, actor.needs)
    running: dict[int, _Running] = {}
    again: deque[_Running] = deque()
    totals = SpanTotals()

    def begin(env: int) -> None:
        entry = _next_episode(again, specs)
        if entry is not None:
            running[env] = entry
            actor.start(env, entry.spec)
            pool.reset(env, entry.spec, look_for(entry.spec))

    for env in range(pool.num_envs):
        begin(env)
    replies: list[EnvReply] = []
    while running:
        asks_actor = not replies  # a pool that just answered may have more: look again before the actor starts a batch
        with totals.timed("actor"):
            chunks = [(env, chunk) for env, chunk in actor.ready(0.0) if env in running] if asks_actor else []
        with totals.timed("pool"):
            ended = [_propose(pool, running, env, chunk) for env, chunk in chunks]
            replies = pool.ready(0.0)
        with totals.timed("actor"):
            ended += [_receive(actor, running, again, reply) for reply in replies]
            episodes = _finish(actor, specs, running, ended)
        with totals.timed("pool"):
            for env in range(pool.num_envs):
                if env not in running:
                    begin(env)
        if episodes:
            totals.flush()
            yield from episodes
        elif asks_actor and not chunks and not replies:  # an actor that was not asked may have answers, or has not begun
            with totals.timed(_who_is_awaited(running)):
                wait([*pool.waitables(), *actor.waitables()], POLL_S)
    totals.flush()


def _finish(actor: Actor, specs: SpecSource, running: dict[int, _Running], ended: Iterable[_Ended]) -> list[Episode]:
    """Free the envs whose episodes ended, and tell actor and source about each episode."""
    episodes: list[Episode] = []
    for env, episode in filter(None, ended):
        del running[env]
        if episode is not None:
            actor.finish(env, episode)
            specs.report(episode)
            episodes.append(episode)
    return episodes


def _next_episode(again: deque[_Running], specs: SpecSource) -> _Running | None:
    if again:
        return again.popleft()
    spec = specs.next()
    return None if spec is None else _Running(spec, faults=[])


def _who_is_awaited(running: dict[int, _Running]) -> str:
    """Name of the span for waiting: who keeps the loop."""
    for_actor = any(entry.proposed is None and entry.observation is not None for entry in running.values())
    for_env = any(entry.proposed is not None or entry.observation is None for entry in running.values())
    return "wait_env_and_policy" if for_actor and for_env else "wait_policy" if for_actor else "wait_env"


def _propose(pool: EnvPool, running: dict[int, _Running], env: int, chunk: ActionChunk) -> _Ended:
    """Hand an actor's chunk to the env, or end the episode if the actor has nothing more to do."""
    entry = running[env]
    if chunk.finished and not len(chunk.actions_CA):
        return env, _judged(entry, chunk)
    entry.proposed = chunk
    pool.step(env, chunk)
    return None


def _receive(actor: Actor, running: dict[int, _Running], again: deque[_Running], reply: ResetReply | ChunkReply | EnvFault) -> _Ended:
    """Take a reply into the episode of its env; ask the actor for the next chunk or end the episode."""
    entry = running[reply.env]
    if isinstance(reply, EnvFault):
        return _fault(entry, again, reply)
    if isinstance(reply, ResetReply):
        entry.provenance = dict(reply.provenance) | {"reset_s": dict(reply.timing)}
    else:
        _append(entry, _chunk_step(entry, reply))
    entry.observation = reply.observation
    proposed, entry.proposed = entry.proposed, None
    if isinstance(reply, ChunkReply) and (reply.terminated or reply.truncated):
        outcome = Outcome.SUCCESS if reply.terminated else Outcome.FAILURE
        return reply.env, _episode(entry, outcome, "predicate" if reply.terminated else "time limit")
    if proposed is not None and proposed.finished:
        return reply.env, _judged(entry, proposed)
    seen = reply.observation if actor.needs.privileged else replace(reply.observation, privileged={})
    actor.submit(reply.env, seen)
    return None


def _judged(entry: _Running, chunk: ActionChunk) -> Episode:
    """The episode that an actor ends, with a person's word about it where there is one."""
    verdict = chunk.verdict or Verdict(Outcome.FAILURE, "actor finished")
    return _episode(entry, verdict.outcome, verdict.reason)


def _append(entry: _Running, step: ChunkStep) -> None:
    """Add what was executed: as a chunk of its own, or to the chunk that it continues. A chunk cut to nothing leaves no trace."""
    if not len(step.executed_EA):
        return
    if step.proposed.continues and entry.steps:
        entry.steps[-1] = joined(entry.steps[-1], step)
    else:
        entry.steps.append(step)


def joined(first: ChunkStep, rest: ChunkStep) -> ChunkStep:
    """One chunk of two that were executed one after the other: the first one's observation and proposal, the rest's end."""

    def both(name: str) -> Any:
        arrays = getattr(first, name), getattr(rest, name)
        return None if arrays[0] is None or arrays[1] is None else np.concatenate(arrays)

    labels = (first.proposed.labels_CA, rest.proposed.labels_CA)
    proposed = replace(
        first.proposed,
        actions_CA=np.concatenate([first.proposed.actions_CA, rest.proposed.actions_CA]),
        labels_CA=None if labels[0] is None or labels[1] is None else np.concatenate([labels[0], labels[1]]),
    )
    arrays = {name: both(name) for name in ("executed_EA", "labels_EA", "reward_E", "intervention_E", "sim_states_ED", "robot_states_ER")}
    return replace(
        first,
        **arrays,
        proposed=proposed,
        success=rest.success,
        terminated=rest.terminated,
        truncated=rest.truncated,
        timing={name: first.timing.get(name, 0.0) + seconds for name, seconds in rest.timing.items()},
        frames={**first.frames, **rest.frames},
    )


def _fault(entry: _Running, again: deque[_Running], fault: EnvFault) -> _Ended:
    faults = [*entry.faults, f"{fault.kind}: {fault.message}"]
    if len(faults) < ATTEMPTS:
        again.append(_Running(entry.spec, faults))
        return fault.env, None
    crashed = _Running(entry.spec, faults, entry.started_s)
    return fault.env, _episode(crashed, Outcome.CRASH, "\n".join(faults))


def _chunk_step(entry: _Running, reply: ChunkReply) -> ChunkStep:
    proposed, observation = entry.proposed, entry.observation
    assert proposed is not None and observation is not None, "a chunk reply without a proposed chunk"
    executed = len(reply.executed_EA)
    labels = reply.executed_EA if proposed.labels_CA is None else proposed.labels_CA[:executed]
    return ChunkStep(
        observation=observation,
        proposed=proposed,
        executed_EA=reply.executed_EA,
        labels_EA=labels,
        reward_E=reply.reward_E,
        intervention_E=np.full(executed, proposed.intervention),
        success=reply.success,
        terminated=reply.terminated,
        truncated=reply.truncated,
        timing=reply.timing,
        frames=reply.frames,
        sim_states_ED=reply.sim_states_ED,
        robot_states_ER=reply.robot_states_ER,
    )


def _episode(entry: _Running, outcome: Outcome, reason: str) -> Episode:
    return Episode(
        spec=entry.spec,
        steps=entry.steps,
        final_observation=entry.observation,
        outcome=outcome,
        reason=reason,
        provenance=entry.provenance | ({"earlier_faults": entry.faults} if entry.faults else {}),
        wall_s=time.perf_counter() - entry.started_s,
    )
