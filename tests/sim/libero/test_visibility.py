"""Projections are conservative: no point of a box that the camera sees lies outside the box's rectangle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.sim.libero.visibility import Camera, Mirror

RESOLUTION = 64
FIELD = np.tan(np.radians(22.5))
unit = st.floats(-1, 1, allow_nan=False)
vector = st.tuples(unit, unit, unit).map(np.array)


def looking_from(position: np.ndarray, forward: np.ndarray) -> Camera:
    forward = forward / np.linalg.norm(forward)
    side = np.cross(forward, [0.3, 0.4, 0.9])
    right = side / np.linalg.norm(side)
    axes = np.stack([right, np.cross(right, forward), forward])
    return Camera(position, axes, np.array([-FIELD, FIELD, -FIELD, FIELD]), 0.05, RESOLUTION)


def box(center: np.ndarray, half: np.ndarray) -> np.ndarray:
    signs = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij")).reshape(3, 8).T
    return center + signs * half


def pixels_of(camera: Camera, points: np.ndarray) -> np.ndarray:
    """float64[P, 2]: where visible points fall, by the textbook projection."""
    seen = (points - camera.position) @ camera.axes.T
    seen = seen[seen[:, 2] > camera.near]
    return (seen[:, :2] / seen[:, 2:] / FIELD + 1) / 2 * camera.resolution


@settings(max_examples=300, deadline=None)
@given(vector, vector.filter(lambda v: np.linalg.norm(v) > 0.1), vector, vector, st.integers(0, 2**31))
def test_rectangle_contains_every_visible_point(
    position: np.ndarray, forward: np.ndarray, center: np.ndarray, half: np.ndarray, seed: int
) -> None:
    if np.linalg.norm(np.cross(forward, [0.3, 0.4, 0.9])) < 1e-2:
        return
    camera = looking_from(2 * position, forward)
    half = np.abs(half) + 1e-3
    points = center + np.random.default_rng(seed).uniform(-1, 1, (200, 3)) * half
    x0, x1, y0, y1 = camera.rectangles(box(center, half)[None])[0]
    for column, row in pixels_of(camera, points):
        if 0 <= column < RESOLUTION and 0 <= row < RESOLUTION:
            assert x0 <= np.floor(column) < x1 and y0 <= np.floor(row) < y1


def test_boxes_outside_and_behind_are_empty() -> None:
    camera = looking_from(np.zeros(3), np.array([1.0, 0, 0]))
    half = np.full(3, 0.1)
    nowhere = np.full((8, 3), np.nan)
    rectangles = camera.rectangles(np.stack([box(np.array([-2.0, 0, 0]), half), box(np.array([1.0, 5, 0]), half), nowhere]))
    assert not rectangles.any()


def test_box_around_the_camera_covers_everything() -> None:
    camera = looking_from(np.zeros(3), np.array([1.0, 0, 0]))
    assert camera.rectangles(box(np.zeros(3), np.ones(3))[None])[0].tolist() == [0, RESOLUTION, 0, RESOLUTION]


def test_mirror_reflects_what_is_above_it() -> None:
    face = np.array([[-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, 1]], float)
    mirror = Mirror(np.array([0.0, 0, 1]), np.array([0.0, 0, 1]), face)
    above, below = box(np.array([0, 0, 2.0]), np.full(3, 0.5)), box(np.array([0, 0, 0.0]), np.full(3, 0.5))
    images = mirror.mirrored(np.stack([above, below]))
    assert np.allclose(images[0][:, 2], 2 - above[:, 2]) and np.allclose(images[0][:, :2], above[:, :2])
    assert np.isnan(images[1]).all()
    assert mirror.is_behind(looking_from(np.zeros(3), np.array([1.0, 0, 0])))
    assert not mirror.region(looking_from(np.array([0, 0, -3.0]), np.array([0, 0, 1.0]))).any()
    assert mirror.region(looking_from(np.array([0, 0, 9.0]), np.array([0, 0.01, -1.0]))).any()
