"""Requests of many clients, answered in batches by one thread that owns the policy.

A batch is taken when it is full, when every client that could still join it has asked, or when its first request has waited
`max_wait_s`. One fixed batch size makes an answer independent of who else asked, see `policies/inference.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
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
    answered: Future[Answer]
    asked_s: float = field(default_factory=time.monotonic)


class Batcher:
    """Answers observations with a policy; thread-safe."""

    def __init__(self, policy: ActingPolicy, max_batch: int, max_wait_s: float, device: torch.device | str = "cpu") -> None:
        self.clients = 1
        """Clients that may ask now; a batch waits for no more than these."""
        self.batches = 0
        """Forward passes so far."""
        self._policy, self._device = policy, device
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    def submit(self, observation: Observation, noise_seed: int) -> Future[Answer]:
        """Ask for a chunk. The future raises what the policy raised for this observation."""
        request = _Request(observation, noise_seed, Future())
        self._requests.put(request)
        return request.answered

    def close(self) -> None:
        """Answer what was asked before, then end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            first = self._requests.get()
            if first is None:
                return
            batch = [first]
            closing = self._fill(batch, first.asked_s + self._max_wait_s)
            awaited = [request for request in batch if request.answered.set_running_or_notify_cancel()]
            if awaited:
                self._answer(awaited)

    def _fill(self, batch: list[_Request], deadline_s: float) -> bool:
        """Add requests to a batch until it should be taken; returns whether the end was asked for."""
        while len(batch) < self._max_batch:
            hopeless = len(batch) >= self.clients
            wait_s = 0.0 if hopeless else deadline_s - time.monotonic()
            try:
                following = self._requests.get(timeout=wait_s) if wait_s > 0 else self._requests.get_nowait()
            except queue.Empty:
                return False
            if following is None:
                return True
            batch.append(following)
        return False

    def _answer(self, batch: list[_Request]) -> None:
        """Answer a batch; if it fails, each request is answered alone, so that only the wrong ones fail."""
        try:
            actions_BCA, infer_ms = self._infer(batch)
        except Exception as error:  # noqa: BLE001 (whatever the policy raised belongs to those who asked; the server lives on)
            if len(batch) == 1:
                batch[0].answered.set_exception(error)
            else:
                for request in batch:
                    self._answer([request])
        else:
            for request, actions_CA in zip(batch, actions_BCA):
                request.answered.set_result(Answer(np.ascontiguousarray(actions_CA), infer_ms))

    def _infer(self, batch: list[_Request]) -> tuple[Float32, float]:
        started = time.perf_counter()
        self.batches += 1
        observations, seeds = [request.observation for request in batch], [request.noise_seed for request in batch]
        _, actions_BCA = answer(self._policy, observations, seeds, self._max_batch, self._device)
        return actions_BCA, 1000.0 * (time.perf_counter() - started)
