"""Requests of many clients, answered in batches; whoever has waited longest computes for all, in its own thread.

There is no thread of the policy's own: a lone client's request is computed where it was received, without a hand-over. While one
thread computes, others queue up; when it is done, the next one takes them all. A batch is taken when it is full, when every client
that could still join has asked, or when its first request has waited `max_wait_s`. One fixed batch size makes an answer independent of
who else asked, see `policies/inference.py`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from vla_rl.episode import Float32, Observation
from vla_rl.policies.inference import ActingPolicy, answer


@dataclass(frozen=True)
class Answer:
    """A chunk, and how long it took to compute."""

    actions_CA: Float32
    """float32[C, 7], environment units: the whole predicted chunk."""
    infer_ms: float
    """Milliseconds of the batch it was in."""


@dataclass
class _Request:
    observation: Observation
    noise_seed: int
    asked_s: float = field(default_factory=time.monotonic)
    outcome: Answer | BaseException | None = None


class Batcher:
    """Answers observations with a policy; `ask` may be called from any number of threads."""

    def __init__(self, policy: ActingPolicy, max_batch: int, max_wait_s: float, device: torch.device | str = "cpu") -> None:
        self.clients = 1
        """Clients that may ask now; a batch waits for no more than these."""
        self._policy, self._device = policy, device
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._computing = False

    def ask(self, observation: Observation, noise_seed: int) -> Answer:
        """The chunk for an observation. Raises what the policy raised for it."""
        request = _Request(observation, noise_seed)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
            while request.outcome is None:
                if self._computing:
                    self._changed.wait()
                else:
                    self._take_turn()
        if isinstance(request.outcome, BaseException):
            raise request.outcome
        return request.outcome

    def _take_turn(self) -> None:
        """Compute one batch for all; called and left with the lock held, which is free while the policy runs."""
        self._computing = True
        try:
            batch = self._gather()
            self._changed.release()
            try:
                self._answer(batch)
            finally:
                self._changed.acquire()
        finally:
            self._computing = False
            self._changed.notify_all()

    def _gather(self) -> list[_Request]:
        """The next requests in order, waiting for those that could still come."""
        deadline_s = self._waiting[0].asked_s + self._max_wait_s
        while len(self._waiting) < min(self._max_batch, self.clients):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._changed.wait(left_s):
                break
        return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))]

    def _answer(self, batch: list[_Request]) -> None:
        """Give every request its outcome; if a batch fails, each is answered alone, so that only the wrong ones fail."""
        try:
            actions_BCA, infer_ms = self._infer(batch)
        except Exception as error:  # noqa: BLE001 (whatever the policy raised belongs to those who asked; the server lives on)
            if len(batch) == 1:
                batch[0].outcome = error
            else:
                for request in batch:
                    self._answer([request])
        else:
            for request, actions_CA in zip(batch, actions_BCA):
                request.outcome = Answer(np.ascontiguousarray(actions_CA), infer_ms)

    def _infer(self, batch: list[_Request]) -> tuple[Float32, float]:
        started = time.perf_counter()
        observations, seeds = [request.observation for request in batch], [request.noise_seed for request in batch]
        _, actions_BCA = answer(self._policy, observations, seeds, self._max_batch, self._device)
        return actions_BCA, 1000.0 * (time.perf_counter() - started)
