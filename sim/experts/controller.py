"""From a displacement the hand should make to an action of the OSC_POSE controller.

One action unit asks for 5 cm and 0.5 rad (robosuite's `osc_pose.json`). The controller is a critically damped
spring towards `current pose + action`, so with the proportional gain g the closed loop has the damping ratio
1 / sqrt(g): g = 2 settles fast and overshoots by 4 % of a step.

Angles are in radians, lengths in metres, quaternions are xyzw as robosuite observes them.
"""

from __future__ import annotations

import numpy as np

METRES_PER_UNIT = 0.05
RADIANS_PER_UNIT = 0.5
GAIN = 2.0
ROTATION_DEADBAND = 0.04
"""Orientation errors below this (rad) are not commanded: with zero rotation the controller holds its last orientation goal."""
OPEN, CLOSE = -1.0, 1.0


def rotation_matrix(quaternion_xyzw: np.ndarray) -> np.ndarray:
    """float64[3, 3] of a unit quaternion xyzw."""
    x, y, z, w = quaternion_xyzw
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """float64[3]: axis times angle of a rotation matrix, angle in [0, pi).

    The axis comes from the skew part, which vanishes at a half turn: experts never command one.
    """
    skew = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]])
    sine, cosine = np.linalg.norm(skew) / 2, (np.trace(matrix) - 1) / 2
    if sine < 1e-9:
        return np.zeros(3)
    return skew / (2 * sine) * np.arctan2(sine, cosine)


def half_turn_difference(angle: float, reference: float) -> float:
    """`angle - reference` folded into [-pi/2, pi/2): two fingers look the same after half a turn."""
    return (angle - reference + np.pi / 2) % np.pi - np.pi / 2


def finger_angle(eef_quaternion: np.ndarray) -> float:
    """World angle of the line on which the fingers move: the hand's y axis, projected on the floor."""
    y_axis = rotation_matrix(eef_quaternion)[:, 1]
    return float(np.arctan2(y_axis[1], y_axis[0]))


def straight_down(angle: float, eef_quaternion: np.ndarray) -> np.ndarray:
    """float64[3, 3]: the hand pointing down with its finger line at `angle`, of two such poses the nearer one."""
    nearest = finger_angle(eef_quaternion) + half_turn_difference(angle, finger_angle(eef_quaternion))
    y_axis = np.array([np.cos(nearest), np.sin(nearest), 0.0])
    z_axis = np.array([0.0, 0.0, -1.0])
    return np.stack([np.cross(y_axis, z_axis), y_axis, z_axis], axis=1)


def rotation_error(target: np.ndarray, eef_quaternion: np.ndarray) -> np.ndarray:
    """float64[3]: world-frame rotation vector that turns the hand into the `target` matrix."""
    return rotation_vector(target @ rotation_matrix(eef_quaternion).T)


def osc_action(displacement: np.ndarray, rotation: np.ndarray, gripper: float) -> np.ndarray:
    """float32[7] action that moves the hand by `displacement` (m) and `rotation` (rotation vector, rad).

    The translation is scaled as a whole to stay within the controller's cube, so that the direction is kept.
    """
    translation = GAIN * displacement / METRES_PER_UNIT
    translation = translation / max(1.0, float(np.abs(translation).max()))
    turn = np.zeros(3)
    if np.linalg.norm(rotation) > ROTATION_DEADBAND:
        turn = np.clip(GAIN * rotation / RADIANS_PER_UNIT, -1, 1)
    return np.concatenate([translation, turn, [gripper]]).astype(np.float32)


def funnel(error: np.ndarray, height: float, tolerance: float, slope: float = 4.0) -> np.ndarray:
    """float64[3]: the displacement that approaches a point from above, for an `error` = point - present position.

    Outside `tolerance` (m, horizontal) the aim is `slope` times the excess above the point, at most `height`.
    Where the present position is far below the aim it rises before it moves sideways, so nothing is swept over.
    """
    excess = max(0.0, float(np.hypot(error[0], error[1])) - tolerance)
    rise = error[2] + min(height, slope * excess)
    slack = 0.03
    sideways = np.clip(2 - rise / slack, 0, 1)
    return np.array([error[0] * sideways, error[1] * sideways, rise])
