"""Pictures, rendered only when somebody looks, bit-identical to stock LIBERO's in the `exact` profile.

Stock cameras render at the substep at which observables sample, which is before it is known whether the picture will be
looked at (success or a preemption may end the chunk). So the poses a picture depends on are copied there (a few
microseconds), and pictures are drawn from the copy later.
"""

from __future__ import annotations

from typing import Literal

import mujoco
import numpy as np

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST
from vla_rl.sim.libero import egl
from vla_rl.sim.libero.scene import Scene

CAMERAS = {VIEW_AGENT: "agentview", VIEW_WRIST: "robot0_eye_in_hand"}
"""View -> camera of the model."""
POSES = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
"""Arrays of the simulation data that a picture depends on."""
MAX_GEOMS = 1000
"""Capacity of the abstract scene, as in robosuite."""


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
        self.snapshot_data = mujoco.MjData(model)
        self.abstract = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self.abstract.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = profile == "exact"
        self.options = mujoco.MjvOption()
        self.options.geomgroup[0] = 0  # collision geoms
        self.options.geomgroup[1] = 1  # visual geoms
        self.perturbation = mujoco.MjvPerturb()
        self.camera = mujoco.MjvCamera()
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self.camera_ids = {view: model.camera(name).id for view, name in CAMERAS.items()}
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._pairs = [(getattr(self.snapshot_data, name), getattr(scene.data, name)) for name in POSES]

    def snapshot(self) -> None:
        """Keep the poses of this moment for later pictures."""
        for kept, current in self._pairs:
            kept[:] = current

    def draw(self, view: str) -> np.ndarray:
        """uint8[H, W, 3]: the view at the last snapshot, RGB, rows bottom-up as OpenGL returns them."""
        self.camera.fixedcamid = self.camera_ids[view]
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        mujoco.mjv_updateScene(
            self.scene.model,
            self.snapshot_data,
            self.options,
            self.perturbation,
            self.camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self.abstract,
        )
        viewport = mujoco.MjrRect(0, 0, self.resolution, self.resolution)
        mujoco.mjr_render(viewport, self.abstract, self.context)
        picture = np.empty((self.resolution, self.resolution, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, viewport, self.context)
        return picture

    def close(self) -> None:
        """Free the GPU's (or llvmpipe's) copy of meshes and textures."""
        self.context.free()


def oriented(picture: np.ndarray, orientation: Orientation) -> np.ndarray:
    """uint8[H, W, 3], contiguous: a raw picture in the wanted orientation."""
    if orientation is Orientation.VERTICAL_FLIP:
        picture = picture[::-1]
    elif orientation is Orientation.ROTATED_180:
        picture = picture[::-1, ::-1]
    return np.ascontiguousarray(picture)
