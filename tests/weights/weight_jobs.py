"""What writers, readers and ranks do in their own processes, and how tests start them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from synced_policy import INPUT_BI, SyncedPolicy, change
from torch import nn

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import close_world, open_world
from vla_rl.weights.collective import CollectiveReceiver, CollectiveSender
from vla_rl.weights.digest import tensor_digest, weights_digest
from vla_rl.weights.follower import Follower
from vla_rl.weights.layout import engine_layout, held_weights, synced_weights
from vla_rl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedWeights

DEADLINE_S = 240.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "vla_rl.engine.engine", "vla_rl.weights.collective", "vla_rl.weights.shared_memory"])
"""One import of torch for all processes of a test session."""


def start(job: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """`job(connection, *arguments)` in another process."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_run, args=(job, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _run(job: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    job(connection, *arguments)


def receive(connection: Connection, deadline_s: float = DEADLINE_S) -> Any:
    """The next message, within the deadline. Raises EOFError where the other side has ended."""
    assert connection.poll(deadline_s), "no message within the deadline"
    return connection.recv()


def join(path: Path, workers: int) -> Any:
    """The store of rank 0 and so many workers."""
    return dist.FileStore(str(path), workers + 1)  # pyright: ignore[reportPrivateImportUsage]


def act(policy: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return policy.act(INPUT_BI)  # pyright: ignore[reportCallIssue]


class Uniform(nn.Module):
    """A model whose every element is the version, so that a forward sees at once whether it got parts of two."""

    def __init__(self, tensors: int = 8, elements: int = 60_000) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def fill(self, version: int) -> Uniform:
        with torch.no_grad():
            for part in self.parts:
                part.fill_(version)
        return self

    def act(self) -> set[float]:
        """The distinct extremes over all tensors; one value where the model is of one version."""
        seen: set[float] = set()
        for part in self.parts:
            seen |= {part.min().item(), part.max().item()}
        return seen


def act_while_written(connection: Connection, address: SharedWeights, mapped: bool, last: int, careless: bool) -> None:
    """Pull and act until version `last`; sends (torn forwards, distinct versions). `careless` lets go of the buffer before it acts."""
    policy = Uniform()
    receiver = SharedMemoryReceiver(address, policy, mapped)
    connection.send("connected")
    receive(connection)
    torn, versions = 0, set()
    while receiver.version < last:
        version = receiver.pull(policy)
        if careless:
            receiver._let_go(receiver._held)
        for _ in range(2):
            torn += policy.act() != {float(version)}
        versions.add(version)
    connection.send((torn, len(versions)))


def hold_buffer(connection: Connection, address: SharedWeights) -> None:
    """Pull once, mapped, and keep the buffer until killed, or until told to pull again."""
    policy = Uniform()
    receiver = SharedMemoryReceiver(address, policy, mapped=True)
    connection.send(receiver.pull(policy))
    while True:
        receive(connection)
        connection.send(receiver.pull(policy))


def write_and_hang(connection: Connection, layout: Any) -> None:
    """A trainer that pushes version 1, and stops for ever in the middle of version 2."""
    sender = SharedMemorySender(layout)
    sender.push(Uniform().fill(1).named_parameters(), 1)
    connection.send(sender.address)

    def halting() -> Any:
        for index, pair in enumerate(Uniform().fill(2).named_parameters()):
            if index == 4:
                connection.send("half")
                receive(connection)
            yield pair

    sender.push(halting(), 2)


def train_and_push(connection: Connection, rank: int, ranks: int, workers: int, folder: Path, config: EngineConfig, cast: Any) -> None:
    """A trainer rank: change the weights and push them, twice; sends the digests of what was pushed (rank 0) or None."""
    world = open_world("cpu", rank, ranks, folder / "trainer")
    engine = Engine(SyncedPolicy(), config, 1, world)
    layout = engine_layout(engine, cast)
    store = join(folder / "weights", workers)
    sync = CollectiveSender(layout, store, workers, bucket_bytes=1000) if world.leads else Follower()
    digests = []
    for version in (3, 4):
        change(engine.policy, version)  # pyright: ignore[reportArgumentType]
        pushed = {name: tensor.clone() for name, tensor in synced_weights(engine)}
        sync.push(synced_weights(engine), version)
        digests.append(weights_digest({entry.name: pushed[entry.name].to(entry.dtype) for entry in layout.synced}))
    connection.send(digests)
    close_world()


def pull_collective(connection: Connection, worker: int, workers: int, folder: Path, cast: Any) -> None:
    """A worker: connect, pull twice; sends versions, digests of what was synced, and the digest of every weight at the end."""
    policy = SyncedPolicy().to(cast)
    receiver = CollectiveReceiver(policy, join(folder / "weights", workers), worker, workers)
    rows = []
    for _ in range(2):
        version = receiver.pull(policy)
        held = held_weights(policy)
        rows.append((version, weights_digest({entry.name: held[entry.name] for entry in receiver.layout.synced})))
    connection.send((rows, {name: tensor_digest(tensor) for name, tensor in held_weights(policy).items()}))


def pull_collective_once(connection: Connection, store_file: str) -> None:
    """A worker that pulls once and waits to be killed."""
    policy = SyncedPolicy()
    receiver = CollectiveReceiver(policy, join(Path(store_file), 1), 1, 1)
    connection.send(receiver.pull(policy))
    connection.poll(DEADLINE_S)


def refused_worker(connection: Connection, store_file: str) -> None:
    """A worker with another value head; sends the error it gets."""
    policy = SyncedPolicy()
    policy.value_head = nn.Linear(24, 2)
    try:
        CollectiveReceiver(policy, join(Path(store_file), 1), 1, 1)
    except RuntimeError as error:
        connection.send(str(error))
