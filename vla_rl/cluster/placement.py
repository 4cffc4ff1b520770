"""Which role runs where: a plan that a dry run prints and the backends carry out."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.cluster.config import ClusterConfig
from vla_rl.config import ConfigError


@dataclass(frozen=True)
class Slot:
    """The place of one role. Roles on the same seat of the same machine share its device."""

    role: str
    rank: int
    node: int
    """Number of the machine, from 0."""
    seat: int
    """Number of the place on it; with GPUs, of the GPU."""
    has_gpu: bool
    gpu_share: float
    """Part of the GPU: 1, or 0.5 where two roles share it; 0 without one."""


def plan_placement(config: ClusterConfig) -> list[Slot]:
    """A slot for every role: trainer ranks first, then workers, evenly over the machines; a colocated worker takes its rank's seat.

    Raises ConfigError where the GPUs are too few.
    """
    ranks, workers, gpus = config.trainer_ranks, config.rollout_workers, config.gpus_per_node
    colocated = config.placement == "colocated"
    places = ranks if colocated else ranks + workers
    if gpus and places > gpus * config.nodes:
        need = f"{ranks} pairs" if colocated else f"{ranks} trainer ranks and {workers} rollout workers"
        raise ConfigError(
            f"cluster: {need} need {places} GPUs, but cluster.nodes {config.nodes} with cluster.gpus_per_node {gpus} have "
            f"{gpus * config.nodes}; use fewer roles, or more nodes" + ("" if colocated else ", or placement: colocated")
        )
    if config.nodes > places:
        raise ConfigError(f"cluster.nodes is {config.nodes}, but there are only {places} places to fill; use fewer nodes, or more roles")
    seats = [(node, seat) for node in range(config.nodes) for seat in range(places // config.nodes + (node < places % config.nodes))]
    share = 0.0 if not gpus else 0.5 if colocated else 1.0

    def slot(role: str, rank: int, place: int) -> Slot:
        return Slot(role, rank, *seats[place], gpus > 0, share)

    trainers = [slot("trainer", rank, rank) for rank in range(ranks)]
    return trainers + [slot("worker", worker, worker if colocated else ranks + worker) for worker in range(workers)]


def seats_of_nodes(slots: list[Slot]) -> list[list[list[Slot]]]:
    """Slots by machine and seat."""
    nodes = max(slot.node for slot in slots) + 1
    seats = [max(slot.seat for slot in slots if slot.node == node) + 1 for node in range(nodes)]
    return [[[slot for slot in slots if (slot.node, slot.seat) == (node, seat)] for seat in range(seats[node])] for node in range(nodes)]


def gpu_of_seat(seat: int, visible: str | None) -> str:
    """What a role on this seat of this machine gets as CUDA_VISIBLE_DEVICES; `visible` is the driver's own (None: unset, every GPU).

    Raises ConfigError where the driver was shown fewer GPUs.
    """
    if visible is None:
        return str(seat)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if seat >= len(names):
        raise ConfigError(
            f"cluster.gpus_per_node counts on {seat + 1} GPUs here, but CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)}; "
            "lower cluster.gpus_per_node, use fewer roles, or show more GPUs"
        )
    return names[seat]
