"""A 3Dconnexion SpaceMouse on this machine, through the optional package `pyspacemouse`."""

from __future__ import annotations

import importlib
from typing import Any

from vla_rl.collection.devices.base import Event, Shaping
from vla_rl.collection.devices.polled import PolledDevice, RawInput
from vla_rl.errors import UserError

POLL_HZ = 100.0
"""The device reports up to 100 times a second; a slower reader would see old values."""


class DeviceMissing(UserError):
    """A device, or the package that talks to it, is not there."""


def open_spacemouse(shaping: Shaping) -> PolledDevice:
    """The first SpaceMouse of this machine. Raises DeviceMissing with what to install or plug in."""
    try:
        package: Any = importlib.import_module("pyspacemouse")
    except ImportError as error:
        raise DeviceMissing(f"device 'spacemouse' needs pyspacemouse ({error}); pip install 'vla-rl[spacemouse]' and libhidapi") from error
    try:
        mouse = package.open(axis_convention=package.AxisConvention.HID_Z_UP)
    except RuntimeError as error:  # what the package says when there is no device, or no hidapi
        raise DeviceMissing(
            f"no SpaceMouse: {error} Plug it in, install libhidapi, and let this user read /dev/hidraw* (a udev rule)"
        ) from error
    buttons = _Buttons()
    return PolledDevice(lambda: buttons.input_of(mouse.read()), shaping, POLL_HZ, mouse.close)


class _Buttons:
    """Left button: gripper. Right button: take over, and hand back."""

    def __init__(self) -> None:
        self._before: tuple[bool, bool] = (False, False)

    def input_of(self, state: Any) -> RawInput:
        """From pyspacemouse's x right, y away, z up to the robot's base, seen by a camera that faces it: away is -x, right is +y.

        Rotations are vectors in the same frames, so they turn in the same way.
        """
        pressed = tuple(bool(button) for button in (*state.buttons, False, False)[:2])
        left, right = (now and not before for now, before in zip(pressed, self._before))
        self._before = pressed[0], pressed[1]
        events = (Event.CONTROL,) if right else ()
        axes = (-state.y, state.x, state.z, -state.pitch, state.roll, state.yaw)
        return RawInput(axes, toggles_gripper=left, events=events)
