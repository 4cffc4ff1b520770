"""The exact fast control step: stock robosuite's numbers with one position and velocity stage per substep.

Stock robosuite runs three full forward passes per substep: before the controller, inside it, and in `mj_step`.
Position and velocity do not change between them, so only actuation, acceleration and the constraint solver have to run
again (`mj_forwardSkip(mjSTAGE_VEL)`). The solver itself must run three times: each solve starts from the previous
one's result, and one solve instead of three differs by 1e-14 after a step and by 1e-5 after sixty.

Array operations are written as in robosuite 1.4 (same expressions, same memory layout), because BLAS results depend on
the layout in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import mujoco
import numpy as np
from robosuite.utils.control_utils import (  # pyright: ignore[reportMissingImports]
    nullspace_torques,
    opspace_matrices,
    orientation_error,
    set_goal_orientation,
)

from vla_rl.sim.libero.scene import SUBSTEPS, Scene, SceneError

STAGE_NONE = int(mujoco.mjtStage.mjSTAGE_NONE)
STAGE_VEL = int(mujoco.mjtStage.mjSTAGE_VEL)
OBSERVED_SUBSTEP = SUBSTEPS - 1
"""The substep after which stock observables sample once `set_init_state` has forced a second update: 24 of 25."""
BAD_STATE_WARNINGS = (
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
)


@dataclass
class ArmState:
    """What the controller read from the simulator the last time it looked."""

    position: np.ndarray
    rotation: np.ndarray
    linear_velocity: np.ndarray
    angular_velocity: np.ndarray
    joint_position: np.ndarray
    joint_velocity: np.ndarray
    jacobian_position: np.ndarray
    jacobian_rotation: np.ndarray
    jacobian: np.ndarray
    mass_matrix: np.ndarray


class OperationalSpace:
    """Operational-space control of the arm and the gripper's position command, bit-equal to robosuite 1.4's.

    Source of the formulas: Khatib 1987, as in `robosuite/controllers/osc.py` (fixed impedance, delta pose, decoupled).
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        stock = scene.robot.controller
        self.qpos_ids, self.qvel_ids = stock.qpos_index, stock.qvel_index
        self.kp, self.kd = stock.kp, stock.kd
        self.input_min, self.input_max = stock.input_min, stock.input_max
        self.scale = abs(stock.output_max - stock.output_min) / abs(stock.input_max - stock.input_min)
        self.output_center = (stock.output_max + stock.output_min) / 2.0
        self.input_center = (stock.input_max + stock.input_min) / 2.0
        self.torque_low, self.torque_high = (limit.copy() for limit in scene.robot.torque_limits)
        self.arm_actuators = np.array(scene.robot._ref_joint_actuator_indexes)
        self.gripper_actuators = [scene.env.sim.model.actuator_name2id(name) for name in scene.robot.gripper.actuators]
        ranges = scene.model.actuator_ctrlrange[self.gripper_actuators]
        self.gripper_bias = 0.5 * (ranges[:, 1] + ranges[:, 0])
        self.gripper_weight = 0.5 * (ranges[:, 1] - ranges[:, 0])
        self.gripper_speed = np.array([-1.0, 1.0]) * scene.robot.gripper.speed
        self._jacobian_position = np.zeros((3, scene.model.nv))
        self._jacobian_rotation = np.zeros((3, scene.model.nv))
        self._mass = np.zeros((scene.model.nv, scene.model.nv))
        self.restart()

    def restart(self) -> None:
        """Take over the stock controller that LIBERO's reset has just made: goals, rest posture, and its first reading.

        The first control step uses that reading (robosuite's `new_update` flag), which was made before objects were placed.
        """
        stock = self.scene.robot.controller
        self.goal_position, self.goal_rotation = stock.goal_pos, stock.goal_ori
        self.rest_posture = stock.initial_joint
        self.gripper_action = np.array(self.scene.robot.gripper.current_action)
        self.arm = ArmState(
            stock.ee_pos,
            stock.ee_ori_mat,
            stock.ee_pos_vel,
            stock.ee_ori_vel,
            stock.joint_pos,
            stock.joint_vel,
            stock.J_pos,
            stock.J_ori,
            stock.J_full,
            stock.mass_matrix,
        )
        self.is_fresh = not stock.new_update

    def set_goal(self, arm_action: np.ndarray) -> None:
        """New pose goal from a delta action in [-1, 1]; a zero rotation keeps the previous orientation goal."""
        self._read()
        clipped = np.clip(arm_action, self.input_min, self.input_max)
        delta = (clipped - self.input_center) * self.scale + self.output_center
        if not all(math.isclose(value, 0.0) for value in delta[3:]):
            self.goal_rotation = set_goal_orientation(delta[3:], self.arm.rotation)
        self.goal_position = self.arm.position + delta[:3]

    def apply(self, gripper_action: float) -> None:
        """Write this substep's torques and gripper command into `data.ctrl`."""
        self._read()
        self.is_fresh = False
        ctrl = self.scene.data.ctrl
        torques = np.clip(self._torques(), self.torque_low, self.torque_high)
        self.gripper_action = np.clip(self.gripper_action + self.gripper_speed * np.sign(gripper_action), -1.0, 1.0)
        ctrl[self.gripper_actuators] = self.gripper_bias + self.gripper_weight * self.gripper_action
        ctrl[self.arm_actuators] = torques

    def _torques(self) -> np.ndarray:
        arm = self.arm
        rotation_error = orientation_error(np.array(self.goal_rotation), arm.rotation)
        position_error = self.goal_position - arm.position
        force = np.multiply(position_error, self.kp[0:3]) + np.multiply(-arm.linear_velocity, self.kd[0:3])
        torque = np.multiply(rotation_error, self.kp[3:6]) + np.multiply(-arm.angular_velocity, self.kd[3:6])
        _, lambda_position, lambda_rotation, nullspace = opspace_matrices(
            arm.mass_matrix, arm.jacobian, arm.jacobian_position, arm.jacobian_rotation
        )
        wrench = np.concatenate([np.dot(lambda_position, force), np.dot(lambda_rotation, torque)])
        torques = np.dot(arm.jacobian.T, wrench) + self.scene.data.qfrc_bias[self.qvel_ids]
        torques += nullspace_torques(arm.mass_matrix, nullspace, self.rest_posture, arm.joint_position, arm.joint_velocity)
        return torques

    def _read(self) -> None:
        if self.is_fresh:
            return
        model, data = self.scene.model, self.scene.data
        mujoco.mj_forwardSkip(model, data, STAGE_VEL, 1)
        jacobian_position, jacobian_rotation = self._jacobian_position, self._jacobian_rotation
        mujoco.mj_jacSite(model, data, jacobian_position, jacobian_rotation, self.scene.eef_site)
        mujoco.mj_fullM(model, self._mass, data.qM)
        arm_jacobian_position = jacobian_position[:, self.qvel_ids]
        arm_jacobian_rotation = jacobian_rotation[:, self.qvel_ids]
        self.arm = ArmState(
            np.array(data.site_xpos[self.scene.eef_site]),
            np.array(data.site_xmat[self.scene.eef_site].reshape([3, 3])),
            np.dot(jacobian_position, data.qvel),
            np.dot(jacobian_rotation, data.qvel),
            data.qpos[self.qpos_ids],
            data.qvel[self.qvel_ids],
            arm_jacobian_position,
            arm_jacobian_rotation,
            np.vstack([arm_jacobian_position, arm_jacobian_rotation]),
            self._mass[self.qvel_ids, :][:, self.qvel_ids],
        )
        self.is_fresh = True


@dataclass
class Physics:
    """Advances a scene by control steps."""

    scene: Scene
    controller: OperationalSpace = field(init=False)

    def __post_init__(self) -> None:
        self.controller = OperationalSpace(self.scene)

    def step(self, action_A: np.ndarray, observe: Callable[[], None]) -> None:
        """One control step of `SUBSTEPS` substeps; `observe` is called where stock observables sample.

        action_A: float64[7], environment units. Raises SceneError if the simulation diverges.
        """
        model, data, controller = self.scene.model, self.scene.data, self.controller
        for substep in range(1, SUBSTEPS + 1):
            mujoco.mj_forwardSkip(model, data, STAGE_NONE, 1)
            if substep == 1:
                controller.set_goal(action_A[:6])
            controller.apply(action_A[6])
            mujoco.mj_checkPos(model, data)
            mujoco.mj_checkVel(model, data)
            mujoco.mj_forwardSkip(model, data, STAGE_VEL, 1)
            mujoco.mj_checkAcc(model, data)
            mujoco.mj_Euler(model, data)
            if substep == OBSERVED_SUBSTEP:
                observe()
        self._check()

    def _check(self) -> None:
        """Stock MuJoCo silently resets a diverged simulation; here that is an error."""
        bad = [mujoco.mjtWarning(kind).name for kind in BAD_STATE_WARNINGS if self.scene.data.warning[kind].number]
        if bad:
            raise SceneError(f"{self.scene.task.name}: the simulation diverged at {self.scene.data.time:.3f} s ({', '.join(bad)})")
