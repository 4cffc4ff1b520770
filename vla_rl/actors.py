"""Who acts: the actor contract, and the actors that need no network (no-op, random, scripted, replay).

An actor has the same submit/ready shape as an env pool, so that the loop (`rollout.py`) serves both
and neither waits for the other. The policy actor is in `policy_actor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, ActionChunk, Episode, EpisodeSpec, Float32, Observation, noise_seed

NO_OP_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""Hold the pose, open the gripper: what LIBERO's protocols do while objects settle."""


@dataclass(frozen=True)
class ActorNeeds:
    """What an actor must be shown, compared with the env's spec when the two are connected."""

    name: str
    """For messages."""
    views: tuple[str, ...] = ()
    """Views it looks at."""
    privileged: bool = False
    """Whether it reads simulator truth."""
    chunk_length: int = 1
    """The most actions it proposes at once."""
    conventions: Conventions | None = None
    """None: any."""
    resolution: int | None = None
    """Pixels it wants rendered at; None: any."""


class Actor(Protocol):
    """Answers observations with action chunks, for any number of envs at once."""

    needs: ActorNeeds

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """An episode begins in `env`; whatever was pending there is dropped (its worker may have died)."""
        ...

    def submit(self, env: int, observation: Observation) -> None:
        """Ask for a chunk; the answer comes through `ready`."""
        ...

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """Answers that are there, waiting at most `timeout_s` for the first one."""
        ...

    def waitables(self) -> list[Any]:
        """Objects for `multiprocessing.connection.wait` that become readable when `ready(0)` has something new."""
        ...

    def finish(self, env: int, episode: Episode) -> None:
        """The episode in `env` ended."""
        ...

    def close(self) -> None:
        """Stop threads; may be called twice."""
        ...


Decide = Callable[[Observation], ActionChunk]
"""Answers the observations of one episode, in order."""


class SynchronousActor:
    """An actor that answers at once: one `Decide` per episode, made from its spec."""

    def __init__(self, needs: ActorNeeds, make: Callable[[EpisodeSpec], Decide]) -> None:
        self.needs = needs
        self._make = make
        self._decide: dict[int, Decide] = {}
        self._answers: list[tuple[int, ActionChunk]] = []

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """Make the episode's own decision function; drop what a dead worker's episode left."""
        self._answers = [answer for answer in self._answers if answer[0] != env]
        self._decide[env] = self._make(spec)

    def submit(self, env: int, observation: Observation) -> None:
        """Decide now; `ready` hands it out."""
        self._answers.append((env, self._decide[env](observation)))

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """All answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def waitables(self) -> list[Any]:
        """Nothing to wait for: answers are there when `submit` returns."""
        return []

    def finish(self, env: int, episode: Episode) -> None:
        """Forget the episode."""
        del self._decide[env]

    def close(self) -> None:
        """Nothing to stop."""


def no_op_actor(chunk_length: int = 8) -> SynchronousActor:
    """Does nothing, to the time limit: the control whose success rate must be about 0."""
    chunk = ActionChunk(np.tile(np.asarray(NO_OP_ACTION, np.float32), (chunk_length, 1)))
    return SynchronousActor(ActorNeeds("noop", chunk_length=chunk_length), lambda spec: lambda observation: chunk)


def random_actor(chunk_length: int = 8) -> SynchronousActor:
    """Uniform actions in [-1, 1], a function of (spec, chunk index) alone."""

    def make(spec: EpisodeSpec) -> Decide:
        chunk_index = 0

        def decide(observation: Observation) -> ActionChunk:
            nonlocal chunk_index
            generator = np.random.default_rng(noise_seed(spec, chunk_index, "random"))
            chunk_index += 1
            return ActionChunk(generator.uniform(-1.0, 1.0, (chunk_length, ACTION_DIM)).astype(np.float32))

        return decide

    return SynchronousActor(ActorNeeds("random", chunk_length=chunk_length), make)


class Expert(Protocol):
    """A scripted expert of one episode."""

    def act(self, observation: Observation) -> tuple[Float32, Float32]:
        """The action to execute and the clean intention, float32[7] each."""
        ...


def scripted_actor(make_expert: Callable[[EpisodeSpec], Expert]) -> SynchronousActor:
    """A scripted expert per episode: reads privileged state, looks at no picture, one action at a time."""

    def make(spec: EpisodeSpec) -> Decide:
        expert = make_expert(spec)

        def decide(observation: Observation) -> ActionChunk:
            action, label = expert.act(observation)
            return ActionChunk(action[None], labels_CA=label[None])

        return decide

    return SynchronousActor(ActorNeeds("expert", privileged=True, chunk_length=1), make)


def replay_actor(actions_NA: Mapping[str, Float32], chunk_length: int = 8) -> SynchronousActor:
    """Executes recorded actions, found by `EpisodeSpec.key`; finishes when they run out.

    Raises KeyError naming the spec if nothing is recorded for it.
    """

    def make(spec: EpisodeSpec) -> Decide:
        if spec.key not in actions_NA:
            raise KeyError(f"no recorded actions for {spec.key}; the recording holds {len(actions_NA)} other episodes")
        recorded_NA = actions_NA[spec.key]
        position = 0

        def decide(observation: Observation) -> ActionChunk:
            nonlocal position
            actions = recorded_NA[position : position + chunk_length]
            position += len(actions)
            return ActionChunk(np.ascontiguousarray(actions, np.float32), finished=position >= len(recorded_NA))

        return decide

    return SynchronousActor(ActorNeeds("replay", chunk_length=chunk_length), make)
