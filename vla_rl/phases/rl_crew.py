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
    """Trainer ranks and rollout workers. The trainer's methods are for the driver's main thread, the others for who makes rollouts.

    They meet where weights are handed out. A worker of a collective that dies takes the group with it: then all of them meet again, and
    `_trainers_turn` sees to it that the trainers are not in an update meanwhile, for which nobody would wait. `_weights_turn` guards the
    state of the weight sync, and who the workers are.
    """

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
        self._trainers_turn = threading.RLock()
        self._weights_turn = threading.Lock()
        self._address: Any = None
        self._version = -1
        self._delivered, self._is_whole = True, False

    def train(self, method: str, *arguments: Any) -> Any:
        """`method` on every trainer rank; the answer of rank 0."""
        return self._train_all(method, *arguments)[0]

    def take(self, rows: RowScalars, episodes: Sequence[Parcel]) -> Tensor | None:
        """Have every rank fetch the episodes that it trains on; float32[B], what each row's reward loses, or None."""
        penalties: list[Tensor | None] = self._train_all("take", rows, episodes)
        known = [penalty_B for penalty_B in penalties if penalty_B is not None]
        return torch.stack(known).sum(0) if known else None  # each row's is 0 on all ranks but one

    def update(self, *arguments: Any) -> dict[str, float]:
        """One step's update; the numbers of rank 0, and of all ranks the largest distance from the rollout's log-probabilities."""
        numbers = self._train_all("update", *arguments)
        largest = "log_prob_gap_largest"
        return numbers[0] | {largest: max(one[largest] for one in numbers)}

    def open_weights(self, version: int) -> None:
        """Connect workers and trainer ranks, and hand out the first weights."""
        with self._trainers_turn, self._weights_turn:
            self._connect()
            self._push(version)

    def push(self, version: int) -> dict[str, float]:
        """Hand out the weights of `version`; returns what it took, where the transport measures it.

        Where a worker of a collective is dead, or not back yet, they are sent when it was replaced.
        """
        with self._trainers_turn, self._weights_turn:
            times = self._push(version)
        if not times:
            return {}
        rate = times["nbytes"] / max(times["transport_s"], 1e-9) / 1e9
        return {"weights/gather_s": times["gather_s"], "weights/transport_s": times["transport_s"], "weights/gb_per_s": rate}

    def begin(self) -> None:
        """Have every worker pull the newest weights; where a worker died in a push, nobody has them before it was replaced.

        Raises WeightSyncError where they went astray for another reason, which the push has raised.
        """
        while True:
            while not self._is_delivered():
                losses = self._lost_workers()
                if not losses:
                    raise WeightSyncError(f"version {self._version} of the weights reached no worker, and none is lost")
                self._replace(losses)
            try:
                self.call_each("begin", [()] * len(self.workers))
                return
            except WeightSyncError:  # where a push broke off meanwhile, what came of it is not whole
                if self._is_delivered():
                    raise

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`method` on every worker with its own arguments; a worker that is lost meanwhile is replaced and asked again."""
        calls = [(member, member.call(method, *own)) for member, own in zip(self.workers, arguments, strict=True)]
        return [self._insist(worker, *call, method, own) for worker, (call, own) in enumerate(zip(calls, arguments))]

    def replace(self, worker: int, member: Member, loss: RoleLost) -> None:
        """Give a worker whose life as `member` was lost another one, with the newest weights; does nothing where it has that already.

        Others that are found lost on the way are replaced with it. Raises the loss of one that keeps dying.
        """
        if self.workers[worker] is member:
            self._replace({worker: loss})

    def proved_alive(self, worker: int) -> None:
        """It finished an episode."""
        self._lives[worker] = 1

    def received_bytes(self) -> int:
        """Bytes of all answers that reached the driver so far."""
        return self._bytes_of_the_dead + sum(member.received_bytes for member in (*self.trainers, *self.workers))

    def _train_all(self, method: str, *arguments: Any) -> list[Any]:
        with self._trainers_turn:
            return call_all(self.backend, self.trainers, method, *arguments)

    def _is_delivered(self) -> bool:
        """Whether the newest weights are with the workers, after the push that is under way, if one is."""
        with self._weights_turn:
            return self._delivered

    def _insist(self, worker: int, member: Member, call: Pending, method: str, arguments: tuple[Any, ...]) -> Any:
        while True:
            try:
                return call.result()
            except RoleLost as loss:
                self.replace(worker, member, loss)
                member = self.workers[worker]
                call = member.call(method, *arguments)

    def _replace(self, losses: dict[int, RoleLost]) -> None:
        """Start workers again until all of them have the newest weights."""
        fresh: set[int] = set()
        if self._transport == "collective":
            losses = losses | self._lost_workers()  # each of them would break the group again
        while losses:
            for worker, loss in losses.items():
                self._start_again(worker, loss)
            fresh |= losses.keys()
            losses = self._bring_up(sorted(fresh))

    def _start_again(self, worker: int, loss: RoleLost) -> None:
        if self._lives[worker] >= MOST_LIVES:
            raise loss
        self._lives[worker] += 1
        _LOG.warning("%s; starting it again", loss)
        with self._weights_turn:
            self._is_whole = False
            self._bytes_of_the_dead += self.workers[worker].received_bytes
            self.workers[worker] = self._start_worker(worker)

    def _bring_up(self, fresh: Sequence[int]) -> dict[int, RoleLost]:
        """Give workers that were started the newest weights. Returns those, of all, that were lost meanwhile; none: it is done."""
        members = [self.workers[worker] for worker in fresh]
        try:
            for member in members:
                member.ready.result()
            self._join(members)
            for call in [member.call("begin") for member in members]:
                call.result()
        except (WeightSyncError, RoleLost):
            losses = self._lost_workers()
            if not losses:
                raise
            return losses
        return {}

    def _join(self, fresh: Sequence[Member]) -> None:
        if self._transport != "collective":
            with self._weights_turn:
                for member in fresh:
                    member.call("connect", self._address).result()
            return
        with self._trainers_turn, self._weights_turn:
            self._connect()
            self._push(self._version)
            if not self._delivered:
                raise WeightSyncError(f"a worker was lost while version {self._version} was sent to all of them again")

    def _lost_workers(self) -> dict[int, RoleLost]:
        """Workers that are gone, by their number; none where a trainer rank is, because then the run is over."""
        if any(self.backend.loss_of(member) is not None for member in self.trainers):
            return {}
        losses = {worker: self.backend.loss_of(member) for worker, member in enumerate(self.workers)}
        return {worker: loss for worker, loss in losses.items() if loss is not None}

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
        self._is_whole = True

    def _push(self, version: int) -> dict[str, float]:
        self._version, self._delivered = version, False
        if self._transport == "collective" and not self._is_whole:
            return {}  # `_replace` sends it, when those that are missing are back
        receivers = self.workers if self._transport == "collective" else []
        calls = [member.call("receive", beside=True) for member in receivers]
        calls += [member.call("push", version) for member in self.trainers]
        try:
            answers = gather(self.backend, [*self.trainers, *self.workers], calls)
        except (WeightSyncError, RoleLost):
            if self._transport != "collective" or not self._lost_workers():
                raise
            return {}  # `_replace` sends it again
        self._delivered = True
        return answers[len(receivers)]
