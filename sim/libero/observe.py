"""What observations hold besides pictures: the lagged state, robot states, and simulator truth.

Stock observables sample once per control step, after the 24th of 25 substeps (`physics.OBSERVED_SUBSTEP`). There, poses
of bodies and sites are those of that substep's position stage, while joint positions have already been integrated.
`Proprioception` keeps what was seen at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from robosuite.utils.transform_utils import quat2axisangle  # pyright: ignore[reportMissingImports]

from vla_rl.sim.libero.scene import Scene


def xyzw(quat_wxyz: np.ndarray) -> np.ndarray:
    """Quaternion in robosuite's order from one in MuJoCo's."""
    return quat_wxyz[[1, 2, 3, 0]]


@dataclass(frozen=True)
class Proprioception:
    """The arm as stock observables show it for one control step."""

    eef_position: np.ndarray
    """float64[3], m."""
    eef_quat: np.ndarray
    """float64[4], xyzw."""
    gripper_qpos: np.ndarray
    """float64[2], m."""
    joint_position: np.ndarray
    """float64[7], rad."""

    @classmethod
    def sample(cls, scene: Scene) -> Proprioception:
        """Read it from the simulator now."""
        data = scene.data
        return cls(
            data.site_xpos[scene.eef_site].copy(),
            xyzw(data.xquat[scene.eef_body]),
            data.qpos[scene.gripper_qpos_ids],
            data.qpos[scene.joint_qpos_ids],
        )

    def state(self) -> np.ndarray:
        """float32[8]: end effector position, axis-angle (robosuite's, angle in [0, 2 pi]), gripper joint positions."""
        axis_angle = quat2axisangle(self.eef_quat.copy())  # it clips its argument in place
        return np.concatenate((self.eef_position, axis_angle, self.gripper_qpos)).astype(np.float32)

    def robot_state(self) -> np.ndarray:
        """float64[16]: gripper qpos, eef position, eef quaternion xyzw, joint positions."""
        return np.concatenate((self.gripper_qpos, self.eef_position, self.eef_quat, self.joint_position))


class Truth:
    """Simulator truth for actors that declare that they need it.

    Poses are those of the last position stage (2 ms old after a control step), the ones that success is judged by.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        env, names = scene.env, scene.env.sim.model
        self.bodies = {name: int(env.obj_body_id[name]) for name in (*env.objects_dict, *env.fixtures_dict) if name in env.obj_body_id}
        self.sites = {name: int(names.site_name2id(name)) for name in env.object_sites_dict}
        self.joints = {
            joint: int(names.get_joint_qpos_addr(joint))
            for thing in (*env.objects_dict.values(), *env.fixtures_dict.values())
            for joint in thing.joints
            if not isinstance(names.get_joint_qpos_addr(joint), tuple)
        }

    def read(self) -> dict[str, np.ndarray]:
        """`<body>_pos` (m), `<body>_quat` (xyzw), `site:<site>_pos`, `site:<site>_mat` (9), `joint:<joint>` (rad or m), `robot0_...`."""
        data, scene = self.scene.data, self.scene
        values = {
            "robot0_eef_pos": data.site_xpos[scene.eef_site].copy(),
            "robot0_eef_quat": xyzw(data.xquat[scene.eef_body]),
            "robot0_gripper_qpos": data.qpos[scene.gripper_qpos_ids],
        }
        for name, body in self.bodies.items():
            values[f"{name}_pos"] = data.xpos[body].copy()
            values[f"{name}_quat"] = xyzw(data.xquat[body])
        for name, site in self.sites.items():
            values[f"site:{name}_pos"] = data.site_xpos[site].copy()
            values[f"site:{name}_mat"] = data.site_xmat[site].copy()
        for name, address in self.joints.items():
            values[f"joint:{name}"] = data.qpos[address : address + 1].copy()
        return values
