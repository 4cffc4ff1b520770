"""The batcher alone: many threads ask at once, and each gets its own answer, whoever computed it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving_policies import EchoPolicy

from vla_rl.episode import STATE_DIM, VIEWS, Observation
from vla_rl.policies.serve.batcher import Batcher

CLIENTS, REQUESTS = 6, 25


def observation(number: float) -> Observation:
    return Observation({view: np.zeros((8, 8, 3), np.uint8) for view in VIEWS}, np.full(STATE_DIM, number, np.float32), "reach")


@pytest.mark.parametrize("max_batch", [1, 4, 8])
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_every_thread_gets_its_own_answers(max_batch: int, clients: int) -> None:
    """More and fewer clients than a batch has rows, and more than the batcher was told of: nobody is left waiting."""
    policy = EchoPolicy()
    batcher = Batcher(policy, max_batch, max_wait_s=0.001)
    batcher.clients = clients

    def ask(client: int) -> list[float]:
        return [float(batcher.ask(observation(100.0 * client + n), 0).actions_CA[0, 0]) for n in range(REQUESTS)]

    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(ask, range(CLIENTS)))
    assert answers == [[100.0 * client + n for n in range(REQUESTS)] for client in range(CLIENTS)]
    assert sum(policy.batches) == CLIENTS * REQUESTS and max(policy.batches) <= max_batch
