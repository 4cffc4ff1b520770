"""The trainer ranks: one process alone, several started by torchrun, or several that meet through a file.

World size 1 is a process group like any other, so that one code path trains on a laptop and on many GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from vla_rl.errors import UserError

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others; rank 0 alone evaluates and writes while they wait."""


class WorldError(UserError):
    """Ranks that cannot be set up as asked."""


@dataclass(frozen=True)
class World:
    """This process among the trainer ranks."""

    rank: int
    """0 to size - 1; rank 0 writes."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes."""
    mesh: DeviceMesh
    """One data-parallel dimension over all ranks."""

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sums over the ranks (one all-reduce)."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_leader(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()


def open_world(device: str = "auto", rank: int | None = None, size: int | None = None, rendezvous: Path | Store | None = None) -> World:
    """Join the process group, or create one.

    Without arguments: torchrun's variables where they are set, else this process alone (no port, no file).
    With `rank`, `size` and `rendezvous` (a store, or a path on a shared file system that does not exist yet): those ranks meet there.
    A group that exists already is used as it is. Raises WorldError for CUDA where there is none, or a half-given rank.
    """
    if (rank is None) != (size is None) or (rank is None) != (rendezvous is None):
        raise WorldError(f"rank, size and rendezvous belong together, got {rank=}, {size=}, {rendezvous=}; give all three or none")
    kind = device_kind(device, "engine.device")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **_store_arguments(rank, size, rendezvous))
    local = torch.device(kind, _local_rank()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(local)
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=local, mesh=mesh)


def close_world() -> None:
    """Leave the process group; may be called twice. A process that ends soon after must end by `vla_rl.process.end_process`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_kind(device: str, field: str) -> str:
    """`cpu` or `cuda` for a recipe's `auto`, `cpu` or `cuda`. Raises WorldError naming the recipe's field for CUDA where there is none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise WorldError(f"{field} is 'cuda' and torch sees no GPU; allowed here: auto, cpu. Set {field}: cpu, or check the driver.")
    return device


def _store_arguments(rank: int | None, size: int | None, rendezvous: Path | Store | None) -> dict[str, Any]:
    if rank is not None and size is not None and rendezvous is not None:
        at_path = isinstance(rendezvous, Path)
        store = dist.FileStore(str(rendezvous), size) if at_path else rendezvous  # pyright: ignore[reportPrivateImportUsage]
        return {"store": store, "rank": rank, "world_size": size}
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return {"init_method": "env://"}
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore[reportPrivateImportUsage]


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
