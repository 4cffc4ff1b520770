"""Any installed LeRobot `Teleoperator`, by its type name, as a device.

LeRobot's end-effector teleoperators answer `get_action()` with `delta_x`, `delta_y`, `delta_z`, a few also with rotations, and
`gripper` (0 closes, 1 stays, 2 opens); some have `get_teleop_events()` (lerobot 0.6, `teleoperators/`). Leader arms answer with
joint positions, which LIBERO's end-effector control has no use for: they are refused by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from vla_rl.collection.devices.base import CLOSED, OPEN, Event, Shaping
from vla_rl.collection.devices.polled import PolledDevice, RawInput
from vla_rl.collection.devices.spacemouse import DeviceMissing
from vla_rl.config import nearest_name

AXES = ("delta_x", "delta_y", "delta_z", "delta_wx", "delta_wy", "delta_wz")
"""Names of the six axes; those that an action lacks are at rest."""
GRIPPER_COMMANDS = {0: CLOSED, 1: None, 2: OPEN}
"""LeRobot's discrete gripper (`GripperAction`)."""
EVENTS = {
    "success": Event.SUCCESS,
    "failure": Event.FAILURE,
    "rerecord_episode": Event.DISCARD,
    "terminate_episode": Event.FAILURE,
}
"""LeRobot's `TeleopEvents` by value; `is_intervention` is a level, not an event, and is handled apart."""


def open_teleoperator(type_name: str, settings: Mapping[str, Any], shaping: Shaping, rate_hz: float) -> PolledDevice:
    """Connect the teleoperator that LeRobot or an installed plugin registered as `type_name`.

    settings: fields of its config. Raises DeviceMissing for a type that is not registered, fields it does not have, or one whose
    actions hold no end-effector motion.
    """
    teleoperator = make_teleoperator(type_name, settings)
    teleoperator.connect()
    adapter = _Adapter(type_name, teleoperator)
    return PolledDevice(adapter.poll, shaping, rate_hz, teleoperator.disconnect)


def make_teleoperator(type_name: str, settings: Mapping[str, Any]) -> Any:
    """The teleoperator, not connected yet. Raises DeviceMissing."""
    config_class = _config_class(type_name)
    try:
        config = config_class(**settings)
    except TypeError as error:
        raise DeviceMissing(f"teleoperator {type_name!r} does not take these settings: {error}") from error
    factory = importlib.import_module("lerobot.teleoperators.utils").make_teleoperator_from_config
    try:
        return factory(config)
    except ImportError as error:
        raise DeviceMissing(f"teleoperator {type_name!r} needs a package that is not installed: {error}") from error


def _config_class(type_name: str) -> type[Any]:
    teleoperators = importlib.import_module("lerobot.teleoperators")
    missing = _register(teleoperators)
    known: dict[str, type[Any]] = teleoperators.TeleoperatorConfig.get_known_choices()
    if type_name not in known:
        hint = nearest_name(type_name, sorted(known))
        without = f" (not looked at, because packages are missing: {'; '.join(missing)})" if missing else ""
        raise DeviceMissing(f"LeRobot knows no teleoperator {type_name!r}{hint}{without}; install its plugin first")
    return known[type_name]


def _register(teleoperators: Any) -> list[str]:
    """Import LeRobot's own teleoperators and the installed plugins, which register themselves; why some could not be imported."""
    missing = []
    for module in pkgutil.iter_modules(teleoperators.__path__):
        try:
            importlib.import_module(f"lerobot.teleoperators.{module.name}")
        except ImportError as error:
            missing.append(f"{module.name}: {error}")
    importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    return missing


class _Adapter:
    """Reads the teleoperator's dictionaries."""

    def __init__(self, type_name: str, teleoperator: Any) -> None:
        self._type_name, self._teleoperator = type_name, teleoperator
        self._intervening = False
        self._before: frozenset[str] = frozenset()

    def poll(self) -> RawInput:
        """One action and the events that are new."""
        action = self._teleoperator.get_action()
        if not any(name in action for name in AXES):
            raise DeviceMissing(
                f"teleoperator {self._type_name!r} answers with {', '.join(action)}; an end-effector one answers with delta_x, delta_y, ..."
            )
        raw_6 = [float(action.get(name, 0.0)) for name in AXES]
        gripper = action.get("gripper")
        return RawInput(raw_6, None if gripper is None else GRIPPER_COMMANDS.get(int(gripper)), events=self._new_events())

    def _new_events(self) -> list[Event]:
        if not hasattr(self._teleoperator, "get_teleop_events"):
            return []
        raised = {str(getattr(name, "value", name)) for name, value in self._teleoperator.get_teleop_events().items() if value}
        new = [EVENTS[name] for name in sorted(raised - self._before) if name in EVENTS]
        intervening = "is_intervention" in raised
        if intervening != self._intervening:
            new.insert(0, Event.TAKE_OVER if intervening else Event.HAND_BACK)
        self._intervening, self._before = intervening, frozenset(raised)
        return new
