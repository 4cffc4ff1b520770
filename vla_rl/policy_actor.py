"""A neural policy as an actor: batches what was submitted and answers from its own thread.

Batches are padded to one fixed size and each row's noise depends on (spec, chunk index) alone, so that what a row
gets does not depend on who else was ready. That leaves the actor free to wait for an env that is about to ask: where a forward
takes longer than a chunk in the env, two envs would otherwise take turns for ever, each waiting for the other's forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.actors import ActorNeeds
from vla_rl.bell import Bell
from vla_rl.episode import ActionChunk, Episode, EpisodeSpec, Observation, noise_seed
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.inference import ActingPolicy, answer
from vla_rl.policies.records import record_of
from vla_rl.telemetry.spans import span

LATEST = 1.25
"""How many times as long as its last chunk an env may take for the next one before it is not waited for any more."""


@dataclass
class _Request:
    env: int
    observation: Observation
    seed: int
    episode: int
    """Number of the episode that asked: an answer to an abandoned one is dropped."""


class PolicyActor:
    """Answers observations with chunks of a policy, cut to its executed horizon.

    `batch_size` is the fixed number of rows of every forward; at most that many requests are answered at once.
    With `exploration` it samples and records what a learner needs; without, it acts as evaluation wants it.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        batch_size: int,
        name: str = "policy",
        weights_version: int = 0,
        device: str = "cpu",
        exploration: Exploration | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        spec = policy.spec
        self.policy = policy
        self.weights_version = weights_version
        self.forwards = 0
        """Batches answered so far; together with the number of chunks they tell how full they were."""
        self.busy_s = 0.0
        """Seconds spent on them."""
        self.needs = ActorNeeds(
            name=name,
            views=spec.views,
            chunk_length=spec.executed_horizon,
            conventions=spec.conventions,
            resolution=spec.resolution,
        )
        self._batch_size = batch_size
        self._device = device
        self._exploration = exploration
        self._specs: dict[int, EpisodeSpec] = {}
        self._chunk_index: dict[int, int] = {}
        self._episode_number: dict[int, int] = {}
        self._pending: list[_Request] = []
        self._answered_at: dict[int, float] = {}
        self._chunk_s: dict[int, float] = {}
        self._arrival = threading.Condition()
        """Guards the three above, which the policy's thread reads while it waits for one more request."""
        self._forward_s = 0.0
        self._running: Future[list[ActionChunk]] | None = None
        self._asked: list[_Request] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._bell = Bell()

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """An episode begins: its chunks are counted from 0."""
        self._specs[env] = spec
        self._chunk_index[env] = 0
        self._episode_number[env] = self._episode_number.get(env, 0) + 1
        with self._arrival:
            self._answered_at.pop(env, None)
            self._pending = [request for request in self._pending if request.env != env]

    def submit(self, env: int, observation: Observation) -> None:
        """Queue an observation; it joins the next batch."""
        seed = noise_seed(self._specs[env], self._chunk_index[env])
        self._chunk_index[env] += 1
        with self._arrival:
            if env in self._answered_at:
                self._chunk_s[env] = time.perf_counter() - self._answered_at.pop(env)
            self._pending.append(_Request(env, observation, seed, self._episode_number[env]))
            self._arrival.notify()

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """Answers of the finished batch; starts the next one. Raises what the policy raised."""
        self._launch()
        if self._running is None:
            return []
        if not wait([self._running], timeout_s).done:
            return []
        self._bell.silence(1)
        chunks, asked = self._running.result(), self._asked
        self._running = None
        answers = [(r.env, chunk) for r, chunk in zip(asked, chunks) if self._episode_number[r.env] == r.episode]
        with self._arrival:
            self._answered_at |= {env: time.perf_counter() for env, _ in answers}
        self._launch()
        return answers

    def waitables(self) -> list[Any]:
        """A socket that becomes readable when a batch is done."""
        return [self._bell.waitable]

    def finish(self, env: int, episode: Episode) -> None:
        """Forget the episode."""
        del self._specs[env], self._chunk_index[env]
        with self._arrival:
            self._answered_at.pop(env, None)

    def close(self) -> None:
        """End the thread after the batch it is in."""
        self._thread.shutdown(wait=True)
        self._bell.close()

    def _launch(self) -> None:
        if self._running is not None or not self._pending:
            return
        self._running = self._thread.submit(self._forward)
        self._running.add_done_callback(lambda _: self._bell.ring())

    def _gather(self) -> list[_Request]:
        """The requests of the next batch, with those that are worth waiting for."""
        with self._arrival:
            while wait_s := self._worth_waiting_s():
                self._arrival.wait(wait_s)
            asked, self._pending = self._pending[: self._batch_size], self._pending[self._batch_size :]
        return asked

    def _worth_waiting_s(self) -> float:
        now = time.perf_counter()
        expected_s = [at + LATEST * self._chunk_s[env] - now for env, at in self._answered_at.items() if env in self._chunk_s]
        return worth_waiting_s(len(self._pending), self._batch_size, self._forward_s, expected_s)

    def _forward(self) -> list[ActionChunk]:
        requests = self._asked = self._gather()
        if not requests:  # whoever asked has begun another episode
            return []
        started = time.perf_counter()
        observations, seeds = [request.observation for request in requests], [request.seed for request in requests]
        with span("policy_forward"):
            output, actions_BCA = answer(self.policy, observations, seeds, self._batch_size, self._device, self._exploration)
        self.forwards += 1
        self._forward_s = time.perf_counter() - started
        self.busy_s += self._forward_s
        horizon = self.policy.spec.executed_horizon
        return [
            ActionChunk(
                actions_CA=np.ascontiguousarray(actions_BCA[row, :horizon]),
                record=record_of(output, row),
                value=None if output.value_B is None else float(output.value_B[row]),
                weights_version=self.weights_version,
            )
            for row in range(len(requests))
        ]


def worth_waiting_s(asked: int, batch_size: int, forward_s: float, expected_s: Sequence[float]) -> float:
    """Seconds to wait for the env that is expected next, before a batch of those that `asked` starts; 0: start now.

    Waiting w keeps the k envs that have asked idle for w; starting keeps the late one idle for what is then left of the forward, f - w. So
    it is worth it while k w < f - w. `expected_s` says in how many seconds each env that is in a chunk will ask; those that should have
    asked already (below 0) are not waited for.
    """
    wait_s = min((seconds for seconds in expected_s if seconds > 0), default=0.0)
    worth_it = 0 < asked < batch_size and asked * wait_s < forward_s - wait_s
    return wait_s if worth_it else 0.0
