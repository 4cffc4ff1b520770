"""Requests of many clients, answered in batches; whoever has waited longest computes for all, in its own thread.

There is no thread of the policy's own: a lone client's request is computed where it was received, without a hand-over. While one
thread leads a batch, others queue up; when it is done it wakes those that it has answered, and the next leader, and nobody else. A batch
is taken when it is full, when every client that could still join has asked, or when its first request has waited `max_wait_s`; a policy
that answers faster than a request arrives gains nothing from a fuller batch, so nobody waits for one. One fixed batch size makes an answer
independent of who else asked, see `policies/inference.py`.
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

PAYS_S = 1e-3
"""Waiting for a fuller batch pays only where a batch takes longer than this."""


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
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while its thread has nothing to do; released when it is answered, or is to lead."""


class Batcher:
    """Answers observations with a policy; `ask` may be called from any number of threads."""

    def __init__(self, policy: ActingPolicy, max_batch: int, max_wait_s: float, device: torch.device | str = "cpu") -> None:
        self.clients = 1
        """Clients that may ask now; a batch waits for no more than these."""
        self._policy, self._device = policy, device
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._enough = threading.Condition(self._lock)
        """The leader waits here for others to join."""
        self._led = False
        """Somebody gathers or computes a batch, or has been told to."""
        self._batch_s = float("inf")
        """Seconds that the last batch took."""

    def ask(self, observation: Observation, noise_seed: int) -> Answer:
        """The chunk for an observation. Raises what the policy raised for it."""
        request = _Request(observation, noise_seed)
        request.turn.acquire()
        with self._lock:
            self._waiting.append(request)
            leads, self._led = not self._led, True
            if not leads and self._is_enough():
                self._enough.notify()
        if not leads:
            request.turn.acquire()  # until it is answered, or is to lead
        if request.outcome is None:
            self._lead()
        assert request.outcome is not None, "a leader's own request is the first of its batch"
        if isinstance(request.outcome, BaseException):
            raise request.outcome
        return request.outcome

    def _lead(self) -> None:
        """Answer one batch, which begins with the caller's own request; then hand on."""
        with self._lock:
            batch = self._gather()
        try:
            self._answer(batch)
        finally:
            with self._lock:
                self._led = bool(self._waiting)
                woken = [*batch[1:], *([self._waiting[0]] if self._led else [])]
            for request in woken:
                request.turn.release()

    def _gather(self) -> list[_Request]:
        """The next requests in order, waiting for those that could still come; called with the lock held."""
        deadline_s = self._waiting[0].asked_s + (self._max_wait_s if self._batch_s > PAYS_S else 0.0)
        while not self._is_enough():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._enough.wait(left_s):
                break
        return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))]

    def _is_enough(self) -> bool:
        """Whether a batch that is taken now has everybody who could be in it."""
        return len(self._waiting) >= min(self._max_batch, self.clients)

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
        self._batch_s = time.perf_counter() - started
        return actions_BCA, 1000.0 * self._batch_s
