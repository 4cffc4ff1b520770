"""Whether a role that lives also gets on: signs of life that it counts, and a watch that notices when they stop.

A role counts *beats*, in a thread of their own, and *marks* of progress (`telemetry/pulse.py`): a call, a span or a micro-batch that began
or ended. A process that was stopped (SIGSTOP), whose machine is stuck, or which dead-locked while it holds the interpreter, does not beat.
One whose work dead-locked beats, and makes no marks although it was asked for something.

Counts, not clocks: the watch adds up the time between its own looks, so that a driver that was itself stopped (Ctrl-Z) blames nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vla_rl.cluster.config import ClusterConfig
from vla_rl.sim.shared_memory import SharedArena
from vla_rl.telemetry.pulse import progress_marks

BEAT_S = 1.0
"""Seconds between two beats."""
LOOK_S = 0.5
"""Seconds between two looks of the watch."""


class Counts(NamedTuple):
    """Signs of life of a role so far."""

    beats: int
    marks: int


NOT_UP = Counts(0, 0)


class Watched(Protocol):
    """A role as the watch sees it."""

    vigil: Vigil

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something and has not answered."""
        ...

    def counts(self) -> Counts:
        """The newest that are known; beats are 0 until it is up."""
        ...

    def end_hung(self, cause: str) -> None:
        """End it, so that everybody who waits for it learns the cause."""
        ...


@dataclass
class Vigil:
    """How long one role has been silent and still."""

    silent_s: float = 0.0
    """Since its last beat; counts once it is up."""
    still_s: float = 0.0
    """Since its last mark while it was busy; counts once it is up."""
    _last: Counts = NOT_UP

    def look(self, now: Counts, is_busy: bool, elapsed_s: float) -> None:
        """Take in what the role has counted `elapsed_s` after the last look."""
        beats, moves = now.beats != self._last.beats, now.marks != self._last.marks
        self.silent_s = 0.0 if beats or not now.beats else self.silent_s + elapsed_s
        self.still_s = 0.0 if moves or not is_busy or not now.beats else self.still_s + elapsed_s
        self._last = now

    def verdict(self, config: ClusterConfig) -> str | None:
        """Why the role counts as hung, or None."""
        if self.silent_s > config.heartbeat_deadline_s:
            return (
                f"hung: no sign of life for {self.silent_s:.0f} s (its process is stopped, or its machine stuck), and "
                f"cluster.heartbeat_deadline_s is {config.heartbeat_deadline_s:g}; it was killed"
            )
        if self.still_s > config.progress_deadline_s:
            return (
                f"hung: its process lives, but got nothing done for {self.still_s:.0f} s (a dead-lock?), and "
                f"cluster.progress_deadline_s is {config.progress_deadline_s:g} (raise it if one operation takes that long); it was killed"
            )
        return None


class Watch:
    """A thread that looks at the roles of a backend and ends those that hang, one at a look: the others may hang because of it."""

    def __init__(self, config: ClusterConfig, roles: Callable[[], Sequence[Watched]]) -> None:
        """`roles` gives those that have not ended; it is called from the watch's thread."""
        self._config, self._roles = config, roles
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="role watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking; may be called twice."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(LOOK_S):
            now = time.monotonic()
            look_at(self._config, self._roles(), min(now - last, 2 * LOOK_S))  # more has passed only if this process did not run
            last = now


def look_at(config: ClusterConfig, roles: Sequence[Watched], elapsed_s: float) -> None:
    """One look: end the role that has been hanging the longest, if one does."""
    for role in roles:
        role.vigil.look(role.counts(), role.is_busy, elapsed_s)
    hung = [role for role in roles if role.vigil.verdict(config) is not None]
    if hung:
        worst = max(hung, key=lambda role: (role.vigil.silent_s, role.vigil.still_s))
        worst.end_hung(str(worst.vigil.verdict(config)))


class Pulse:
    """Counts in memory that a role and its driver share (`process`)."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._counts = arena.array(0, (2,), np.int64)

    @classmethod
    def create(cls) -> Pulse:
        """The driver's side; roles attach to its `path`."""
        return cls(SharedArena.create(16, "vla-rl-pulse"))

    @property
    def path(self) -> str:
        """For `beat_for_ever`."""
        return self._arena.path

    def read(self) -> Counts:
        """See `Watched.counts`."""
        return Counts(*self._counts.tolist())

    def close(self) -> None:
        """Give the file back; may be called twice."""
        self._arena.close()


def beat_for_ever(path: str) -> None:
    """Start the thread that counts this process's signs of life into the `Pulse` at `path`, for as long as the process lives."""
    arena = SharedArena.attach(path)
    counts = arena.array(0, (2,), np.int64)
    arena.close()  # the mapping stays

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            counts[:] = counts[0] + 1, progress_marks()

    counts[:] = 1, progress_marks()  # here, not in the thread: a role that answers has beaten, also where it is stopped right then
    threading.Thread(target=beat, name="beat", daemon=True).start()
