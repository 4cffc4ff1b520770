"""What an input device is: a twist, a gripper, and events; and how raw axes become actions.

A device is read once per control step of the environment that its operator drives, and never blocks: devices that talk to
hardware do so in a thread of their own and answer with the latest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from vla_rl.episode import ACTION_DIM, EpisodeSpec, Float32, Observation

OPEN, CLOSED = -1.0, 1.0
"""Gripper commands, as in `vla_rl/episode.py`."""
TWIST_DIM = 6


class Event(str, Enum):
    """What a button of a device can mean, besides moving."""

    TAKE_OVER = "take_over"
    HAND_BACK = "hand_back"
    CONTROL = "control"
    """Take over, or hand back what one drives: for devices with one button for both, which do not know who is in control."""
    SUCCESS = "success"
    FAILURE = "failure"
    DISCARD = "discard"
    NEXT = "next"
    UNDO = "undo"


@dataclass(frozen=True)
class Reading:
    """What the operator wants at one control step."""

    action_A: Float32
    """float32[7], environment units, within [-1, 1]."""
    label_A: Float32 | None = None
    """float32[7]: the clean intention, where it differs from the action (a noisy scripted operator)."""
    pressed_s: float | None = None
    """When the newest key press that made it happened (s, `time.perf_counter`); None: nothing new since the last reading."""
    seen_step: int = -1
    """Control step of the picture that the operator was looking at; -1: unknown."""
    by_operator: bool = True
    """Recorded as `intervention`; a replay repeats what was recorded."""

    @property
    def moves(self) -> bool:
        """Whether any axis is pushed."""
        return bool(np.any(self.action_A[:TWIST_DIM]))


class Device(Protocol):
    """An operator's hand."""

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        """It drives `env` from now on; the gripper was last told to be at `gripper`, and stays so until it says otherwise."""
        ...

    def read(self, env: int, observation: Observation) -> Reading:
        """What it wants now."""
        ...

    def events(self) -> Sequence[Event]:
        """Buttons pressed since the last call."""
        ...

    def close(self) -> None:
        """Let the hardware go; may be called twice."""
        ...


@dataclass(frozen=True)
class Shaping:
    """From raw axes to action units; the same for every device that a person moves. Part of a recipe."""

    deadzone: float = 0.08
    """Raw values below it (0 to 1, exclusive) are rest; the remaining range is stretched, so that motion begins at 0."""
    translation_gain: float = 0.6
    """Action units of a fully pushed translation axis; 0 to 1. LIBERO: 1 is 5 cm a control step before the arm's inertia."""
    rotation_gain: float = 0.3
    """Action units of a fully pushed rotation axis; 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.deadzone < 1:
            raise ValueError(f"deadzone is {self.deadzone}, must be at least 0 and below 1")
        for name in ("translation_gain", "rotation_gain"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0 and at most 1")

    def action(self, raw_6: Sequence[float], gripper: float) -> Float32:
        """float32[7], clipped to [-1, 1], from six raw axes (x, y, z, roll, pitch, yaw; full deflection is 1) and a gripper command."""
        raw = np.clip(np.asarray(raw_6, np.float64), -1.0, 1.0)
        pushed = np.abs(raw) - self.deadzone
        shaped = np.sign(raw) * np.where(pushed > 0, pushed, 0.0) / (1 - self.deadzone)
        action_A = np.empty(ACTION_DIM, np.float32)
        action_A[:3] = self.translation_gain * shaped[:3]
        action_A[3:6] = self.rotation_gain * shaped[3:]
        action_A[6] = np.clip(gripper, OPEN, CLOSED)
        return action_A
