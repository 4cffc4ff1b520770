"""One compiled LIBERO task: the stock simulation object, its arrays and its ids, kept over many episodes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np

from vla_rl.sim.libero import packaging
from vla_rl.sim.libero.tasks import Task

SUBSTEPS = 25
"""Simulation steps of 2 ms per control step (20 Hz)."""
BUILD_ATTEMPTS = 20
"""How often the constructor may fail to place its objects before that is an error."""


class SceneError(RuntimeError):
    """A scene cannot be built, placed or simulated."""


class Scene:
    """The stock problem object of one task, built without cameras, plus what the fast path looks up once.

    `env` is LIBERO's own `BDDLBaseDomain`; its samplers, models and ids are used, its `reset` and `step` are not.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.env = build_stock(task)
        self.model: mujoco.MjModel = self.env.sim.model._model
        self.data: mujoco.MjData = self.env.sim.data._data
        if self.model.opt.integrator != mujoco.mjtIntegrator.mjINT_EULER:
            raise SceneError(f"{task.name}: integrator {self.model.opt.integrator} is not Euler, which the exact substep assumes")
        self.init_states = task.init_states()
        self.property_samplers = list(self.env.object_property_initializers)
        self.base_body_pos = self.model.body_pos.copy()
        self.base_body_quat = self.model.body_quat.copy()
        self.base_site_rgba = self.model.site_rgba.copy()
        self.robot = self.env.robots[0]
        self.gripper_qpos_ids = np.array(self.robot._ref_gripper_joint_pos_indexes)
        self.joint_qpos_ids = np.array(self.robot._ref_joint_pos_indexes)
        self.eef_site = int(self.robot.eef_site_id)
        self.eef_body = int(self.env.sim.model.body_name2id(self.robot.robot_model.eef_name))
        self.has_visual_state = bool(self.env.visualization_sites_list)

    def update_visual_state(self) -> None:
        """Let burners and the like show their state; LIBERO does this after each step, after the step's pictures."""
        if self.has_visual_state:
            self.env._post_process()

    def state(self) -> np.ndarray:
        """float64[1 + nq + nv]: `[time, qpos, qvel]` now."""
        return np.concatenate(([self.data.time], self.data.qpos, self.data.qvel))

    def fixture_poses(self) -> dict[str, list[float]]:
        """Fixture name -> position (m, 3) and quaternion (wxyz, 4) of its root body in the model."""
        ids = {name: self.env.obj_body_id[name] for name in self.env.fixtures_dict}
        return {name: [*self.model.body_pos[body].tolist(), *self.model.body_quat[body].tolist()] for name, body in ids.items()}


def build_stock(task: Task, **overrides: Any) -> Any:
    """LIBERO's problem object for a task, with LIBERO's own settings, no cameras and no renderer unless overridden.

    Raises SceneError if objects cannot be placed within `BUILD_ATTEMPTS`.
    """
    import robosuite  # pyright: ignore[reportMissingImports]
    from robosuite.utils.errors import RandomizationError  # pyright: ignore[reportMissingImports]

    problem = packaging.bddl_parser().get_problem_info(str(task.bddl_path))["problem_name"]
    make = packaging.task_classes()[problem]
    settings = {
        "robots": ["Panda"],
        "controller_configs": robosuite.load_controller_config(default_controller="OSC_POSE"),
        "initialization_noise": None,
        "use_camera_obs": False,
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "control_freq": 20,
        "ignore_done": True,
    }
    for _ in range(BUILD_ATTEMPTS):
        with contextlib.suppress(RandomizationError), contextlib.redirect_stdout(io.StringIO()):
            return make(str(task.bddl_path), **(settings | overrides))
    raise SceneError(f"{task.suite} task {task.index}: objects could not be placed in {BUILD_ATTEMPTS} attempts")


@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Run with numpy's global generator seeded (LIBERO's samplers use nothing else), then put the old state back."""
    before = np.random.get_state()  # noqa: NPY002  the generator LIBERO uses
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
