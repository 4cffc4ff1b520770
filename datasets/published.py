"""Import of LIBERO-style HDF5 files that declare no alignment: measured, corrected, and written in this project's format.

LIBERO's own files record observations, pictures included, *after* `actions[j]` although `states[j]` lies before it
(`create_dataset.py`; LIBERO #54). OpenVLA's regenerated files have the same names and are paired correctly. Neither says so,
so the offset is measured: `states[j]` holds the arm's joint positions, and so does `obs/joint_states`, one of them later.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets import schema
from vla_rl.datasets.files import array, attribute, open_file, subgroup
from vla_rl.datasets.hdf5 import demo_names
from vla_rl.datasets.samples import require_motion
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome

ARM_IN_STATES = slice(1, 8)
"""Columns of `states` with the arm's seven joint positions: after the time, before the gripper and the objects."""
SAME_ANGLE = 1e-6
"""Axis-angles of one orientation computed twice differ by rounding, 1e-15 rad; other orientations by far more (rad)."""
CLEARLY = 3.0
"""An offset must fit this many times better than the other one. The arm moves up to 0.1 rad in a step, a lag of 2 ms a tenth of it."""


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    episodes: int
    """Episodes written."""
    late_by: int
    """Control steps that the file's observations were late: 1 as LIBERO publishes them, 0 as OpenVLA regenerates them."""


def import_published(path: str | Path, store: EpisodeStore, suite: str, task: int, prompt: str = "") -> Imported:
    """Convert every demo of `path` into an episode of `store`, numbered from the store's next free number, pictures dense.

    Late observations are moved to the action they precede; each demo then loses its first action, whose observation was
    never recorded. An empty `prompt` takes the file's `language_instruction`. Demo i becomes `sampled:i`, which names it and
    cannot restore its scene: published files do not hold the seed.
    Raises DatasetError, before anything is written, for a demo of no-ops, an undecidable alignment or a missing array,
    naming file, demo and array.
    """
    with open_file(path) as file:
        data = subgroup(file, "data")
        if "alignment" in data.attrs:
            raise DatasetError(f"{path}: declares its alignment, so it is this project's own format and needs no import")
        names = demo_names(data)
        prompt = prompt or _instruction(data)
        late_by = measure_lateness(data, names)
        for name in names:
            require_motion(array(data, f"{name}/actions"), f"{path}:{name}", f"{suite} task {task} ({prompt!r})")
        number = max(store.numbers(), default=-1) + 1
        for offset, name in enumerate(names):
            spec = EpisodeSpec(suite, task, f"sampled:{name.removeprefix('demo_')}", "demonstrations", prompt=prompt)
            store.write(
                number + offset, _episode(subgroup(data, name), spec, late_by, {**_source(data, path), "demo": name}), frame_every=1
            )
    return Imported(len(names), late_by)


def _instruction(data: h5py.Group) -> str:
    if "problem_info" not in data.attrs:
        raise DatasetError(f"{data.file.filename}: has no attribute problem_info to take the instruction from; give prompt")
    return "".join(json.loads(attribute(data, "problem_info"))["language_instruction"])


def _source(data: h5py.Group, path: str | Path) -> dict[str, Any]:
    """The file's own attributes, for provenance."""
    kept = {name: str(data.attrs[name]) for name in ("env_args", "problem_info", "bddl_file_name", "tag") if name in data.attrs}
    return {"imported_from": str(path), "attributes": kept}


def measure_lateness(data: h5py.Group, names: Sequence[str]) -> int:
    """0 if `obs[j]` lies before `actions[j]`, 1 if after it, from all demos together.

    Raises DatasetError with both errors when neither offset fits clearly better.
    """
    errors = np.zeros(2)
    for name in names:
        demo = subgroup(data, name)
        arm_N7, observed_N7 = array(demo, "states")[:, ARM_IN_STATES], array(demo, "obs/joint_states")
        errors[0] += np.abs(observed_N7[:-1] - arm_N7[:-1]).sum()
        errors[1] += np.abs(observed_N7[:-1] - arm_N7[1:]).sum()
    late_by = int(np.argmin(errors))
    if errors[1 - late_by] < CLEARLY * errors[late_by] or not errors.any():
        raise DatasetError(
            f"{data.file.filename}: cannot tell whether observations lie before or after their actions: joint positions are off "
            f"by {errors[0]:.4g} rad in sum if before, {errors[1]:.4g} if after; "
            "the arm hardly moves, or states and obs do not belong together"
        )
    return late_by


def _episode(demo: h5py.Group, spec: EpisodeSpec, late_by: int, source: Mapping[str, Any]) -> Episode:
    """One demo with every observation before its action: `obs[j]` belongs to action j + `late_by`."""
    name = f"{demo.file.filename}:{str(demo.name).rpartition('/')[2]}"
    actions_NA = array(demo, "actions").astype(np.float32)
    if len(actions_NA) <= late_by:
        raise DatasetError(f"{name}: {len(actions_NA)} actions are too few to pair with observations that are {late_by} late")
    conventions = Conventions(orientation=Orientation.RAW)
    robot_NR = _robot_states(demo)
    observations = _observations(demo, schema.observed_states(schema.robot_observations(robot_NR)), spec.prompt)
    return Episode(
        spec=spec,
        steps=_steps(array(demo, "states"), robot_NR, actions_NA, observations, late_by),
        final_observation=observations[-1] if late_by else None,
        outcome=Outcome.SUCCESS,
        reason="published",
        provenance={
            "conventions": conventions.to_dict(),
            "source": dict(source),
            "task": _task(source),
            "observations_were_late_by": late_by,
        },
    )


def _task(source: Mapping[str, Any]) -> dict[str, str]:
    attributes = source["attributes"]
    problem = json.loads(attributes["problem_info"])["problem_name"] if "problem_info" in attributes else ""
    return {"problem": problem, "bddl_file": attributes.get("bddl_file_name", "")}


def _robot_states(demo: h5py.Group) -> np.ndarray:
    """float64[N, 16] of the file's observations, as the file orders them.

    OpenVLA's files copy `robot_states[0]` from ten steps earlier: where the quaternion contradicts `ee_ori`, `ee_ori` counts.
    """
    quaternions_N4, axis_angles_N3 = array(demo, "robot_states")[:, 5:9], array(demo, "obs/ee_ori")
    contradicts_N = np.abs(schema.quaternions_to_axis_angles(quaternions_N4) - axis_angles_N3).max(axis=1) > SAME_ANGLE
    quaternions_N4[contradicts_N] = axis_angles_to_quaternions(axis_angles_N3[contradicts_N])
    parts = [array(demo, "obs/gripper_states"), array(demo, "obs/ee_pos"), quaternions_N4, array(demo, "obs/joint_states")]
    return np.concatenate(parts, axis=1).astype(np.float64)


def axis_angles_to_quaternions(axis_angles_N3: np.ndarray) -> np.ndarray:
    """float64[N, 4], xyzw: the inverse of `schema.quaternions_to_axis_angles` for angles in [0, 2 pi]."""
    angles_N1 = np.linalg.norm(axis_angles_N3, axis=1, keepdims=True)
    axes_N3 = axis_angles_N3 / np.where(angles_N1 == 0, 1.0, angles_N1)
    return np.concatenate([axes_N3 * np.sin(angles_N1 / 2), np.cos(angles_N1 / 2)], axis=1)


def _observations(demo: h5py.Group, states_NS: np.ndarray, prompt: str) -> list[Observation]:
    """As the file orders them."""
    pictures = {view: array(demo, f"obs/{key}") for view, key in schema.IMAGE_KEYS.items()}
    return [Observation({view: pictures[view][row] for view in pictures}, states_NS[row], prompt) for row in range(len(states_NS))]


def _steps(
    states_ND: np.ndarray, robot_NR: np.ndarray, actions_NA: np.ndarray, observations: Sequence[Observation], late_by: int
) -> list[ChunkStep]:
    """One chunk step per action that has an observation before it."""
    count = len(actions_NA)
    steps = []
    for t in range(count - late_by):
        row = slice(t + late_by, t + late_by + 1)
        last = row.stop == count
        steps.append(
            ChunkStep(
                observation=observations[t],
                proposed=ActionChunk(actions_NA[row]),
                executed_EA=actions_NA[row],
                labels_EA=actions_NA[row],
                reward_E=np.full(1, float(last), np.float32),
                intervention_E=np.zeros(1, np.bool_),
                success=last,
                terminated=last,
                truncated=False,
                frames={t: observations[t]},
                sim_states_ED=states_ND[row],
                robot_states_ER=robot_NR[t : t + 1],
            )
        )
    return steps
