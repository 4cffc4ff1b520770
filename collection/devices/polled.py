"""Devices that are polled by a thread: the control loop gets the newest value at once, whatever the hardware does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vla_rl.collection.devices.base import CLOSED, OPEN, TWIST_DIM, Event, Reading, Shaping
from vla_rl.episode import EpisodeSpec, Observation


@dataclass(frozen=True)
class RawInput:
    """One poll of a device."""

    raw_6: Sequence[float]
    """x, y, z, roll, pitch, yaw; full deflection is 1."""
    gripper: float | None = None
    """Where the gripper shall be, -1 (open) to 1 (closed); None: as it is."""
    toggles_gripper: bool = False
    """A button went down that opens what is closed and closes what is open."""
    events: Sequence[Event] = ()


class PolledDevice:
    """A `Device` around a function that asks the hardware, called `rate_hz` times a second.

    What the function raises ends the thread and is raised again by the next `read` or `events`: a device that was unplugged
    must not look like one that rests.
    """

    def __init__(self, poll: Callable[[], RawInput], shaping: Shaping, rate_hz: float, release: Callable[[], None]) -> None:
        self._poll, self._shaping, self._period_s, self._release = poll, shaping, 1.0 / rate_hz, release
        self._lock = threading.Lock()
        self._raw_6: Sequence[float] = (0.0,) * TWIST_DIM
        self._gripper = OPEN
        self._changed_s: float | None = None
        self._events: list[Event] = []
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="input device", daemon=True)
        self._thread.start()

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        """See `Device.take`."""
        with self._lock:
            self._gripper = CLOSED if gripper > 0 else OPEN

    def read(self, env: int, observation: Observation) -> Reading:
        """See `Device.read`. Raises what the device raised."""
        with self._lock:
            self._require_alive()
            changed_s, self._changed_s = self._changed_s, None
            return Reading(self._shaping.action(self._raw_6, self._gripper), None, changed_s)

    def events(self) -> Sequence[Event]:
        """See `Device.events`. Raises what the device raised."""
        with self._lock:
            self._require_alive()
            events, self._events = self._events, []
            return events

    def close(self) -> None:
        """Stop the thread and let the hardware go; may be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._release()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                heard = self._poll()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: the loop raises it where it reads
                with self._lock:
                    self._failure = error
                return
            with self._lock:
                self._hear(heard)

    def _hear(self, heard: RawInput) -> None:
        if tuple(heard.raw_6) != tuple(self._raw_6) or heard.toggles_gripper:
            self._changed_s = time.perf_counter()
        self._raw_6 = tuple(heard.raw_6)
        if heard.toggles_gripper:
            self._gripper = OPEN if self._gripper > 0 else CLOSED
        elif heard.gripper is not None:
            self._gripper = heard.gripper
        self._events += heard.events
