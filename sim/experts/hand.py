"""The hand as an expert sees it, and the two motions that every skill shares: come down on a grasp, and notice having arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, finger_angle, funnel, half_turn_difference, osc_action, rotation_error, straight_down

HOVER = 0.10
"""The hand comes down to a grasp from this height (m)."""
WAIT_HEIGHT = 0.06
"""While the fingers still open or the hand still turns, it waits this far (m) above the grasp."""
REACH_TOLERANCE = 0.008
"""Distance to the grasp (m) at which the fingers begin to close."""
REACH_CONE = 0.006
"""Horizontal error (m) from which on the hand keeps its height while it approaches."""
YAW_TOLERANCE = 0.12
"""Error of the finger line (rad) that a grasp bears."""
OPEN_WIDTH = 0.07
"""Distance of the fingers (m) from which on they count as open."""
MIN_CLOSE_STEPS, MAX_CLOSE_STEPS = 4, 16
"""The fingers need about 8 control steps to close; fewer steps would mistake their start for the end."""
STILL = 0.0005
"""Fingers that moved less than this (m) in a control step have met something, or each other."""


@dataclass(frozen=True)
class Hand:
    """Pose and opening of the hand."""

    position: np.ndarray
    """float64[3]: the grip site (m)."""
    quaternion: np.ndarray
    """float64[4]: xyzw."""
    width: float
    """Distance of the fingers (m), 0 to 0.08."""

    @classmethod
    def read(cls, privileged: Mapping[str, np.ndarray]) -> Hand:
        """The hand in an observation's privileged values."""
        left, right = privileged["robot0_gripper_qpos"]
        return cls(privileged["robot0_eef_pos"], privileged["robot0_eef_quat"], float(left - right))

    @property
    def finger_angle(self) -> float:
        """World angle of the finger line (rad)."""
        return finger_angle(self.quaternion)

    def turn_to(self, angle: float) -> float:
        """Smallest turn (rad) that brings the finger line to `angle`."""
        return half_turn_difference(angle, self.finger_angle)


def descend(hand: Hand, point: np.ndarray, angle: float) -> np.ndarray:
    """float32[7]: come down over `point` with open fingers along `angle`.

    A hand that is turned well enough is not turned at all, so that most demonstrations hold no rotation.
    """
    target = straight_down(angle, hand.quaternion)
    rotation = rotation_error(target, hand.quaternion) if abs(hand.turn_to(angle)) > YAW_TOLERANCE / 2 else np.zeros(3)
    return approach(hand, point, target, rotation)


def approach(hand: Hand, point: np.ndarray, target: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """float32[7]: move to `point` along the z axis of the orientation `target`, fingers open, turning by `rotation` (rad).

    Off that axis, and while the fingers still open or the hand still turns, the hand keeps its distance.
    """
    x, y, depth = target.T @ (point - hand.position)
    waiting = hand.width < OPEN_WIDTH or np.linalg.norm(rotation) > 2 * YAW_TOLERANCE
    x, y, rise = funnel(np.array([x, y, (WAIT_HEIGHT if waiting else 0.0) - depth]), HOVER, REACH_CONE)
    return osc_action(target @ np.array([x, y, -rise]), rotation, OPEN)


def arrived(hand: Hand, point: np.ndarray, angle: float) -> bool:
    """Whether a hand that points down can close its fingers now."""
    return near(hand, point) and abs(hand.turn_to(angle)) < YAW_TOLERANCE


def near(hand: Hand, point: np.ndarray) -> bool:
    """Whether open fingers are at `point`."""
    return bool(np.linalg.norm(point - hand.position) < REACH_TOLERANCE and hand.width > OPEN_WIDTH)


def close_on(hand: Hand, point: np.ndarray) -> np.ndarray:
    """float32[7]: close the fingers and stay at `point`."""
    return osc_action(point - hand.position, np.zeros(3), CLOSE)


def closed(width_before: float, hand: Hand, steps: int) -> bool:
    """Whether the fingers have met something after `steps` of closing, given their distance one step ago."""
    return (steps >= MIN_CLOSE_STEPS and abs(hand.width - width_before) < STILL) or steps >= MAX_CLOSE_STEPS
