"""Names and conventions of the HDF5 files: LIBERO's own layout, plus what LIBERO leaves undeclared.

    /data                     attrs: env_name, problem_info, env_args, bddl_file_name, macros_image_convention, num_demos, total,
                              alignment, format
    /data/demo_0              attrs: num_samples, init_state, spec, prompt, outcome, reason, frame_policy, frame_every, ...
        actions, action_labels, states, robot_states, rewards, dones, intervention          one row per control step
        obs/gripper_states, joint_states, ee_states, ee_pos, ee_ori                          one row per control step
        obs/frame_index, obs/agentview_rgb, obs/eye_in_hand_rgb                              one row per picture

Every observation row lies *before* the action of the same row. With `frame_policy` "dense" row i of the pictures belongs to
control step i; with "sparse" it belongs to control step `frame_index[i]`, a multiple of `frame_every`.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode, V views, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vla_rl.conventions import Conventions, Gripper, Orientation, Rotation
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST, Float32
from vla_rl.errors import UserError

FORMAT = "vla-rl episode 1"
"""Value of the attribute `format` of `/data`."""
ALIGNMENT = "observation before action"
"""Value of the attribute `alignment` of `/data`: the only alignment that is read."""
IMAGE_CONVENTION = "opengl"
"""Value of `macros_image_convention`: pictures are stored raw, rows bottom-up, as in LIBERO's own files."""
IMAGE_KEYS: Mapping[str, str] = {VIEW_AGENT: "agentview_rgb", VIEW_WRIST: "eye_in_hand_rgb"}
"""View -> dataset below `obs/`."""
LIBERO_ROBOT_STATE_DIM = 9
"""LIBERO's `robot_states`: gripper qpos (2), eef position (3), eef quaternion xyzw (4)."""
STATE_PARTS = ("ee_pos", "ee_ori", "gripper_states")
"""Arrays below `obs/` that, side by side, are `Observation.state`."""
DENSE, SPARSE = "dense", "sparse"
"""Values of the attribute `frame_policy`."""


class DatasetError(UserError):
    """A dataset file, or an episode to be written, that is not what the format promises."""


class StorageError(OSError):
    """Writing failed (disk full, quota, permissions); finished episodes are untouched."""


def reorient(images: np.ndarray, orientation: Orientation) -> np.ndarray:
    """Turn raw pictures [..., H, W, 3] into `orientation`, or back: each of these flips is its own inverse. A view, no copy."""
    if orientation is Orientation.RAW:
        return images
    if orientation is Orientation.VERTICAL_FLIP:
        return images[..., ::-1, :, :]
    return images[..., ::-1, ::-1, :]


def require_storable(conventions: Conventions) -> None:
    """Raise DatasetError unless LIBERO's layout can hold these conventions (any orientation can: it is undone)."""
    wanted = {"rotation": Rotation.AXIS_ANGLE_ROBOSUITE, "gripper": Gripper.CLOSE_POSITIVE}
    unlike = {name: value.value for name, value in wanted.items() if getattr(conventions, name) is not value}
    if unlike:
        raise DatasetError(
            f"LIBERO's layout stores {unlike}, the episode's conventions are {conventions.to_dict()}; convert the actions first"
        )


def quaternions_to_axis_angles(quaternions_N4: np.ndarray) -> np.ndarray:
    """float64[N, 3] from quaternions (xyzw), as robosuite 1.4 does it: angle in [0, 2 pi], the quaternion's sign kept.

    Uses `math.acos` row by row, because numpy's differs from it in the last bit and stored states must equal observed ones.
    """
    angles_N3 = np.zeros((len(quaternions_N4), 3))
    for row, (*axis, w) in enumerate(np.asarray(quaternions_N4, np.float64)):
        w = min(1.0, max(-1.0, w))
        length = np.sqrt(1.0 - w * w)
        if not math.isclose(length, 0.0):
            angles_N3[row] = np.asarray(axis) * 2.0 * math.acos(w) / length
    return angles_N3


def robot_observations(robot_states_NR: np.ndarray) -> dict[str, np.ndarray]:
    """LIBERO's per-step proprioception (float64, names below `obs/`) from `robot_states` of `ROBOT_STATE_DIM` columns."""
    gripper_N2, position_N3, quaternion_N4, joints_N7 = np.split(np.asarray(robot_states_NR, np.float64), (2, 5, 9), axis=1)
    orientation_N3 = quaternions_to_axis_angles(quaternion_N4)
    return {
        "gripper_states": gripper_N2,
        "joint_states": joints_N7,
        "ee_pos": position_N3,
        "ee_ori": orientation_N3,
        "ee_states": np.concatenate([position_N3, orientation_N3], axis=1),
    }


def observed_states(observations: Mapping[str, np.ndarray]) -> Float32:
    """float32[N, 8], `Observation.state` of every row, from the arrays of `robot_observations`."""
    return np.concatenate([observations[name] for name in STATE_PARTS], axis=1).astype(np.float32)
