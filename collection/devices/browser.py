"""The hand of a person at the page: holds the newest state of keys or sticks that the page has sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from vla_rl.collection.devices.base import CLOSED, OPEN, TWIST_DIM, Event, Reading, Shaping
from vla_rl.episode import EpisodeSpec, Observation

SILENCE_S = 0.6
"""Without a word from the page for this long, nothing is pushed: a frozen tab must not keep the arm moving (s)."""


class BrowserDevice:
    """Written by the server's thread (`push`, `toggle_gripper`), read by the control loop."""

    def __init__(self, shaping: Shaping, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shaping, self._clock = shaping, clock
        self._lock = threading.Lock()
        self._raw_6: Sequence[float] = (0.0,) * TWIST_DIM
        self._heard_s = -SILENCE_S
        self._pressed_s: float | None = None
        self._seen: dict[int, int] = {}
        self._gripper = OPEN

    def push(self, raw_6: Sequence[float], pressed_s: float | None = None) -> None:
        """The axes are pushed like this from now on. pressed_s: when the key that changed them went down or up."""
        with self._lock:
            if tuple(raw_6) != tuple(self._raw_6) and pressed_s is not None:
                self._pressed_s = pressed_s
            self._raw_6, self._heard_s = tuple(raw_6), self._clock()

    def toggle_gripper(self, pressed_s: float | None = None) -> None:
        """Open what is closed, close what is open."""
        with self._lock:
            self._gripper = OPEN if self._gripper > 0 else CLOSED
            self._pressed_s = pressed_s if pressed_s is not None else self._pressed_s

    def saw(self, env: int, control_step: int) -> None:
        """The page shows the picture before this control step of `env`."""
        with self._lock:
            self._seen[env] = control_step

    def forget(self, env: int) -> None:
        """Another take has begun in `env`: what was seen there is gone."""
        with self._lock:
            self._seen.pop(env, None)

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        """See `Device.take`."""
        with self._lock:
            self._gripper = CLOSED if gripper > 0 else OPEN
            self._pressed_s = None

    def read(self, env: int, observation: Observation) -> Reading:
        """See `Device.read`."""
        with self._lock:
            silent = self._clock() - self._heard_s > SILENCE_S
            raw_6 = (0.0,) * TWIST_DIM if silent else self._raw_6
            pressed_s, self._pressed_s = self._pressed_s, None
            return Reading(self._shaping.action(raw_6, self._gripper), None, pressed_s, self._seen.get(env, -1))

    def events(self) -> Sequence[Event]:
        """None: what the page's buttons mean arrives as commands, with the environment they are for."""
        return ()

    def close(self) -> None:
        """Nothing to let go."""
