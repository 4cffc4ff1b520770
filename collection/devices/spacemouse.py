"""A 3Dconnexion SpaceMouse on this machine, through the optional package `pyspacemouse`."""

from __future__ import annotations

import importlib
from typing import Any

from vla_rl.collection.devices.base import Event, Shaping
from vla_rl.collection.devices.polled import PolledDevice, RawInput
from vla_rl.errors import UserError

POLL_HZ = 100.0
"""How often all reports are taken that have come (1/s)."""


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
    return PolledDevice(lambda: _take_reports(mouse, buttons), shaping, POLL_HZ, mouse.close)


def _take_reports(mouse: Any, buttons: _Buttons) -> RawInput:
    """What the reports say that have come since the last time.

    The package takes one at a time, and a mouse sends more than a hundred a second (those of pushing and of turning apart): one at a poll
    would show what the hand did half a second ago.
    """
    state, taken_s = mouse.read(), None
    heard = [buttons.input_of(state)]
    while state.t != taken_s:  # the time of the last report: the same again, and there is no more
        taken_s = state.t
        state = mouse.read()
        heard.append(buttons.input_of(state))
    events = [event for one in heard for event in one.events]
    return RawInput(heard[-1].raw_6, toggles_gripper=sum(one.toggles_gripper for one in heard) % 2 == 1, events=events)


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
