"""Which pixels a geom can touch: what makes it exact to leave geoms out of a picture.

A sample of a picture depends only on the geoms whose projection covers it (LIBERO's lights cast no shadows), plus, inside
the one reflective face that MuJoCo draws, on geoms whose mirror image covers it. Everything here is conservative:
rectangles are grown by `PADDING` pixels, and a box that reaches behind the camera counts as covering the whole picture.

Shape legend: N boxes, 8 corners, 3 coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

PADDING = 1.5
"""Pixels by which projections are grown: one for partly covered pixels, the rest for float32 rounding on the GPU."""

RUN = 128
"""Consecutive triangles of a mesh that share a box; meshes in file order are coherent enough that it is small."""


@dataclass(frozen=True)
class Camera:
    """A perspective camera and the picture it fills."""

    position: np.ndarray
    axes: np.ndarray
    """float64[3, 3]: rows right, up, forward."""
    bounds: np.ndarray
    """float64[4]: left, right, bottom, top of the near rectangle, over its distance."""
    near: float
    resolution: int

    @classmethod
    def of_scene(cls, abstract: mujoco.MjvScene, resolution: int) -> Camera:
        """The camera of an abstract scene; the mean of its two eyes, as MuJoCo draws a mono picture."""
        left, right = abstract.camera[0], abstract.camera[1]

        def mean(name: str) -> np.ndarray:
            return (np.asarray(getattr(left, name), np.float64) + np.asarray(getattr(right, name), np.float64)) / 2

        forward = mean("forward") / np.linalg.norm(mean("forward"))
        up = mean("up") / np.linalg.norm(mean("up"))
        near, bottom, top, center = (float(mean(name)) for name in ("frustum_near", "frustum_bottom", "frustum_top", "frustum_center"))
        half_width = float(mean("frustum_width")) or 0.5 * (top - bottom)
        bounds = np.array([center - half_width, center + half_width, bottom, top]) / near
        return cls(mean("pos"), np.stack([np.cross(forward, up), up, forward]), bounds, near, resolution)

    def rectangles(self, corners_N83: np.ndarray) -> np.ndarray:
        """int64[N, 4]: half-open pixel ranges x0, x1, y0, y1 that contain each box's projection; empty where x0 >= x1.

        Row y = 0 is the bottom row, as OpenGL returns pictures. Boxes of NaN are nowhere.
        """
        seen = (corners_N83 - self.position) @ self.axes.T
        x, y, z = seen[..., 0], seen[..., 1], seen[..., 2]
        left, right, bottom, top = self.bounds
        outside = (x < left * z).all(1) | (x > right * z).all(1) | (y < bottom * z).all(1) | (y > top * z).all(1)
        outside |= (z < self.near).all(1) | np.isnan(z).any(1)
        behind = (z < self.near).any(1)
        depth = np.maximum(z, self.near)
        columns = (x / depth - left) / (right - left) * self.resolution
        rows = (y / depth - bottom) / (top - bottom) * self.resolution
        low = np.floor(np.stack([columns.min(1), rows.min(1)], 1) - PADDING)
        high = np.ceil(np.stack([columns.max(1), rows.max(1)], 1) + PADDING)
        low[behind], high[behind] = 0, self.resolution
        low, high = np.clip(low, 0, self.resolution), np.clip(high, 0, self.resolution)
        low[outside] = high[outside] = 0
        return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], 1).astype(np.int64)


@dataclass(frozen=True)
class Boxes:
    """Boxes that contain the visible geoms of a model, in their geoms' frames."""

    geom_N: np.ndarray
    """int64[N]: the geom each box belongs to."""
    corners_N83: np.ndarray
    """float64[N, 8, 3]: corners, m."""

    def placed(self, positions: np.ndarray, rotations: np.ndarray) -> np.ndarray:
        """float64[N, 8, 3]: corners in the world, for geoms at `geom_xpos` and `geom_xmat`."""
        matrices_N33 = rotations.reshape(-1, 3, 3)[self.geom_N]
        return self.corners_N83 @ matrices_N33.transpose(0, 2, 1) + positions[self.geom_N][:, None]

    def subset(self, chosen_N: np.ndarray) -> Boxes:
        """The chosen boxes (bool[N])."""
        return Boxes(self.geom_N[chosen_N], self.corners_N83[chosen_N])

    def merged(self) -> Boxes:
        """One box per geom, around all of its boxes."""
        geoms, starts = np.unique(self.geom_N, return_index=True)
        low = np.minimum.reduceat(self.corners_N83.min(1), starts)
        high = np.maximum.reduceat(self.corners_N83.max(1), starts)
        return Boxes(geoms, box_corners(low, high))


def box_corners(low_N3: np.ndarray, high_N3: np.ndarray) -> np.ndarray:
    """float64[N, 8, 3]: corners of boxes from their lowest and highest points."""
    choice = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1], indexing="ij"), -1).reshape(8, 3).astype(bool)
    return np.where(choice, high_N3[:, None], low_N3[:, None])


def boxes_of(model: mujoco.MjModel, geoms: list[int]) -> Boxes:
    """Boxes around the given geoms: one per run of a mesh, one for any other shape; a geom's boxes are neighbours, in order."""
    owners: list[np.ndarray] = [np.zeros(0, np.int64)]
    corners: list[np.ndarray] = [np.zeros((0, 8, 3))]
    for geom in geoms:
        low, high = _bounds(model, geom)
        corners.append(box_corners(low, high))
        owners.append(np.full(len(low), geom, np.int64))
    return Boxes(np.concatenate(owners), np.concatenate(corners))


def _bounds(model: mujoco.MjModel, geom: int) -> tuple[np.ndarray, np.ndarray]:
    if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
        return _run_bounds(model, int(model.geom_dataid[geom]))
    center, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
    return (center - half)[None], (center + half)[None]


def _run_bounds(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[runs, 3] twice: lowest and highest corner of each run's vertices, in the mesh's frame."""
    faces = model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]
    triangles_F33 = model.mesh_vert[model.mesh_vertadr[mesh] :][faces].astype(np.float64)
    starts = np.arange(0, len(triangles_F33), RUN)
    return np.minimum.reduceat(triangles_F33.min(1), starts), np.maximum.reduceat(triangles_F33.max(1), starts)


def covered(rectangles_N4: np.ndarray, resolution: int) -> np.ndarray:
    """bool[H, W]: pixels in any of the rectangles."""
    steps = np.zeros((resolution + 1, resolution + 1), np.int64)
    x0, x1, y0, y1 = rectangles_N4.T
    for rows, columns, sign in ((y0, x0, 1), (y1, x1, 1), (y0, x1, -1), (y1, x0, -1)):
        np.add.at(steps, (rows, columns), sign)
    return steps.cumsum(0).cumsum(1)[:-1, :-1] > 0


def touching(rectangles_N4: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """bool[N]: rectangles that hold any of the pixels (bool[H, W])."""
    counts = np.zeros((len(pixels) + 1, len(pixels) + 1), np.int64)
    counts[1:, 1:] = pixels.cumsum(0).cumsum(1)
    x0, x1, y0, y1 = rectangles_N4.T
    return counts[y1, x1] - counts[y0, x1] - counts[y1, x0] + counts[y0, x0] > 0


@dataclass(frozen=True)
class Mirror:
    """The face of the one geom in which MuJoCo draws a reflection."""

    center: np.ndarray
    normal: np.ndarray
    corners_43: np.ndarray | None
    """float64[4, 3]: the face; None if the plane is infinite."""

    @classmethod
    def of_geom(cls, geom: mujoco.MjvGeom) -> Mirror:
        """The upper side of a box, or a plane."""
        matrix, size = np.asarray(geom.mat, np.float64).reshape(3, 3), np.asarray(geom.size, np.float64)
        center = np.asarray(geom.pos, np.float64)
        if geom.type == mujoco.mjtGeom.mjGEOM_BOX:
            center = center + size[2] * matrix[:, 2]
        corners = None
        if size[0] > 0 and size[1] > 0:
            signs = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
            corners = center + signs[:, :1] * size[0] * matrix[:, 0] + signs[:, 1:] * size[1] * matrix[:, 1]
        return cls(center, matrix[:, 2], corners)

    def is_behind(self, camera: Camera) -> bool:
        """Whether the camera sees the face from its back, where MuJoCo draws no reflection."""
        return float((camera.position - self.center) @ self.normal) < 0

    def region(self, camera: Camera) -> np.ndarray:
        """bool[H, W]: pixels that the reflection can touch."""
        size = camera.resolution
        region = np.zeros((size, size), bool)
        if self.is_behind(camera):
            return region
        if self.corners_43 is None:
            return ~region
        x0, x1, y0, y1 = camera.rectangles(np.repeat(self.corners_43, 2, 0)[None])[0]
        region[y0:y1, x0:x1] = True
        return region

    def mirrored(self, corners_N83: np.ndarray) -> np.ndarray:
        """float64[N, 8, 3]: the boxes' mirror images; NaN for boxes wholly below the face, which it does not reflect."""
        heights = (corners_N83 - self.center) @ self.normal
        images = corners_N83 - 2 * heights[..., None] * self.normal
        images[(heights < -1e-4).all(1)] = np.nan
        return images
