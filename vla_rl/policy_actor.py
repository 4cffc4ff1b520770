"""A neural policy as an actor: batches what was submitted and answers from its own thread.

Batches are padded to one fixed size and each row's noise depends on (spec, chunk index) alone, so that what a row
gets does not depend on who else was ready.
"""

from __future__ import annotations

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
        self._running: Future[list[ActionChunk]] | None = None
        self._asked: list[_Request] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._bell = Bell()

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """An episode begins: its chunks are counted from 0."""
        self._specs[env] = spec
        self._chunk_index[env] = 0
        self._episode_number[env] = self._episode_number.get(env, 0) + 1
        self._pending = [request for request in self._pending if request.env != env]

    def submit(self, env: int, observation: Observation) -> None:
        """Queue an observation; it joins the next batch."""
        seed = noise_seed(self._specs[env], self._chunk_index[env])
        self._chunk_index[env] += 1
        self._pending.append(_Request(env, observation, seed, self._episode_number[env]))

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
        self._launch()
        return [(r.env, chunk) for r, chunk in zip(asked, chunks) if self._episode_number[r.env] == r.episode]

    def waitables(self) -> list[Any]:
        """A socket that becomes readable when a batch is done."""
        return [self._bell.waitable]

    def finish(self, env: int, episode: Episode) -> None:
        """Forget the episode."""
        del self._specs[env], self._chunk_index[env]

    def close(self) -> None:
        """End the thread after the batch it is in."""
        self._thread.shutdown(wait=True)
        self._bell.close()

    def _launch(self) -> None:
        if self._running is not None or not self._pending:
            return
        self._asked, self._pending = self._pending[: self._batch_size], self._pending[self._batch_size :]
        self._running = self._thread.submit(self._forward, self._asked)
        self._running.add_done_callback(lambda _: self._bell.ring())

    def _forward(self, requests: Sequence[_Request]) -> list[ActionChunk]:
        started = time.perf_counter()
        observations, seeds = [request.observation for request in requests], [request.seed for request in requests]
        with span("policy_forward"):
            output, actions_BCA = answer(self.policy, observations, seeds, self._batch_size, self._device, self._exploration)
        self.forwards += 1
        self.busy_s += time.perf_counter() - started
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
