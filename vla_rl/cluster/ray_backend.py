"""Roles as Ray actors on many machines: calls through Ray, parcels in the object stores of the nodes where they were made.

Every answer has two parts, and two object references come back: the driver fetches the first, which is small, and never the second. A
payload is so written once, by the role that made it, belongs to the driver (it outlives its maker), and is read by the rank that trains on
it: through shared memory on the same node, and once per node over the network otherwise.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vla_rl.cluster.backend import Member, Pending, Sealed
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleHung, RoleLost, RoleName
from vla_rl.cluster.liveness import Counts, Vigil, Watch
from vla_rl.cluster.placement import plan_placement, seats_of_nodes
from vla_rl.cluster.ray_role import RaySurroundings, RoleActor
from vla_rl.cluster.wire import Raised
from vla_rl.config import ConfigError

PLACEMENT_S = 300.0
"""How long Ray may take to reserve what the roles need."""
CONNECTION_S = 10.0
"""How long the head of a cluster may take to answer a connection."""
NOTICE_S = 5.0
"""How long Ray may take to report an actor's end, and an actor to end by itself."""


@dataclass(frozen=True)
class RayParcel:
    """A parcel in Ray's object stores."""

    reference: ray.ObjectRef

    def fetch(self) -> Any:
        """See `Parcel.fetch`."""
        return ray.get(self.reference)

    def release(self) -> None:
        """See `Parcel.release`: Ray frees it with the last reference."""


class _RayCall:
    """A call of an actor, with the references of both parts of its answer."""

    def __init__(self, member: RayMember, references: Sequence[ray.ObjectRef]) -> None:
        self.member = member
        self.small, self._large = references
        self._answer: tuple[Any, BaseException | None] | None = None

    def result(self) -> Any:
        """See `Pending.result`."""
        if self._answer is None:
            self._answer = self._fetch()
        value, error = self._answer
        if error is not None:
            raise error
        return value

    def _fetch(self) -> tuple[Any, BaseException | None]:
        try:
            message = ray.get(self.small)
        except RayActorError as error:
            return None, self.member.loss(error)
        self.member.received_bytes += len(message)
        value = pickle.loads(message)
        if isinstance(value, Raised):
            return None, value.error(self.member.name)
        return (Sealed(value.value, RayParcel(self._large)) if isinstance(value, Sealed) else value), None


class RayMember:
    """A role in a Ray actor."""

    def __init__(self, role: str, rank: int, actor: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.actor = actor
        self.received_bytes = 0
        self.is_over = False
        """The watch has nothing more to see of it."""
        self._role, self._rank, self._where = role, rank, actor.where.remote()
        self.vigil = Vigil()
        self._counts, self._pulse, self._hung = Counts(0, 0), actor.pulse.remote(), ""
        self._newest = actor.make.remote(make, arguments)
        self._made = self._newest[0]
        self.ready: Pending = _RayCall(self, self._newest)

    @property
    def name(self) -> RoleName:
        """Which role, where; waits until its process is there."""
        try:
            node, log = ray.get(self._where)
        except RayActorError:
            node, log = "a node on which it never came up", ""
        return RoleName(self._role, self._rank, node, log)

    def call(self, method: str, *arguments: Any, beside: bool = False) -> Pending:
        """See `Member.call`."""
        if beside:
            return _RayCall(self, self.actor.call_beside.remote(method, arguments))
        self._newest = self.actor.call.remote(method, arguments)
        return _RayCall(self, self._newest)

    @property
    def is_busy(self) -> bool:
        """See `Watched.is_busy`; calls are answered in order, so the newest tells."""
        return not _is_there(self._newest[0])

    def counts(self) -> Counts:
        """See `Watched.counts`: each answer of the actor is a beat, and is asked for when the last one came."""
        if not self.is_over and _is_there(self._pulse):
            try:
                self._counts = Counts(self._counts.beats + 1, ray.get(self._pulse))
            except ActorUnavailableError:  # that question was lost, and no answer is no beat
                pass
            except RayActorError:  # gone: who waits for its answer is told by Ray
                self.is_over = True
                return self._counts
            self._pulse = self.actor.pulse.remote()
        elif self._counts.beats == 0 and _is_there(self._made):  # it is up, and may have stopped before its first beat
            self._counts = Counts(1, 0)
        return self._counts

    def end_hung(self, cause: str) -> None:
        """See `Watched.end_hung`."""
        self._hung, self.is_over = cause, True
        ray.kill(self.actor)

    def loss(self, error: RayActorError) -> RoleLost:
        """What the watch, or Ray, says about the end of the actor; one that Ray cannot reach, which may still live, is ended."""
        if isinstance(error, ActorUnavailableError) and not self._hung:
            self.end_hung(f"out of reach: {_in_a_line(error).rstrip('.')}; it was killed")
        if self._hung:
            return RoleHung(self.name, self._hung)
        return RoleLost(self.name, _in_a_line(error))


class RayBackend:
    """See the module's docstring."""

    def __init__(self, config: ClusterConfig, spans: Path | None) -> None:
        """Connect to the cluster, or start Ray here; reserve a place for every role. Raises ConfigError where there is not enough room."""
        self._config, self._spans = config, spans
        slots = plan_placement(config)
        self._slots = {(slot.role, slot.rank): slot for slot in slots}
        self._members: list[RayMember] = []
        self._groups: list[PlacementGroup] = []
        self._started = not ray.is_initialized()
        if self._started:
            _open_ray(config.ray_address)
        self.host: str = ray.util.get_node_ip_address()
        """Under which the other machines reach the driver."""
        bundles = [[_resources(len(seat), seat[0].has_gpu, config) for seat in node] for node in seats_of_nodes(slots)]
        self._groups = _reserve(bundles)
        self._watch = Watch(config, lambda: [member for member in tuple(self._members) if not member.is_over])

    def start(self, role: str, rank: int, make: Callable[..., Any], *arguments: Any) -> RayMember:
        """See `Backend.start`; a rank keeps its node over all of its lives."""
        slot = self._slots[role, rank]
        strategy = PlacementGroupSchedulingStrategy(self._groups[slot.node], slot.seat)
        threads = self._config.torch_threads or torch.get_num_threads()
        surroundings = RaySurroundings(f"{role}_{rank}", self._spans, threads, os.getcwd(), tuple(sys.path))
        options = {"num_cpus": self._config.cpus_per_role, "num_gpus": slot.gpu_share, "scheduling_strategy": strategy}
        actor = RoleActor.options(**options).remote(surroundings)  # pyright: ignore[reportAttributeAccessIssue]
        member = RayMember(role, rank, actor, make, arguments)
        self._members.append(member)
        return member

    def wait_any(self, calls: Sequence[Pending]) -> list[Pending]:
        """See `Backend.wait_any`."""
        by_reference = {call.small: call for call in calls if isinstance(call, _RayCall)}
        done, _ = ray.wait(list(by_reference), num_returns=1, fetch_local=False)
        return [by_reference[reference] for reference in done]

    def loss_of(self, member: Member) -> RoleLost | None:
        """See `Backend.loss_of`."""
        assert isinstance(member, RayMember)
        try:
            ray.get(member.actor.where.remote(), timeout=NOTICE_S)
        except GetTimeoutError:  # not up yet
            return None
        except RayActorError as error:
            return member.loss(error)
        return None

    def close(self) -> None:
        """See `Backend.close`."""
        self._watch.close()
        members, self._members = self._members, []
        closing = [member.actor.call.remote("close", ())[0] for member in members]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=NOTICE_S, fetch_local=False)
        for member in members:
            ray.kill(member.actor)
        groups, self._groups = self._groups, []
        for group in groups:
            remove_placement_group(group)
        if self._started:
            ray.shutdown()


def _is_there(reference: ray.ObjectRef) -> bool:
    """Whether an answer, or the news that none will come, has arrived."""
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _open_ray(address: str | None) -> None:
    """Connect to a cluster, or start Ray here.

    Raises ConfigError where no cluster answers (Ray itself would try for minutes, and exit), OSError where Ray cannot start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    try:
        if address not in (None, "auto"):
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTION_S).close()
        ray.init(address=address or "local", include_dashboard=False, log_to_driver=False)
    except OSError as error:  # Ray's ConnectionError is one
        if address is None:  # a full disk, say: nobody was asked to answer
            raise
        raise ConfigError(
            f"cluster.ray_address is {address!r}, and no Ray cluster answers there ({error}); start one with `ray start --head` "
            "(docs/cluster.md), or leave ray_address out to run on this machine alone"
        ) from error


def _resources(roles: int, has_gpu: bool, config: ClusterConfig) -> dict[str, float]:
    """What the roles of one seat need."""
    return {"CPU": roles * config.cpus_per_role} | ({"GPU": 1.0} if has_gpu else {})


def _reserve(bundles: list[list[dict[str, float]]]) -> list[PlacementGroup]:
    """One placement group per machine, packed; in order of the machines' addresses, so that ranks stay where they were over restarts."""
    _require_room(bundles)
    groups = [placement_group(own, strategy="STRICT_PACK") for own in bundles]
    if not all(group.wait(PLACEMENT_S) for group in groups):
        for group in groups:
            remove_placement_group(group)
        raise ConfigError(
            f"cluster: Ray did not find {len(bundles)} machines with room for {bundles} within {PLACEMENT_S:g} s; others may use them "
            "(`ray status` shows it)"
        )
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = [placement_group_table(group)["bundles_to_node_id"][0] for group in groups]
    if len(set(nodes)) < len(groups):
        raise ConfigError(
            f"cluster.nodes is {len(groups)}, but roles for {len(groups)} machines fit on {len(set(nodes))}; set cluster.gpus_per_node and "
            "cluster.cpus_per_role to what a machine has, or use fewer nodes"
        )
    order = sorted(range(len(groups)), key=lambda i: (-len(bundles[i]), addresses[nodes[i]], nodes[i]))
    return [groups[i] for i in order]


def _require_room(bundles: list[list[dict[str, float]]]) -> None:
    """Raise ConfigError at once where the whole cluster has too little, whoever uses it."""
    has = ray.cluster_resources()
    for name in ("CPU", "GPU"):
        need = sum(bundle.get(name, 0.0) for own in bundles for bundle in own)
        if need > has.get(name, 0.0):
            raise ConfigError(
                f"cluster: the roles need {need:g} {name}s and the Ray cluster has {has.get(name, 0.0):g}; lower cluster.cpus_per_role, "
                "use fewer roles, or more machines"
            )
