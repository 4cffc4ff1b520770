"""A policy on a server as an actor: one connection and one thread per env, so that the server can batch what the envs ask.

What is compared when it connects to an env is what the server says of its policy (views, conventions, resolution). Another system's
server says less; then the protocol's own conventions count, and the executed horizon has to be given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from vla_rl.actors import ActorNeeds
from vla_rl.bell import Bell
from vla_rl.episode import ActionChunk, Episode, EpisodeSpec, Float32, Observation, noise_seed
from vla_rl.policies.remote import groot
from vla_rl.policies.remote.client import PolicyClient, open_client
from vla_rl.policies.remote.served import RemoteError, ServedPolicy
from vla_rl.telemetry.spans import span


class RemoteActor:
    """Answers observations with chunks of a policy server, cut to the executed horizon."""

    def __init__(
        self,
        url: str,
        connections: int,
        timeout_s: float,
        executed_horizon: int | None = None,
        connect: Callable[[str, float], PolicyClient] = open_client,
    ) -> None:
        """`connections` requests are under way at the most; `executed_horizon` None takes the one that the policy was made for.

        Raises RemoteError if the server cannot be reached, or does not say how many actions to execute and nobody else did.
        """
        self._url, self._timeout_s, self._connect = url, timeout_s, connect
        first = connect(url, timeout_s)
        self.served: ServedPolicy | None = first.served
        """What the server says of its policy; None for another system's server."""
        self.executed_horizon = _horizon(url, first, executed_horizon)
        """Actions executed before it is asked again."""
        self.needs = _needs(url, first, self.executed_horizon)
        self._spare = [first]
        self._clients: dict[int, PolicyClient] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._specs: dict[int, EpisodeSpec] = {}
        self._chunk_index: dict[int, int] = {}
        self._episode_number: dict[int, int] = {}
        self._asked: dict[Future[Float32], tuple[int, int]] = {}
        self._threads = ThreadPoolExecutor(max_workers=connections, thread_name_prefix="remote policy")
        self._bell = Bell()

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """An episode begins: its chunks are counted from 0."""
        self._specs[env] = spec
        self._chunk_index[env] = 0
        self._episode_number[env] = self._episode_number.get(env, 0) + 1
        self._locks.setdefault(env, threading.Lock())

    def submit(self, env: int, observation: Observation) -> None:
        """Send an observation to the server from the env's own thread."""
        seed = noise_seed(self._specs[env], self._chunk_index[env])
        self._chunk_index[env] += 1
        future = self._threads.submit(self._ask, env, observation, seed)
        self._asked[future] = (env, self._episode_number[env])
        future.add_done_callback(lambda _: self._bell.ring())

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """Answers that have come. Raises RemoteError or MessageError if a request failed."""
        finished = wait(self._asked, timeout_s, FIRST_COMPLETED).done if self._asked else set()
        self._bell.silence(len(finished))
        answers: list[tuple[int, ActionChunk]] = []
        for future in finished:
            env, episode = self._asked.pop(future)
            actions_CA = future.result()
            if episode == self._episode_number[env]:
                answers.append((env, ActionChunk(np.ascontiguousarray(actions_CA[: self.executed_horizon]))))
        return answers

    def waitables(self) -> list[Any]:
        """A socket that becomes readable when an answer has come."""
        return [self._bell.waitable]

    def finish(self, env: int, episode: Episode) -> None:
        """Forget the episode."""
        del self._specs[env], self._chunk_index[env]

    def close(self) -> None:
        """Wait for requests that are under way (each has a deadline), then end the connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for client in [*self._spare, *self._clients.values()]:
            client.close()
        self._spare, self._clients = [], {}
        self._bell.close()

    def _ask(self, env: int, observation: Observation, seed: int) -> Float32:
        with self._locks[env], span("remote_policy"):  # an abandoned episode's request may still be under way
            if env not in self._clients:
                self._clients[env] = self._spare.pop() if self._spare else self._connect_again()
            actions_CA = self._clients[env].ask(observation, seed)
        if len(actions_CA) < self.executed_horizon:
            raise RemoteError(
                f"{self._url} answered with {len(actions_CA)} actions and {self.executed_horizon} shall be executed; "
                f"set policy.executed_horizon to at most {len(actions_CA)}"
            )
        return actions_CA

    def _connect_again(self) -> PolicyClient:
        client = self._connect(self._url, self._timeout_s)
        if client.served != self.served:
            client.close()
            raise RemoteError(f"{self._url} serves another policy than when this evaluation began; start it with the same one again")
        return client


def _horizon(url: str, client: PolicyClient, asked: int | None) -> int:
    """How many actions of a chunk are executed. Raises RemoteError where nobody says, or more are asked for than a chunk has."""
    horizon = asked if asked is not None or client.served is None else client.served.spec.executed_horizon
    if horizon is None:
        client.close()
        raise RemoteError(
            f"{url} does not say how many actions of a chunk its policy was made to execute; set policy.executed_horizon "
            "(openpi's LIBERO client executes 5, GR00T's 8)"
        )
    if client.chunk_length is not None and horizon > client.chunk_length:
        client.close()
        raise RemoteError(f"policy.executed_horizon is {horizon}; a chunk of {url} has {client.chunk_length} actions, ask for at most that")
    return horizon


def _needs(url: str, client: PolicyClient, horizon: int) -> ActorNeeds:
    if client.served is None:
        return ActorNeeds(url, client.views, chunk_length=horizon, conventions=groot.CONVENTIONS)
    spec = client.served.spec
    return ActorNeeds(url, spec.views, chunk_length=horizon, conventions=spec.conventions, resolution=spec.resolution)
