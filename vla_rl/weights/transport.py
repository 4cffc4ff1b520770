"""One pair of calls for all transports: the trainer's `Sender` and the worker's `Receiver`, which meet at an address.

in_place       the address is the sync object itself; both sides are in one process
shared_memory  the address is where the arena lies; both sides are on one machine
collective     the address is a store and a generation; whenever a worker was replaced, all meet again under the next generation
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from vla_rl.cluster.rendezvous import JOIN_S, Rendezvous
from vla_rl.engine.engine import Engine
from vla_rl.weights.buckets import Backend
from vla_rl.weights.collective import CollectiveReceiver, CollectiveSender
from vla_rl.weights.digest import combined_digest, require_same_digests, tensor_digest
from vla_rl.weights.errors import WeightSyncError
from vla_rl.weights.follower import Follower
from vla_rl.weights.in_place import InPlaceSync
from vla_rl.weights.layout import engine_layout, held_weights, synced_weights
from vla_rl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedWeights

Transport = Literal["in_place", "shared_memory", "collective"]


@dataclass(frozen=True)
class CollectiveAddress:
    """Where the members of a collective meet."""

    meeting: Rendezvous
    """The driver's store."""
    generation: int
    """Grows whenever the members meet again."""
    workers: int
    backend: Backend

    def store(self) -> Store:
        """A connection to the store, with names of this generation only."""
        return self.meeting.store(f"weights_{self.generation}")


class Sender:
    """A trainer rank's side. Every rank has one and pushes: gathering the weights is a collective."""

    def __init__(
        self, engine: Engine, transport: Transport, address: CollectiveAddress | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """For `collective`, rank 0 waits here until all workers of `address` have connected.

        Weights travel as `dtype`, which the policies of the workers must hold; None: as they are. In place, each policy keeps its own.
        """
        self._engine, self._transport, self._dtype = engine, transport, dtype
        self._sync = self._make(address)

    @property
    def address(self) -> Any:
        """What `open_receiver` takes; of rank 0."""
        return self._sync.address if isinstance(self._sync, SharedMemorySender) else self._sync

    def push(self, version: int) -> dict[str, float]:
        """Hand out the engine's weights as `version`; returns `gather_s`, `transport_s` and `nbytes` where the transport measures them.

        Raises WeightSyncError where a receiver was lost; the other ranks have done their part then, and a new sender can push again.
        """
        weights = self._engine.named_weights() if self._transport == "in_place" else synced_weights(self._engine)
        try:
            self._sync.push(weights, version)
        except WeightSyncError:
            for _ in weights:  # the other ranks walk all of it, and wait for this one
                pass
            raise
        if isinstance(self._sync, Follower | InPlaceSync):
            return {}
        times = self._sync.times
        return {"gather_s": times.gather_s, "transport_s": times.transport_s, "nbytes": float(times.nbytes)}

    def close(self) -> None:
        """Give shared memory back."""
        if isinstance(self._sync, SharedMemorySender):
            self._sync.close()

    def _make(self, address: CollectiveAddress | None) -> InPlaceSync | Follower | SharedMemorySender | CollectiveSender:
        if self._transport == "in_place":
            return InPlaceSync()
        layout = engine_layout(self._engine, self._dtype)
        if not self._engine.world.leads:
            return Follower()
        if self._transport == "shared_memory":
            return SharedMemorySender(layout)
        assert address is not None, "a collective has an address"
        device = self._engine.world.device if address.backend == "nccl" else None
        return CollectiveSender(layout, address.store(), address.workers, address.backend, device, deadline_s=JOIN_S)


class Receiver(Protocol):
    """A worker's side, for one policy."""

    version: int
    """Of the weights that the policy acts with."""

    def receive(self) -> None:
        """Take part in a push (collectives only)."""
        ...

    def pull(self, policy: nn.Module, verify: bool = False) -> int:
        """Bring the policy to the newest version and return it; `verify` compares its digest with what was pushed, as one step: a push
        that comes meanwhile changes nothing. Raises WeightSyncError before the first push, and for weights that differ."""
        ...

    def verify(self, policy: nn.Module) -> str:
        """The digest (hex) of `policy`. Raises WeightSyncError unless it holds what was pushed."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def open_receiver(address: Any, policy: nn.Module, worker: int, acted_with: int | None) -> Receiver:
    """Connect worker number `worker` (from 0). `acted_with` is the version that `policy` held before a reconnect; None: none.

    Raises LayoutMismatch where the trainer has other weights.
    """
    if isinstance(address, InPlaceSync):
        return InPlaceReceiver(address)
    if isinstance(address, SharedWeights):
        return SharedReceiver(address, policy)
    return StandbyReceiver(address, policy, worker, acted_with)


class InPlaceReceiver:
    """For a policy in the trainer's process."""

    def __init__(self, sync: InPlaceSync) -> None:
        self._sync = sync
        self.version = -1

    def receive(self) -> None:
        """See `Receiver.receive`: a push needs nobody."""

    def pull(self, policy: nn.Module, verify: bool = False) -> int:
        """See `Receiver.pull`."""
        self.version = self._sync.pull(policy)
        if verify:
            self._sync.verify(policy)
        return self.version

    def verify(self, policy: nn.Module) -> str:
        """See `Receiver.verify`."""
        return self._sync.verify(policy)

    def close(self) -> None:
        """See `Receiver.close`."""


class SharedReceiver(SharedMemoryReceiver):
    """For a policy on the trainer's machine; copies, so that a push never waits for a rollout."""

    def __init__(self, address: SharedWeights, policy: nn.Module) -> None:
        super().__init__(address, policy, mapped=False)

    def receive(self) -> None:
        """See `Receiver.receive`: a push needs nobody."""


class StandbyReceiver:
    """For a policy on another machine: pushes go into a copy while the policy acts, and `pull` brings the newest whole one over."""

    def __init__(self, address: CollectiveAddress, policy: nn.Module, worker: int, acted_with: int | None) -> None:
        self.version = -1 if acted_with is None else acted_with
        self._lock = threading.Lock()
        self._standby, self._is_whole = copy.deepcopy(policy), True
        before = -1 if acted_with is None else acted_with - 1  # after a reconnect the trainer sends again what we may hold already
        self._receiver = CollectiveReceiver(
            self._standby, address.store(), worker + 1, address.workers, address.backend, before, deadline_s=JOIN_S
        )

    def receive(self) -> None:
        """See `Receiver.receive`; runs beside a rollout."""
        with self._lock:
            self._is_whole = False
            self._receiver.pull(self._standby)
            self._is_whole = True

    def pull(self, policy: nn.Module, verify: bool = False) -> int:
        """See `Receiver.pull`."""
        with self._lock, torch.no_grad():
            if self._receiver.version < 0:
                raise WeightSyncError("weights were pulled before the first push; push before any policy acts")
            if not self._is_whole:
                raise WeightSyncError(f"the push after version {self._receiver.version} broke off: connect again")
            own = held_weights(policy)
            for name, tensor in held_weights(self._standby).items():
                own[name].copy_(tensor)
            self.version = self._receiver.version
            if verify:
                self._compare(policy)
        return self.version

    def verify(self, policy: nn.Module) -> str:
        """See `Receiver.verify`."""
        with self._lock:
            if self._receiver.version != self.version:
                raise WeightSyncError(f"the policy holds version {self.version}, version {self._receiver.version} has come: pull first")
            return self._compare(policy)

    def close(self) -> None:
        """See `Receiver.close`: the group goes with this process."""

    def _compare(self, policy: nn.Module) -> str:
        """Against the standby, which was compared with the trainer's digests when they came."""
        ours, theirs = ({name: tensor_digest(tensor) for name, tensor in held_weights(one).items()} for one in (policy, self._standby))
        require_same_digests(ours, theirs, self.version)
        return combined_digest(ours)
