"""Input devices: shaping by hand, silence, toggles, LeRobot's and SpaceMouse's values, and what is said when one is missing."""

from __future__ import annotations

import importlib
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.collection.devices import spacemouse
from vla_rl.collection.devices.base import CLOSED, OPEN, Event, Shaping
from vla_rl.collection.devices.browser import SILENCE_S, BrowserDevice
from vla_rl.collection.devices.lerobot_teleoperator import _Adapter, make_teleoperator
from vla_rl.collection.devices.polled import PolledDevice, RawInput
from vla_rl.collection.devices.scripted import Switching
from vla_rl.collection.devices.spacemouse import DeviceMissing, open_spacemouse
from vla_rl.episode import EpisodeSpec, Observation

SPEC = EpisodeSpec("reach", 0, "sampled:3", "demonstrations")
SEEN = Observation({}, np.zeros(8, np.float32), "go")
PLAIN = Shaping(deadzone=0.0, translation_gain=1.0, rotation_gain=1.0)


def test_shaping_by_hand() -> None:
    shaping = Shaping(deadzone=0.2, translation_gain=0.5, rotation_gain=0.25)
    action_A = shaping.action([0.1, -0.2, 1.0, 0.6, -1.0, 5.0], 3.0)
    np.testing.assert_allclose(action_A, [0, 0, 0.5, 0.25 * 0.5, -0.25, 0.25, 1.0], atol=1e-7)  # float32 of numbers below 1
    assert action_A.dtype == np.float32


@given(st.lists(st.floats(-2, 2), min_size=6, max_size=6), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0.01, 1))
def test_actions_are_clipped_before_anybody_records_them(raw: list[float], gripper: float, deadzone: float, gain: float) -> None:
    action_A = Shaping(deadzone, gain, gain).action(raw, gripper)
    assert np.abs(action_A).max() <= 1
    resting = np.abs(raw) <= deadzone
    assert (action_A[:6][resting] == 0).all()
    assert (np.sign(action_A[:6]) * np.sign(raw) >= 0).all(), "never against the hand"


def test_a_silent_page_moves_nothing() -> None:
    """The last message said 'forward'; a tab that hangs must not drive the arm into the table."""
    now_s = 100.0
    device = BrowserDevice(PLAIN, clock=lambda: now_s)
    device.push([1, 0, 0, 0, 0, 0], pressed_s=99.9)
    assert device.read(0, SEEN).moves
    now_s += SILENCE_S - 0.01
    assert device.read(0, SEEN).moves
    now_s += 0.02
    assert not device.read(0, SEEN).moves


def test_a_key_press_is_timed_once_and_the_gripper_starts_as_it_is() -> None:
    device = BrowserDevice(PLAIN, clock=lambda: 5.0)
    device.take(0, SPEC, gripper=0.7)
    assert device.read(0, SEEN).action_A[6] == CLOSED, "taking over must not drop what the policy holds"
    device.push([0, 1, 0, 0, 0, 0], pressed_s=4.9)
    device.push([0, 1, 0, 0, 0, 0], pressed_s=4.95)
    device.saw(0, 12)
    readings = [device.read(0, SEEN), device.read(0, SEEN)]
    assert [reading.pressed_s for reading in readings] == [4.9, None] and readings[0].seen_step == 12
    device.toggle_gripper(4.97)
    reading = device.read(0, SEEN)
    assert reading.action_A[6] == OPEN and reading.pressed_s == 4.97


def test_a_polled_device_answers_at_once_and_a_failure_is_not_rest() -> None:
    """The hardware blocks; the newest value is there all the same. Then it is unplugged."""
    polled, released, unplug = threading.Event(), threading.Event(), threading.Event()
    answers = iter([RawInput([0, 0, 1, 0, 0, 0], toggles_gripper=True, events=[Event.TAKE_OVER])])

    def poll() -> RawInput:
        for answer in answers:
            return answer
        polled.set()
        unplug.wait()
        raise OSError("no such device")

    device = PolledDevice(poll, PLAIN, rate_hz=1000, release=released.set)
    assert polled.wait(10)
    reading = device.read(0, SEEN)
    assert reading.action_A[2] == 1 and reading.action_A[6] == CLOSED and reading.pressed_s is not None
    assert device.events() == [Event.TAKE_OVER] and device.events() == []
    unplug.set()
    device._thread.join(10)
    with pytest.raises(OSError, match="no such device"):
        device.read(0, SEEN)
    device.close()
    assert released.is_set()


class SixAxes:
    """A LeRobot teleoperator of a plugin, with events as HIL-SERL has them."""

    def __init__(self) -> None:
        self.events: dict[Any, bool] = {}
        self.action: dict[str, float] = {"delta_x": 1.0, "delta_y": -0.5, "delta_z": 0.0, "delta_wz": 0.25, "gripper": 0}

    def get_action(self) -> dict[str, float]:
        return self.action

    def get_teleop_events(self) -> dict[Any, bool]:
        return self.events


def test_lerobots_actions_and_events() -> None:
    from lerobot.teleoperators.utils import TeleopEvents

    teleoperator = SixAxes()
    adapter = _Adapter("six_axes", teleoperator)
    heard = adapter.poll()
    assert list(heard.raw_6) == [1.0, -0.5, 0.0, 0.0, 0.0, 0.25] and heard.gripper == CLOSED and not heard.events
    teleoperator.action["gripper"] = 1
    teleoperator.events = {TeleopEvents.IS_INTERVENTION: True, TeleopEvents.SUCCESS: False}
    heard = adapter.poll()
    assert heard.gripper is None and list(heard.events) == [Event.TAKE_OVER], "1 leaves the gripper as it is"
    teleoperator.events = {TeleopEvents.IS_INTERVENTION: True, TeleopEvents.SUCCESS: True}
    assert list(adapter.poll().events) == [Event.SUCCESS] and not adapter.poll().events, "a button that stays down is one event"
    teleoperator.events = {}
    assert list(adapter.poll().events) == [Event.HAND_BACK]
    teleoperator.action = {"shoulder_pan.pos": 3.0}
    with pytest.raises(DeviceMissing, match=r"'six_axes' answers with shoulder_pan\.pos; an end-effector one answers with delta_x"):
        adapter.poll()


def test_lerobots_teleoperators_by_name() -> None:
    with pytest.raises(DeviceMissing, match="no teleoperator 'gamepat'; did you mean 'gamepad'"):
        make_teleoperator("gamepat", {})
    with pytest.raises(DeviceMissing, match=r"'keyboard_ee' does not take these settings.*speed"):
        make_teleoperator("keyboard_ee", {"speed": 3})


def test_spacemouse_axes_and_buttons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed away from the person, the arm goes away from the camera. The hardware is played, in pyspacemouse 2.1's own terms."""
    state = SimpleNamespace(t=0.0, x=0.25, y=1.0, z=0.5, roll=0.0, pitch=0.0, yaw=-1.0, buttons=[1, 0])
    package: Any = ModuleType("pyspacemouse")
    package.AxisConvention = SimpleNamespace(HID_Z_UP="hid_z_up")
    closed, reads = threading.Event(), threading.Semaphore(0)

    def read() -> Any:
        reads.release()
        return state

    def open_device(axis_convention: str) -> Any:
        assert axis_convention == "hid_z_up"
        return SimpleNamespace(read=read, close=closed.set)

    package.open = open_device
    monkeypatch.setitem(sys.modules, "pyspacemouse", package)
    device = open_spacemouse(PLAIN)
    for _ in range(3):
        assert reads.acquire(timeout=10)
    reading = device.read(0, SEEN)
    assert reading.action_A.tolist() == [-1.0, 0.25, 0.5, 0.0, 0.0, -1.0, CLOSED], "one toggle, however long it is held"
    device.close()
    assert closed.is_set()

    def open_nothing(axis_convention: str) -> Any:
        raise RuntimeError("No connected or supported devices found.")

    package.open = open_nothing
    with pytest.raises(DeviceMissing, match=r"No connected or supported devices found\. Plug it in"):
        open_spacemouse(PLAIN)
    monkeypatch.setitem(sys.modules, "pyspacemouse", None)
    with pytest.raises(DeviceMissing, match=r"pip install 'vla-rl\[spacemouse\]'"):
        open_spacemouse(PLAIN)


class Hid:
    """The HID interface of a SpaceMouse Compact, as `easyhid` has it: reports wait until they are read, oldest first."""

    vendor_id, product_id, release_number = 0x256F, 0xC635, 1
    product_string, manufacturer_string, serial_number, path = "SpaceMouse Compact", "3Dconnexion", "", "/dev/hidraw0"

    def __init__(self) -> None:
        self.reports: deque[bytes] = deque()
        self.is_read_empty, self.is_unplugged = threading.Event(), False

    def push(self, *axes_3: int) -> None:
        """Right, towards the person, down: up to 350 each."""
        self.reports.append(struct.pack("<B3h", 1, *axes_3))

    def turn(self, *axes_3: int) -> None:
        """Around the same axes."""
        self.reports.append(struct.pack("<B3h", 2, *axes_3))

    def press(self, bits: int) -> None:
        """Bit 0 is the left button, bit 1 the right one."""
        self.reports.append(struct.pack("<BB", 3, bits))

    def read(self, size: int) -> bytearray:
        if self.is_unplugged:
            raise OSError("Failed to read from HID device: -1")
        if self.reports:
            return bytearray(self.reports.popleft().ljust(size, b"\0"))
        self.is_read_empty.set()
        return bytearray()

    def set_nonblocking(self, wanted: bool) -> None:
        assert wanted

    def open(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def hid(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hid]:
    """The HID interface of the one device of this machine, beneath the real pyspacemouse."""
    device, easyhid = Hid(), ModuleType("easyhid")
    for name, value in {"Enumeration": lambda: SimpleNamespace(find=lambda: [device]), "HIDException": OSError, "HIDDevice": Hid}.items():
        setattr(easyhid, name, value)
    monkeypatch.setitem(sys.modules, "easyhid", easyhid)
    _forget_pyspacemouse()
    yield device
    _forget_pyspacemouse()


def _forget_pyspacemouse() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyspacemouse"]:
        del sys.modules[name]


def _read_all(hid: Hid, device: PolledDevice) -> list[float]:
    """The action after all reports were heard: a poll finds nothing at most twice, so the fourth time is of a later one."""
    for _ in range(4):
        hid.is_read_empty.clear()
        assert hid.is_read_empty.wait(10)
    assert not hid.reports
    return device.read(0, SEEN).action_A.tolist()


@pytest.mark.parametrize(
    ("push", "turn", "twist"),
    [
        ((0, -350, 0), (0, 0, 0), [-1, 0, 0, 0, 0, 0]),
        ((350, 0, 0), (0, 0, 0), [0, 1, 0, 0, 0, 0]),
        ((0, 0, -350), (0, 0, 0), [0, 0, 1, 0, 0, 0]),
        ((0, 0, 0), (0, -350, 0), [0, 0, 0, -1, 0, 0]),
        ((0, 0, 0), (350, 0, 0), [0, 0, 0, 0, 1, 0]),
        ((0, 0, 0), (0, 0, -350), [0, 0, 0, 0, 0, 1]),
    ],
    ids=["away", "right", "up", "around away", "around right", "around up"],
)
def test_reports_of_a_spacemouse_become_a_twist_of_the_arm(
    hid: Hid, push: tuple[int, ...], turn: tuple[int, ...], twist: list[float]
) -> None:
    """From raw HID reports through the real pyspacemouse: the arm goes where the hand does, seen by a camera that faces the robot, and
    turns around the same directions."""
    with closing(open_spacemouse(PLAIN)) as device:
        hid.push(*push)
        hid.turn(*turn)
        assert _read_all(hid, device) == [*map(float, twist), OPEN]


def test_a_spacemouse_that_sends_faster_than_it_is_polled_is_not_seen_late(hid: Hid) -> None:
    """One poll takes all reports, and hears what the buttons did in between."""
    package = importlib.import_module("pyspacemouse")
    mouse, buttons = package.open(axis_convention=package.AxisConvention.HID_Z_UP), spacemouse._Buttons()
    for step in range(1, 41):
        hid.push(0, 0, -step)
        hid.turn(0, 0, 0)
    for bits in (1, 0, 2, 0):
        hid.press(bits)
    hid.push(350, 0, 0)
    heard = spacemouse._take_reports(mouse, buttons)
    assert not hid.reports
    assert list(heard.raw_6) == [0, 1, 0, 0, 0, 0] and heard.toggles_gripper and list(heard.events) == [Event.CONTROL]
    rest = spacemouse._take_reports(mouse, buttons)
    assert (rest.raw_6, rest.toggles_gripper, list(rest.events)) == (heard.raw_6, False, [])
    hid.is_unplugged = True
    with pytest.raises(OSError, match="Failed to read from HID"):
        spacemouse._take_reports(mouse, buttons)


def test_switching_lengths_are_in_range_and_depend_on_the_spec() -> None:
    switching = Switching((2, 5), (1, 3))
    lengths = [switching.length(SPEC, phase) for phase in range(40)]
    assert lengths == [switching.length(SPEC, phase) for phase in range(40)]
    assert set(lengths[::2]) == {2, 3, 4, 5} and set(lengths[1::2]) == {1, 2, 3}
    assert Switching().length(SPEC, 1) is None, "to the end of the episode"
    with pytest.raises(ValueError, match=r"policy_steps is \[5, 2\], must be"):
        Switching((5, 2))
