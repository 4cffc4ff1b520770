"""What the LIBERO benchmarks share: actions that go places, digests, and CPU time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vla_rl.episode import VIEWS, EpisodeSpec, StepProtocol
from vla_rl.sim.base import Look
from vla_rl.sim.libero.env import LiberoEnv

CHUNK = 8
"""Actions per chunk, as OpenVLA-OFT executes them."""
ACTIONS_HELD = 5
"""Control steps for which a random action is held, so that the arm travels and touches things."""


def travelling_actions(seed: int, count: int) -> np.ndarray:
    """float32[count, 7] in [-1, 1]: random directions, each held for `ACTIONS_HELD` steps, often saturated."""
    directions = np.random.default_rng(seed).uniform(-1.5, 1.5, (count // ACTIONS_HELD + 1, 7))
    return np.clip(np.repeat(directions, ACTIONS_HELD, axis=0)[:count], -1, 1).astype(np.float32)


def published(suite: str, task: int, number: int) -> EpisodeSpec:
    """A published state without a time limit that a benchmark could hit."""
    return EpisodeSpec(suite, task, f"benchmark:{number}", "test", protocol=StepProtocol(max_steps=10_000))


def play_others(env: LiberoEnv, suite: str, task: int, count: int, steps: int = 16) -> None:
    """Earlier episodes of a worker, which must leave no trace."""
    for number in range(count):
        spec = EpisodeSpec(suite, task, f"sampled:{1_000_000 + number}", "train", protocol=StepProtocol(max_steps=steps))
        env.reset(spec, Look(views=VIEWS))
        env.step_chunk(travelling_actions(number, steps))


def digest(pictures: Iterable[Mapping[str, np.ndarray]], states: Iterable[np.ndarray] = ()) -> str:
    """SHA-256 over pictures (in the order of `VIEWS`) and states."""
    total = hashlib.sha256()
    for images in pictures:
        for view in VIEWS:
            total.update(np.ascontiguousarray(images[view]).tobytes())
    for state in states:
        total.update(np.ascontiguousarray(state, np.float64).tobytes())
    return total.hexdigest()


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of all threads of this process for one call (s): other processes on the machine do not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


def load() -> float:
    """One-minute load average, reported because cache and clock suffer from neighbours even where CPU time is counted."""
    return round(os.getloadavg()[0], 2)
