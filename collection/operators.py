"""Who may take control in a session, as recipes say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vla_rl.collection.control import AbsenceRule
from vla_rl.collection.devices.base import Shaping
from vla_rl.collection.devices.scripted import Switching
from vla_rl.config import nearest_name
from vla_rl.episode import VIEW_AGENT, VIEWS

DEFAULT_BINDINGS: Mapping[str, str] = {
    "forward": "KeyW", "back": "KeyS", "left": "KeyA", "right": "KeyD", "up": "KeyE", "down": "KeyQ",
    "roll_left": "KeyU", "roll_right": "KeyO", "pitch_down": "KeyI", "pitch_up": "KeyK", "yaw_left": "KeyJ", "yaw_right": "KeyL",
    "slow": "ShiftLeft", "gripper": "Space", "control": "Enter", "success": "Digit1", "failure": "Digit2", "discard": "Digit3",
    "next": "KeyN", "undo": "KeyZ", "replay": "KeyR", "help": "KeyH",
}  # fmt: skip
"""What each key does at the page: command -> `KeyboardEvent.code`, which names a place on the keyboard whatever is printed there."""


@dataclass(frozen=True)
class PageOperator:
    """A person at the page that the command opens, with keyboard, gamepad, or a device at this machine."""

    kind: Literal["page"]
    """Which operator this is."""
    device: Literal["browser", "spacemouse", "lerobot"] = "browser"
    """What moves the arm: keys and gamepad of the page, a SpaceMouse of this machine, or a LeRobot teleoperator of this machine."""
    teleoperator: str = ""
    """Type name of the LeRobot teleoperator, such as `gamepad` or one of an installed plugin; only with device `lerobot`."""
    shaping: Shaping = field(default_factory=Shaping)
    """Deadzone and gains of what the person moves."""
    host: str = "127.0.0.1"
    """Where the page listens; anything but this machine's own addresses requires the one-time token that the command prints."""
    port: int = 8765
    """Port of the page; 0 lets the system choose a free one. 0 to 65535."""
    views: tuple[str, ...] = (VIEW_AGENT,)
    """Cameras that the page shows; each costs rendering time, never control rate."""
    resolution: int = 256
    """Pixels of the pictures on the page, whatever the dataset's are; 16 to 1024."""
    idle_steps: int | None = 10
    """Control steps without motion after which time stands still until the next motion; none: it never does. At least 1."""
    absence: AbsenceRule = field(default_factory=AbsenceRule)
    """What happens to what the person holds when the page is gone."""
    bindings: tuple[str, ...] = ()
    """Keys other than the defaults, each `command=KeyboardEvent.code`, such as `up=ArrowUp`; people can also change them on the page."""

    def __post_init__(self) -> None:
        if (self.device == "lerobot") != bool(self.teleoperator):
            raise ValueError(f"device is {self.device!r} and teleoperator is {self.teleoperator!r}; device 'lerobot' needs its type name")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, must be 0 to 65535")
        if not 16 <= self.resolution <= 1024:
            raise ValueError(f"resolution is {self.resolution}, must be 16 to 1024 pixels")
        if self.idle_steps is not None and self.idle_steps < 1:
            raise ValueError(f"idle_steps is {self.idle_steps}, must be at least 1")
        if not self.views:
            raise ValueError("views is empty; the page must show at least one camera")
        for view in self.views:
            if view not in VIEWS:
                raise ValueError(f"views has {view!r}{nearest_name(view, VIEWS)}")
        self.keys()

    def keys(self) -> dict[str, str]:
        """Command -> key code. Raises ValueError for a command that does not exist or a key that is bound twice."""
        keys = dict(DEFAULT_BINDINGS)
        for binding in self.bindings:
            command, _, code = binding.partition("=")
            if command not in keys or not code:
                raise ValueError(f"bindings has {binding!r}, must be 'command=code'{nearest_name(command, list(keys))}")
            keys[command] = code
        twice = sorted({code for code in keys.values() if list(keys.values()).count(code) > 1})
        if twice:
            raise ValueError(f"bindings give {', '.join(twice)} to two commands; every command needs a key of its own")
        return keys


@dataclass(frozen=True)
class ScriptedOperatorConfig:
    """The scripted expert in place of a person: takes over from the policy, as fast as the machine can."""

    kind: Literal["scripted"]
    """Which operator this is."""
    switching: Switching = field(default_factory=Switching)
    """When it takes over and hands back."""


@dataclass(frozen=True)
class ReplayOperator:
    """Recorded episodes are executed again, for other pictures: another resolution, denser frames, another format."""

    kind: Literal["replay"]
    """Which operator this is."""
    dataset: str
    """HDF5 file or folder, LeRobot folder, or run directory of `vla-rl collect`. Of each task in `tasks`, the first
    `episodes_per_task` episodes are executed; their own scenes, noise and outcomes replace the recipe's."""


OperatorConfig = PageOperator | ScriptedOperatorConfig | ReplayOperator
