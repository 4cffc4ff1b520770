"""The twins with the real simulator."""

from __future__ import annotations

import contextlib
from typing import Literal

import numpy as np
import pytest
from equality import require_same

from vla_rl.episode import VIEWS, ActionChunk, EpisodeSpec, StepProtocol
from vla_rl.sim.base import EnvConfig, EnvFault, EnvReply, Look
from vla_rl.sim.pool import PoolConfig, make_pool

DEADLINE_S = 600.0
LOOK = Look(VIEWS, privileged=True, record_every=3, record_states=True)


def replies_of(backend: Literal["process", "serial"]) -> list[EnvReply]:
    """A reset and two chunks of a libero_object episode."""
    spec = EpisodeSpec("libero_object", 0, "benchmark:3", "test", StepProtocol(settle_steps=2))
    random = np.random.default_rng(0)
    with contextlib.closing(make_pool(PoolConfig(backend, workers=1), EnvConfig("libero", resolution=64))) as pool:
        pool.reset(0, spec, LOOK)
        received = pool.ready(DEADLINE_S)
        for _ in range(2):
            pool.step(0, ActionChunk(random.uniform(-1, 1, (4, 7)).astype(np.float32)))
            received += pool.ready(DEADLINE_S)
    assert not any(isinstance(reply, EnvFault) for reply in received), received
    return received


@pytest.mark.slow
def test_twins_give_the_same_bits_on_libero() -> None:
    expected, received = replies_of("serial"), replies_of("process")
    assert len(expected) == 3
    require_same(expected, received, ignore=("timing",))
