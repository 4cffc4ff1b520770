"""Pictures, rendered only when somebody looks, bit-identical to stock LIBERO's in the `exact` profile.

Stock cameras render at the substep at which observables sample, which is before it is known whether the picture will be
looked at (success or a preemption may end the chunk). So the poses a picture depends on are copied there (a few
microseconds), and pictures are drawn from the copy later.

Drawing costs in proportion to the faces of the meshes, not to pixels, so the exact levers all leave faces out:
meshes outside the picture, the reflection pass where no reflection is seen, and, when the camera has not moved,
everything that touches no pixel that can have changed (`visibility.py` says why this is exact).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST
from vla_rl.sim.libero import egl
from vla_rl.sim.libero.scene import Scene
from vla_rl.sim.libero.visibility import Boxes, Camera, Mirror, boxes_of, covered, touching

CAMERAS = {VIEW_AGENT: "agentview", VIEW_WRIST: "robot0_eye_in_hand"}
"""View -> camera of the model."""
POSES = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
"""Arrays of the simulation data that a picture depends on."""
MAX_GEOMS = 1000
"""Capacity of the abstract scene, as in robosuite."""
PASS_COST = 12_000
"""Cost of one drawing pass besides its meshes, in faces (measured with llvmpipe)."""
GEOM = mujoco.mjtObj.mjOBJ_GEOM
MESH, BOX, PLANE, HIDDEN = (getattr(mujoco.mjtGeom, f"mjGEOM_{name}") for name in ("MESH", "BOX", "PLANE", "NONE"))


@dataclass
class _Drawn:
    """A finished picture, and what it was drawn from."""

    picture: np.ndarray
    geom_poses: np.ndarray
    """float32[ngeom, 12], the precision in which MuJoCo draws."""
    others: np.ndarray
    """float32: planes, visible sites, camera, lights and the reflective face, whose change redraws everything."""
    rectangles: np.ndarray
    """Main projections of the boxes."""
    reflections: np.ndarray
    """Mirrored projections of the boxes."""
    moved: np.ndarray
    """bool[N]: boxes whose geom moved since the picture before."""


class Renderer:
    """Draws a scene's cameras from a snapshot of its poses."""

    def __init__(self, scene: Scene, resolution: int, profile: Literal["exact", "fast"]) -> None:
        self.scene, self.resolution = scene, resolution
        model = scene.model
        egl.context()
        model.vis.global_.offwidth = max(resolution, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(resolution, model.vis.global_.offheight)
        if profile == "fast":
            model.vis.quality.offsamples = 0
        self.reflections = profile == "exact"
        self.snapshot_data = mujoco.MjData(model)
        self.abstract = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self.options = mujoco.MjvOption()
        self.options.geomgroup[0] = 0  # collision geoms
        self.options.geomgroup[1] = 1  # visual geoms
        self.perturbation = mujoco.MjvPerturb()
        self.camera = mujoco.MjvCamera()
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self.camera_ids = {view: model.camera(name).id for view, name in CAMERAS.items()}
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self.viewport = mujoco.MjrRect(0, 0, resolution, resolution)
        shown = np.flatnonzero((self.options.geomgroup[model.geom_group] == 1) & (model.geom_type != PLANE)).tolist()
        self.boxes = boxes_of(model, shown)
        self.whole = self.boxes.merged()
        self.faces = np.where(model.geom_type == MESH, model.mesh_facenum[np.maximum(model.geom_dataid, 0)], 0)
        self.drawn: dict[str, _Drawn] = {}
        self._pairs = [(getattr(self.snapshot_data, name), getattr(scene.data, name)) for name in POSES]

    def snapshot(self) -> None:
        """Keep the poses of this moment for later pictures."""
        for kept, current in self._pairs:
            kept[:] = current

    def draw(self, view: str) -> np.ndarray:
        """uint8[H, W, 3]: the view at the last snapshot, RGB, rows bottom-up as OpenGL returns them."""
        if self.scene.model.light_castshadow.any():
            return self.draw_plain(view)
        self._update(view)
        camera = Camera.of_scene(self.abstract, self.resolution)
        mirror = self._mirror(camera)
        face = np.zeros((self.resolution, self.resolution), bool) if mirror is None else mirror.region(camera)
        others = self._others(view, mirror)
        before = self.drawn.get(view)
        if before is not None and not np.array_equal(before.others, others):
            before = None
        drawn = self._project(camera, mirror, face, others, before)
        self._redraw(view, drawn, self._stale_pixels(before, drawn, face), face)
        self.drawn[view] = drawn
        return drawn.picture.copy()

    def draw_plain(self, view: str) -> np.ndarray:
        """uint8[H, W, 3]: as `draw`, with every geom and nothing reused; what `draw` must equal."""
        self._update(view)
        return self._render(self.reflections)

    def close(self) -> None:
        """Free the GPU's (or llvmpipe's) copy of meshes and textures."""
        self.context.free()

    def _update(self, view: str) -> None:
        self.camera.fixedcamid = self.camera_ids[view]
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            self.scene.model, self.snapshot_data, self.options, self.perturbation, self.camera, everything, self.abstract
        )

    def _redraw(self, view: str, drawn: _Drawn, stale: np.ndarray, face: np.ndarray) -> None:
        """Replace the stale pixels: those outside the reflective face without, those inside with the reflection pass."""
        plain, mirrored = stale & ~face, stale & face
        plain_boxes = touching(drawn.rectangles, plain)
        mirrored_boxes = touching(drawn.rectangles, mirrored) | touching(drawn.reflections, mirrored)
        apart = self._cost(plain_boxes) + 2 * self._cost(mirrored_boxes)
        together = 2 * self._cost(plain_boxes | mirrored_boxes)
        if mirrored.any() and together < apart:
            plain, mirrored, mirrored_boxes = np.zeros_like(plain), stale, plain_boxes | mirrored_boxes
        for pixels, boxes, reflect in ((plain, plain_boxes, False), (mirrored, mirrored_boxes, True)):
            if pixels.any():
                self._update(view)
                self._show_only(boxes)
                drawn.picture[pixels] = self._render(reflect)[pixels]

    def _show_only(self, wanted_N: np.ndarray) -> None:
        """Hide the meshes none of whose boxes is wanted (bool[N])."""
        wanted = set(self.boxes.geom_N[wanted_N].tolist())
        for index in range(self.abstract.ngeom):
            geom = self.abstract.geoms[index]
            if geom.type == MESH and geom.objtype == GEOM and geom.objid not in wanted:
                geom.type = HIDDEN

    def _render(self, reflect: bool) -> np.ndarray:
        self.abstract.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = reflect
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        mujoco.mjr_render(self.viewport, self.abstract, self.context)
        picture = np.empty((self.resolution, self.resolution, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, self.viewport, self.context)
        return picture

    def _project(self, camera: Camera, mirror: Mirror | None, face: np.ndarray, others: np.ndarray, before: _Drawn | None) -> _Drawn:
        """A picture to be drawn: what geoms cover, computed for those that moved since the picture `before`."""
        data, resolution = self.snapshot_data, self.resolution
        poses = np.concatenate([data.geom_xpos, data.geom_xmat], 1).astype(np.float32)
        if before is None:
            moved = np.ones(len(poses), bool)
            picture = np.zeros((resolution, resolution, 3), np.uint8)
            rectangles, reflections = np.zeros((2, len(self.boxes.geom_N), 4), np.int64)
        else:
            moved = (before.geom_poses != poses).any(1)
            picture, rectangles, reflections = before.picture.copy(), before.rectangles.copy(), before.reflections.copy()
        self._update_rectangles(rectangles, camera, None, np.ones_like(face), moved)
        if face.any():
            self._update_rectangles(reflections, camera, mirror, face, moved)
        return _Drawn(picture, poses, others, rectangles, reflections, moved[self.boxes.geom_N])

    def _update_rectangles(
        self, rectangles: np.ndarray, camera: Camera, mirror: Mirror | None, pixels: np.ndarray, moved: np.ndarray
    ) -> None:
        """Project the boxes of moved geoms, in place; boxes of geoms that as a whole touch none of the pixels are left empty."""
        positions, rotations = self.snapshot_data.geom_xpos, self.snapshot_data.geom_xmat

        def project(boxes: Boxes) -> np.ndarray:
            corners = boxes.placed(positions, rotations)
            return camera.rectangles(corners if mirror is None else mirror.mirrored(corners))

        near = np.zeros(len(moved), bool)
        near[self.whole.geom_N] = touching(project(self.whole), pixels)
        rectangles[moved[self.boxes.geom_N]] = 0
        chosen = (moved & near)[self.boxes.geom_N]
        rectangles[chosen] = project(self.boxes.subset(chosen))

    def _stale_pixels(self, before: _Drawn | None, drawn: _Drawn, face: np.ndarray) -> np.ndarray:
        """bool[H, W]: pixels that may differ from the picture before."""
        if before is None:
            return np.ones_like(face)
        moved = drawn.moved
        stale = covered(np.concatenate([before.rectangles[moved], drawn.rectangles[moved]]), self.resolution)
        reflected = covered(np.concatenate([before.reflections[moved], drawn.reflections[moved]]), self.resolution)
        return stale | (reflected & face)

    def _cost(self, wanted_N: np.ndarray) -> int:
        """Of drawing the geoms of the wanted boxes once, in faces."""
        geoms = np.unique(self.boxes.geom_N[wanted_N])
        return PASS_COST + int(self.faces[geoms].sum()) if len(geoms) else 0

    def _others(self, view: str, mirror: Mirror | None) -> np.ndarray:
        data, camera = self.snapshot_data, self.camera_ids[view]
        planes = self.scene.model.geom_type == PLANE
        colours = self.scene.model.site_rgba
        sites = colours[:, 3] > 0  # others are not drawn
        parts = (
            data.geom_xpos[planes],
            data.geom_xmat[planes],
            colours[sites],
            data.site_xpos[sites],
            data.site_xmat[sites],
            data.cam_xpos[camera],
            data.cam_xmat[camera],
            data.light_xpos,
            data.light_xdir,
            *(() if mirror is None else (mirror.center, mirror.normal)),
        )
        return np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def _mirror(self, camera: Camera) -> Mirror | None:
        """The face MuJoCo reflects in: the first opaque box or plane with reflectance (a plane seen from behind is transparent)."""
        if not self.reflections:
            return None
        for index in range(self.abstract.ngeom):
            geom = self.abstract.geoms[index]
            if geom.reflectance > 0 and geom.type in (PLANE, BOX) and geom.rgba[3] >= 0.995:
                mirror = Mirror.of_geom(geom)
                if geom.type == BOX or not mirror.is_behind(camera):
                    return mirror
        return None


def oriented(picture: np.ndarray, orientation: Orientation) -> np.ndarray:
    """uint8[H, W, 3], contiguous: a raw picture in the wanted orientation."""
    if orientation is Orientation.VERTICAL_FLIP:
        picture = picture[::-1]
    elif orientation is Orientation.ROTATED_180:
        picture = picture[::-1, ::-1]
    return np.ascontiguousarray(picture)
