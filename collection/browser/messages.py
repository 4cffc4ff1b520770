"""What the page may say, and how it is checked: strict JSON of limited size, no other form of data anywhere."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from vla_rl.collection.devices.base import TWIST_DIM, Event
from vla_rl.config import ConfigError, build, nearest_name
from vla_rl.errors import UserError

MAX_BYTES = 2048
"""Longest message of a page; the longest one that the page sends has about 300."""
MAX_NAME = 32
"""Longest name of an operator or identifier of a tab (characters)."""


class BadMessage(UserError):
    """A message that is none of ours: the connection is closed with this text."""


def _require_name(name: str, value: str) -> None:
    if not 0 < len(value) <= MAX_NAME or not all(letter.isalnum() or letter in "-_ ." for letter in value):
        raise ValueError(f"{name} is {value[:40]!r}; it must have 1 to {MAX_NAME} letters, digits, spaces, '-', '_' or '.'")


@dataclass(frozen=True)
class Hello:
    """The first message of a connection."""

    operator: str
    """Name of the person."""
    browser: str
    """Identifies the browser (kept in its local storage)."""
    tab: str
    """Identifies the tab (kept in its session storage, so that it survives a reload)."""

    def __post_init__(self) -> None:
        for name in ("operator", "browser", "tab"):
            _require_name(name, getattr(self, name))


@dataclass(frozen=True)
class Push:
    """The axes are pushed like this, until the next such message."""

    raw: tuple[float, ...]
    """x, y, z, roll, pitch, yaw in [-1, 1]."""
    pressed_ms: float | None = None
    """When the key changed that made the difference, on the server's clock as the page knows it (ms)."""

    def __post_init__(self) -> None:
        if len(self.raw) != TWIST_DIM or not all(math.isfinite(value) and abs(value) <= 1 for value in self.raw):
            raise ValueError(f"raw is {list(self.raw)[:8]}; it must be {TWIST_DIM} numbers from -1 to 1")
        _require_finite("pressed_ms", self.pressed_ms)


@dataclass(frozen=True)
class Gripper:
    """Open what is closed, close what is open."""

    pressed_ms: float | None = None

    def __post_init__(self) -> None:
        _require_finite("pressed_ms", self.pressed_ms)


@dataclass(frozen=True)
class Command:
    """A button."""

    event: Event
    env: int


@dataclass(frozen=True)
class Seen:
    """A picture is on the screen."""

    env: int
    step: int
    """Its control step."""
    take: int
    """Which reset of the env it belongs to."""

    def __post_init__(self) -> None:
        if self.env < 0 or self.step < 0:
            raise ValueError(f"env {self.env} and step {self.step} must be at least 0")


@dataclass(frozen=True)
class Ping:
    """Asks for the time of the server."""

    sent_ms: float


@dataclass(frozen=True)
class Forget:
    """Discard a recorded episode."""

    number: int


@dataclass(frozen=True)
class Finish:
    """End the session when what is recorded has been written."""


Message = Hello | Push | Gripper | Command | Seen | Ping | Forget | Finish
KINDS: dict[str, type[Message]] = {
    "hello": Hello, "push": Push, "gripper": Gripper, "command": Command, "seen": Seen, "ping": Ping, "forget": Forget, "finish": Finish,
}  # fmt: skip


def _require_finite(name: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be a finite number")


def parse(text: str) -> Message:
    """The message in a text. Raises BadMessage naming what is wrong."""
    if len(text) > MAX_BYTES:
        raise BadMessage(f"a message of {len(text)} characters; at most {MAX_BYTES} are read")
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadMessage(f"a {type(values).__name__}; a message is an object with the key 'kind'")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadMessage(f"kind is {str(kind)[:40]!r}{nearest_name(str(kind)[:40], list(KINDS))}")
    try:
        return build(KINDS[kind], values, where=f"message {kind!r}")
    except ConfigError as error:
        raise BadMessage(str(error)[:300]) from error
