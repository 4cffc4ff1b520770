"""Projections are conservative: no point of a box that the camera sees lies outside the box's rectangle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.sim.libero.visibility import Boxes, Camera, Mirror, box_corners, covered, touching

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


ranges = st.tuples(st.integers(0, RESOLUTION), st.integers(0, RESOLUTION)).map(sorted)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ranges, ranges).map(lambda pair: [*pair[0], *pair[1]]), max_size=12), st.integers(0, 2**31))
def test_masks_equal_slow_loops(rectangles: list[list[int]], seed: int) -> None:
    pixels = np.random.default_rng(seed).random((RESOLUTION, RESOLUTION)) < 0.002
    mask, holds = np.zeros_like(pixels), []
    for x0, x1, y0, y1 in rectangles:
        mask[y0:y1, x0:x1] = True
        holds.append(bool(pixels[y0:y1, x0:x1].any()))
    array = np.array(rectangles, np.int64).reshape(-1, 4)
    assert np.array_equal(covered(array, RESOLUTION), mask)
    assert touching(array, pixels).tolist() == holds


def test_merged_boxes_hold_their_parts() -> None:
    low = np.random.default_rng(0).uniform(-1, 0, (5, 3))
    boxes = Boxes(np.array([2, 2, 7, 9, 9]), box_corners(low, low + 0.5))
    merged = boxes.merged()
    assert merged.geom_N.tolist() == [2, 7, 9]
    assert np.allclose(merged.corners_N83[0].min(0), low[:2].min(0)) and np.allclose(merged.corners_N83[0].max(0), low[:2].max(0) + 0.5)
    assert np.array_equal(boxes.subset(boxes.geom_N == 9).corners_N83, boxes.corners_N83[3:])
