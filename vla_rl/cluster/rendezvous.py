"""Where processes of a run find each other: a small TCP store that the driver keeps."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

JOIN_S = 300.0
"""How long a process waits for the others to come."""


@dataclass(frozen=True)
class Rendezvous:
    """Address of the driver's store; goes to every role."""

    host: str
    port: int

    def store(self, group: str) -> Store:
        """A connection to it, with names of one group only."""
        return PrefixStore(group, TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=JOIN_S)))


class MeetingPlace:
    """The store itself; lives as long as this object."""

    def __init__(self, host: str) -> None:
        """`host` is the address under which the other machines reach this one."""
        listener = socket.create_server((host, 0), backlog=128)
        port = listener.getsockname()[1]
        self._store: Store | None = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.address = Rendezvous(host, port)

    def close(self) -> None:
        """Nobody new can come; may be called twice."""
        self._store = None
