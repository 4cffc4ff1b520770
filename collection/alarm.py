"""Something to wait for besides pipes: rings at a time, or when another thread calls."""

from __future__ import annotations

import socket
import threading
import time


class Alarm:
    """A socket that becomes readable when `ring` is called, or when the time given to `set` has come."""

    def __init__(self) -> None:
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._condition = threading.Condition()
        self._due_s: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    @property
    def waitable(self) -> socket.socket:
        """For `multiprocessing.connection.wait`."""
        return self._bell

    def set(self, due_s: float | None) -> None:
        """Ring at `time.perf_counter() == due_s`, in place of what was set before; None: not by itself."""
        with self._condition:
            if due_s != self._due_s:
                self._due_s = due_s
                self._condition.notify()

    def ring(self) -> None:
        """Become readable now; from any thread."""
        try:
            self._ringer.send(b"!")
        except BlockingIOError:  # full of rings that nobody has heard yet
            return

    def silence(self) -> None:
        """No longer readable."""
        try:
            while self._bell.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()
        self._bell.close()
        self._ringer.close()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                left_s = None if self._due_s is None else self._due_s - time.perf_counter()
                if left_s is not None and left_s <= 0:
                    self._due_s = None
                    self.ring()
                else:
                    self._condition.wait(left_s)
