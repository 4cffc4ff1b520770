"""Meshes as runs of consecutive triangles, so that a picture draws only the runs it needs.

MuJoCo keeps one OpenGL display list per mesh and calls it by number. Here each mesh's list is replaced by one that calls
the wanted runs in their original order: what reaches the screen is the original sequence of triangles, less some that
touch no wanted pixel. Calling many short lists costs no more than calling one long one.

Meshes without texture coordinates stay as they are and are drawn whole: MuJoCo gives their sharp corners normals that it
computes in single precision, which could not be repeated here bit for bit with certainty.
"""

from __future__ import annotations

import mujoco
import numpy as np
from OpenGL import GL

RUN = 128
"""Triangles per run. Meshes in file order are coherent enough that such a run is small."""


class MeshLists:
    """Replaces the display lists of some meshes of a rendering context, which must be current."""

    def __init__(self, model: mujoco.MjModel, context: mujoco.MjrContext, meshes: set[int]) -> None:
        textured = sorted(mesh for mesh in meshes if model.mesh_texcoordadr[mesh] >= 0)
        self.whole_list = {mesh: context.baseMesh + 2 * mesh for mesh in textured}
        self.runs = {mesh: _compile_runs(model, mesh) for mesh in textured}
        self.shown: dict[int, np.ndarray] = {}
        self.show_all()

    def show_all(self) -> None:
        """Draw every mesh whole."""
        for mesh, runs in self.runs.items():
            self.show(mesh, np.ones(len(runs), bool))

    def show(self, mesh: int, wanted: np.ndarray) -> None:
        """Draw only the wanted runs of a mesh (bool[number of runs]); an untextured mesh stays whole."""
        if mesh not in self.runs or (mesh in self.shown and np.array_equal(self.shown[mesh], wanted)):
            return
        chosen = np.ascontiguousarray(self.runs[mesh][wanted])
        GL.glNewList(self.whole_list[mesh], GL.GL_COMPILE)
        if len(chosen):
            GL.glCallLists(len(chosen), GL.GL_UNSIGNED_INT, chosen)
        GL.glEndList()
        self.shown[mesh] = wanted.copy()

    def close(self) -> None:
        """Free the runs; the context frees the lists that called them."""
        for runs in self.runs.values():
            GL.glDeleteLists(int(runs[0]), len(runs))
        self.runs = {}


def run_bounds(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[runs, 3] twice: lowest and highest corner of each run's vertices, in the mesh's frame."""
    triangles_F33 = _corners(model, mesh).reshape(-1, 3, 3).astype(np.float64)
    starts = np.arange(0, len(triangles_F33), RUN)
    low, high = np.minimum.reduceat(triangles_F33.min(1), starts), np.maximum.reduceat(triangles_F33.max(1), starts)
    return low, high


def _corners(model: mujoco.MjModel, mesh: int) -> np.ndarray:
    """float32[3 * faces, 3]: vertices in drawing order."""
    faces = model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]
    return np.ascontiguousarray(model.mesh_vert[model.mesh_vertadr[mesh] :][faces.ravel()])


def _compile_runs(model: mujoco.MjModel, mesh: int) -> np.ndarray:
    """uint32[runs]: new display lists with the vertices, normals and texture coordinates that MuJoCo draws for a textured mesh."""
    first, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    vertices = _corners(model, mesh)
    normals = np.ascontiguousarray(model.mesh_normal[model.mesh_normaladr[mesh] :][model.mesh_facenormal[first:][:count].ravel()])
    coordinates = model.mesh_texcoord[model.mesh_texcoordadr[mesh] :][model.mesh_facetexcoord[first:][:count].ravel()]
    coordinates = np.ascontiguousarray(coordinates)
    states = (GL.GL_VERTEX_ARRAY, GL.GL_NORMAL_ARRAY, GL.GL_TEXTURE_COORD_ARRAY)
    for state in states:
        GL.glEnableClientState(state)
    GL.glVertexPointer(3, GL.GL_FLOAT, 0, vertices)
    GL.glNormalPointer(GL.GL_FLOAT, 0, normals)
    GL.glTexCoordPointer(2, GL.GL_FLOAT, 0, coordinates)
    starts = range(0, len(vertices), 3 * RUN)
    lists = int(GL.glGenLists(len(starts)))  # pyright: ignore[reportArgumentType]
    for number, start in enumerate(starts):
        GL.glNewList(lists + number, GL.GL_COMPILE)
        GL.glDrawArrays(GL.GL_TRIANGLES, start, min(3 * RUN, len(vertices) - start))
        GL.glEndList()
    for state in states:
        GL.glDisableClientState(state)
    return np.arange(lists, lists + len(starts), dtype=np.uint32)
