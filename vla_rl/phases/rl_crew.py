"""All roles of a run as the driver holds them: started, connected by weights, replaced when a worker dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.cluster.backend import Backend, Member, Parcel, Pending, call_all, gather
from vla_rl.cluster.errors import RoleLost
from vla_rl.cluster.rendezvous import Rendezvous
from vla_rl.phases.rl_batches import RowScalars
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_trainer import TrainerRank
from vla_rl.phases.rl_worker import RolloutWorker
from vla_rl.sim.pool import MakeEnv
from vla_rl.weights.errors import WeightSyncError
from vla_rl.weights.transport import CollectiveAddress, Transport

_LOG = logging.getLogger(__name__)
ROLES = ("vla_rl.phases.rl_trainer", "vla_rl.phases.rl_worker")
"""Modules of the roles."""
MakeTrainer = Callable[[RlConfig, int, Rendezvous | None], TrainerRank]
"""Makes a trainer rank where it runs; importable there."""
MOST_LIVES = 3
"""How often in a row a worker may be lost without one episode in between."""
TRANSPORTS: dict[str, Transport] = {"inline": "in_place", "process": "shared_memory", "ray": "collective"}
"""How weights travel, by `cluster.backend`."""


class Crew:
    """Trainer ranks and rollout workers. The trainer's methods are for the driver's main thread, the others for who makes rollouts."""

    def __init__(
        self, config: RlConfig, backend: Backend, make_env: MakeEnv, make_trainer: MakeTrainer, meeting: Rendezvous | None
    ) -> None:
        """Start every role; they come up at the same time. Raises what the first one raises that does not."""
        self.backend, self._config, self._make_env, self._meeting = backend, config, make_env, meeting
        self.trainers = [
            backend.start("trainer", rank, make_trainer, config, rank, meeting) for rank in range(config.cluster.trainer_ranks)
        ]
        self.workers = [self._start_worker(index) for index in range(config.cluster.rollout_workers)]
        self._lives = [1] * len(self.workers)
        self._bytes_of_the_dead = 0
        members: list[Member] = [*self.trainers, *self.workers]
        gather(backend, members, [member.ready for member in members])
        self._transport = TRANSPORTS[config.cluster.backend]
        self._weights_turn = threading.Lock()
        self._address: Any = None
        self._version = -1
        self._delivered = True

    def train(self, method: str, *arguments: Any) -> Any:
        """`method` on every trainer rank; the answer of rank 0."""
        return call_all(self.backend, self.trainers, method, *arguments)[0]

    def take(self, rows: RowScalars, episodes: Sequence[Parcel]) -> Tensor | None:
        """Have every rank fetch the episodes that it trains on; float32[B], what each row's reward loses, or None."""
        penalties: list[Tensor | None] = call_all(self.backend, self.trainers, "take", rows, episodes)
        known = [penalty_B for penalty_B in penalties if penalty_B is not None]
        return torch.stack(known).sum(0) if known else None  # each row's is 0 on all ranks but one

    def update(self, *arguments: Any) -> dict[str, float]:
        """One step's update; the numbers of rank 0, and of all ranks the largest distance from the rollout's log-probabilities."""
        numbers = call_all(self.backend, self.trainers, "update", *arguments)
        largest = "log_prob_gap_largest"
        return numbers[0] | {largest: max(one[largest] for one in numbers)}

    def open_weights(self, version: int) -> None:
        """Connect workers and trainer ranks, and hand out the first weights."""
        with self._weights_turn:
            self._connect()
            self._push(version)

    def push(self, version: int) -> dict[str, float]:
        """Hand out the weights of `version`; returns what it took, where the transport measures it.

        Where a worker of a collective is dead, they are sent again when it was replaced.
        """
        with self._weights_turn:
            times = self._push(version)
        if not times:
            return {}
        rate = times["nbytes"] / max(times["transport_s"], 1e-9) / 1e9
        return {"weights/gather_s": times["gather_s"], "weights/transport_s": times["transport_s"], "weights/gb_per_s": rate}

    def begin(self) -> None:
        """Have every worker pull the newest weights; where a worker died in a push, nobody has them before it was replaced."""
        while not self._is_delivered():
            for worker, member in enumerate(self.workers):
                if (loss := self.backend.loss_of(member)) is not None:
                    self.replace(worker, loss)
        self.call_each("begin", [()] * len(self.workers))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`method` on every worker with its own arguments; a worker that is lost meanwhile is replaced and asked again."""
        calls = [member.call(method, *own) for member, own in zip(self.workers, arguments, strict=True)]
        return [self._insist(worker, call, method, own) for worker, (call, own) in enumerate(zip(calls, arguments))]

    def replace(self, worker: int, loss: RoleLost) -> None:
        """Give a lost worker another life, with the newest weights. Raises `loss` where it keeps dying."""
        if self._lives[worker] >= MOST_LIVES:
            raise loss
        self._lives[worker] += 1
        self._bytes_of_the_dead += self.workers[worker].received_bytes
        _LOG.warning("%s; starting it again", loss)
        self.workers[worker] = self._start_worker(worker)
        self.workers[worker].ready.result()
        with self._weights_turn:
            if self._transport == "collective":
                self._connect()
                self._push(self._version)
            else:
                self.workers[worker].call("connect", self._address).result()
        self.workers[worker].call("begin").result()

    def proved_alive(self, worker: int) -> None:
        """It finished an episode."""
        self._lives[worker] = 1

    def received_bytes(self) -> int:
        """Bytes of all answers that reached the driver so far."""
        return self._bytes_of_the_dead + sum(member.received_bytes for member in (*self.trainers, *self.workers))

    def _is_delivered(self) -> bool:
        """Whether the newest weights are with the workers, after the push that is under way, if one is."""
        with self._weights_turn:
            return self._delivered

    def _insist(self, worker: int, call: Pending, method: str, arguments: tuple[Any, ...]) -> Any:
        while True:
            try:
                return call.result()
            except RoleLost as loss:
                self.replace(worker, loss)
                call = self.workers[worker].call(method, *arguments)

    def _start_worker(self, index: int) -> Member:
        return self.backend.start("worker", index, RolloutWorker, self._config, index, self._make_env)

    def _connect(self) -> None:
        if self._transport != "collective":
            self._address = self.train("open_weights", self._transport)
            call_all(self.backend, self.workers, "connect", self._address)
            return
        assert self._meeting is not None, "roles on several machines have a place to meet"
        generation = 0 if self._address is None else self._address.generation + 1
        cluster = self._config.cluster
        channel = "nccl" if cluster.gpus_per_node and cluster.placement == "split" else "gloo"  # NCCL wants a GPU per member
        self._address = CollectiveAddress(self._meeting, generation, len(self.workers), channel)
        calls = [member.call("connect", self._address, beside=True) for member in self.workers]
        calls += [member.call("open_weights", self._transport, self._address) for member in self.trainers]
        gather(self.backend, [*self.workers, *self.trainers], calls)

    def _push(self, version: int) -> dict[str, float]:
        self._version, self._delivered = version, False
        receivers = self.workers if self._transport == "collective" else []
        calls = [member.call("receive", beside=True) for member in receivers]
        calls += [member.call("push", version) for member in self.trainers]
        try:
            answers = gather(self.backend, [*self.trainers, *self.workers], calls)
        except (WeightSyncError, RoleLost):
            trainers, workers = ([self.backend.loss_of(member) for member in group] for group in (self.trainers, self.workers))
            if self._transport != "collective" or any(trainers) or not any(workers):
                raise
            return {}  # `replace` sends it again
        self._delivered = True
        return answers[len(receivers)]
