"""Rotations against SciPy, actions against hand numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from vla_rl.sim.experts.controller import (
    finger_angle,
    funnel,
    half_turn_difference,
    osc_action,
    rotation_error,
    rotation_matrix,
    rotation_vector,
    straight_down,
)

POINTING_DOWN = np.array([1.0, 0.0, 0.0, 0.0])
"""Half a turn about x: the hand at LIBERO's initial pose, fingers along the world's y axis."""
ROUNDING = 1e-9
"""Double precision with room for a dozen operations."""

rotation_vectors = st.tuples(*[st.floats(-1.0, 1.0)] * 3).map(np.array)


@given(rotation_vectors)
def test_matrix_and_vector_agree_with_scipy(vector: np.ndarray) -> None:
    reference = Rotation.from_rotvec(vector)
    matrix = rotation_matrix(reference.as_quat())
    np.testing.assert_allclose(matrix, reference.as_matrix(), atol=ROUNDING)
    # Angles below 1e-9 are returned as none at all.
    np.testing.assert_allclose(rotation_vector(matrix), vector, atol=2e-9)


def test_a_hand_that_points_down_has_its_fingers_along_y() -> None:
    assert half_turn_difference(finger_angle(POINTING_DOWN), np.pi / 2) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("angle", "reference", "difference"), [(0.1, 0.0, 0.1), (np.pi, 0.0, 0.0), (3.0, 0.0, 3.0 - np.pi), (-2.0, 1.0, np.pi - 3.0)]
)
def test_half_a_turn_makes_no_difference(angle: float, reference: float, difference: float) -> None:
    assert half_turn_difference(angle, reference) == pytest.approx(difference)


@given(st.floats(-7.0, 7.0), st.floats(-1.0, 1.0))
def test_straight_down_is_reached_by_the_smaller_turn(angle: float, present_turn: float) -> None:
    present = (Rotation.from_rotvec([0, 0, present_turn]) * Rotation.from_quat(POINTING_DOWN)).as_quat()
    error = rotation_error(straight_down(angle, present), present)
    assert np.linalg.norm(error) <= np.pi / 2 + ROUNDING
    arrived = (Rotation.from_rotvec(error) * Rotation.from_quat(present)).as_quat()
    assert abs(half_turn_difference(angle, finger_angle(arrived))) < 1e-6


def test_action_is_gain_times_displacement_in_units_of_five_centimetres() -> None:
    action = osc_action(np.array([0.005, -0.01, 0.0]), np.array([0.0, 0.0, 0.1]), 1.0)
    np.testing.assert_allclose(action, [0.2, -0.4, 0.0, 0.0, 0.0, 0.4, 1.0], atol=1e-7)  # float32 rounding
    assert action.dtype == np.float32


def test_far_targets_saturate_and_keep_their_direction() -> None:
    np.testing.assert_allclose(osc_action(np.array([0.2, 0.1, -0.4]), np.zeros(3), -1.0)[:3], [0.5, 0.25, -1.0], atol=1e-7)


def test_small_orientation_errors_command_no_rotation() -> None:
    assert osc_action(np.zeros(3), np.array([0.0, 0.0, 0.039]), -1.0)[5] == 0.0


def test_funnel_rises_first_where_it_is_too_low() -> None:
    # 10 cm beside the point and level with it: 4 x (0.10 - 0.01) would be 36 cm up, capped at 10 cm, and no sideways motion yet.
    np.testing.assert_allclose(funnel(np.array([0.1, 0.0, 0.0]), height=0.1, tolerance=0.01), [0.0, 0.0, 0.1])


def test_funnel_goes_straight_where_it_is_high_enough_and_down_over_the_point() -> None:
    np.testing.assert_allclose(funnel(np.array([0.1, 0.0, -0.1]), height=0.1, tolerance=0.01), [0.1, 0.0, 0.0])
    np.testing.assert_allclose(funnel(np.array([0.01, 0.0, -0.1]), height=0.1, tolerance=0.01), [0.01, 0.0, -0.1])
    # 2 cm beside: the aim is 4 x (0.02 - 0.01) = 4 cm above the point.
    np.testing.assert_allclose(funnel(np.array([0.02, 0.0, -0.1]), height=0.1, tolerance=0.01), [0.02, 0.0, -0.06])
