"""A bell that threads ring and `multiprocessing.connection.wait` hears."""

from __future__ import annotations

import socket
from typing import Any


class Bell:
    """A socket that is readable while rings have not been silenced."""

    def __init__(self) -> None:
        self._rung, self._heard = socket.socketpair()

    @property
    def waitable(self) -> Any:
        """For `multiprocessing.connection.wait`."""
        return self._heard

    def ring(self) -> None:
        """Make the waitable readable; from any thread."""
        self._rung.send(b".")

    def silence(self, rings: int) -> None:
        """Take back as many rings; those of work that was just seen to be done may be a moment late, so this waits for them."""
        while rings:
            rings -= len(self._heard.recv(rings))

    def close(self) -> None:
        """Free both ends; may be called twice."""
        self._rung.close()
        self._heard.close()
