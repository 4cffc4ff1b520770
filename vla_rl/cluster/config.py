"""How the roles of reinforcement learning are spread over processes and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_rl.config import ConfigError


@dataclass(frozen=True)
class ClusterConfig:
    """Which roles there are, and where they run. The default is everything in one process (envs have their own)."""

    backend: Literal["inline", "process", "ray"] = "inline"
    """`inline`: all roles in this process. `process`: a process per role on this machine. `ray`: an actor per role, on many machines."""
    rollout_workers: int = 1
    """Policy replicas, each with its own env pool; at least 1, and 1 for `inline`."""
    trainer_ranks: int = 1
    """Ranks of the FSDP2 engine; at least 1, and 1 for `inline`."""
    placement: Literal["split", "colocated"] = "split"
    """`split`: trainer ranks and rollout workers have devices of their own. `colocated`: worker i shares the device of rank i, and the
    optimizer's moments wait in host memory during rollouts."""
    nodes: int = 1
    """Machines (`ray` only): roles are dealt out evenly, trainer ranks first; at least 1."""
    gpus_per_node: int = 0
    """GPUs that roles may have on each machine; 0: they compute on CPUs. `split` takes one per role, `colocated` one per pair."""
    cpus_per_role: float = 1.0
    """CPUs that Ray reserves for each role, with the env processes of a worker included; above 0."""
    torch_threads: int | None = None
    """Threads of each role's torch on the CPU; at least 1, none: as many as the driver has. Equal bits need equal threads."""
    heartbeat_deadline_s: float = 60.0
    """Seconds without a sign of life, of which a role gives one a second, after which it counts as hung and is killed; at least 3
    (`process` and `ray`)."""
    progress_deadline_s: float = 1800.0
    """Seconds that a role which was asked for something may take for a single operation (a batch of the policy, a micro-batch, a
    checkpoint, the start of its envs) before it counts as dead-locked and is killed; at least 3 (`process` and `ray`)."""
    ray_address: str | None = None
    """HOST:PORT of a running Ray cluster (`auto` finds the one that runs on this machine); none starts Ray here for the time of the run."""

    def __post_init__(self) -> None:
        for name in ("rollout_workers", "trainer_ranks", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name} is {getattr(self, name)}; allowed: at least 1")
        if self.gpus_per_node < 0:
            raise ConfigError(f"cluster.gpus_per_node is {self.gpus_per_node}; allowed: at least 0")
        if not self.cpus_per_role > 0:
            raise ConfigError(f"cluster.cpus_per_role is {self.cpus_per_role}; allowed: above 0")
        if self.torch_threads is not None and self.torch_threads < 1:
            raise ConfigError(f"cluster.torch_threads is {self.torch_threads}; allowed: at least 1, or none")
        for name in ("heartbeat_deadline_s", "progress_deadline_s"):
            if not getattr(self, name) >= 3.0:
                raise ConfigError(f"cluster.{name} is {getattr(self, name)}; allowed: at least 3 seconds")
        self._check_backend()
        self._check_placement()

    def _check_backend(self) -> None:
        if self.backend == "inline" and (self.rollout_workers, self.trainer_ranks) != (1, 1):
            raise ConfigError(
                f"cluster.backend 'inline' has one worker and one rank, not {self.rollout_workers} and {self.trainer_ranks}; "
                "use 'process' on one machine, or 'ray'"
            )
        if self.backend != "ray" and (self.nodes > 1 or self.ray_address is not None):
            raise ConfigError(
                f"cluster.nodes is {self.nodes} and cluster.ray_address {self.ray_address!r}: both belong to backend 'ray', not "
                f"{self.backend!r}"
            )
        host, _, port = (self.ray_address or "auto").rpartition(":")
        if self.ray_address not in (None, "auto") and ("/" in host or not host or not port.isdecimal()):
            raise ConfigError(f"cluster.ray_address is {self.ray_address!r}; allowed: HOST:PORT, `auto`, or none")

    def _check_placement(self) -> None:
        if self.placement == "colocated" and self.rollout_workers != self.trainer_ranks:
            raise ConfigError(
                f"cluster.placement 'colocated' pairs each worker with a rank, but rollout_workers is {self.rollout_workers} and "
                f"trainer_ranks {self.trainer_ranks}; make them equal, or use 'split'"
            )
