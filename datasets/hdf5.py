"""Episodes as HDF5 in LIBERO's schema: write one, read one, look at what a file holds.

A file is written whole or not at all: HDF5 is built in memory, and the bytes go to a temporary name that is fsynced and
renamed. A full disk or a `kill -9` therefore never leaves a half-written HDF5 file, nor touches a finished one.

What a file does not keep of an `Episode`: proposals that were not executed, flow records, values, privileged information,
pictures of control steps that `frame_every` skips, and wall times: equal episodes give equal bytes, whenever they ran.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets import schema
from vla_rl.datasets.files import array, attribute, dataset, open_file, subgroup, write_bytes
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import VIEWS, ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome

Compression = Literal["lzf", "gzip", "none"]
"""Of pictures, one chunk per picture. LIBERO renders at 128²: size 0.70, 0.57, 1; reading 0.28, 0.44, 0.10 ms a picture."""
DEFAULT_COMPRESSION: Compression = "lzf"


@dataclass(frozen=True)
class EpisodeInfo:
    """What a stored episode is, without its arrays."""

    path: Path
    """The file."""
    demo: str
    """Group name below `/data`."""
    spec: EpisodeSpec
    prompt: str
    """The instruction that its observations carried."""
    outcome: Outcome
    num_steps: int
    """N, control steps."""
    frame_every: int
    """1: dense; k: pictures before control steps 0, k, 2k, ..."""
    num_frames: int
    """F, pictures of each view."""
    resolution: int
    """Height and width of the pictures (pixels)."""
    conventions: Conventions
    """Those of the environment that it was recorded in; pictures are given back in its orientation."""

    @property
    def name(self) -> str:
        """`PATH:demo`, for messages."""
        return f"{self.path}:{self.demo}"


def write_episode(path: str | Path, episode: Episode, frame_every: int, compression: Compression = DEFAULT_COMPRESSION) -> int:
    """Write `episode` as `/data/demo_0` of a new file, atomically. Returns the size of the file in bytes.

    Raises DatasetError when the episode lacks something the format promises (a state, a picture before every
    `frame_every`-th control step), and StorageError naming the file and the free space when it cannot be written.
    """
    return write_bytes(Path(path), encode_episode(episode, frame_every, compression))


def encode_episode(episode: Episode, frame_every: int, compression: Compression = DEFAULT_COMPRESSION) -> bytes:
    """The bytes of a file that holds `episode` as `/data/demo_0`. Raises DatasetError, see `write_episode`."""
    frames = _required_frames(episode, frame_every)
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file:
        data = file.create_group("data")
        data.attrs.update(file_attributes(episode))
        data.attrs.update(num_demos=1, total=episode.num_steps)
        demo = data.create_group("demo_0")
        demo.attrs.update(_demo_attributes(episode, frame_every, frames))
        _write_rows(demo, episode)
        _write_frames(subgroup(demo, "obs"), frames, _conventions(episode).orientation, compression)
        _write_final(demo, episode.final_observation, _conventions(episode).orientation)
        demo["provenance"] = json.dumps(dict(episode.provenance))
        file.flush()
        return file.id.get_file_image()


def _conventions(episode: Episode) -> Conventions:
    if "conventions" not in episode.provenance:
        raise DatasetError(f"{episode.spec.key}: provenance has no 'conventions'; it has {', '.join(episode.provenance) or 'nothing'}")
    conventions = Conventions.from_dict(episode.provenance["conventions"])
    schema.require_storable(conventions)
    return conventions


def _required_frames(episode: Episode, frame_every: int) -> dict[int, Observation]:
    """The recorded observations that `frame_every` promises, both views each, in order."""
    if frame_every < 1:
        raise DatasetError(f"frame_every is {frame_every}, must be at least 1 (1: a picture before every action)")
    if not episode.num_steps:
        raise DatasetError(
            f"{episode.spec.key}: the episode has no control step ({episode.outcome.value}: {episode.reason}); nothing to write"
        )
    recorded = episode.frames()
    wanted = range(0, episode.num_steps, frame_every)
    missing = [t for t in wanted if t not in recorded or any(view not in recorded[t].images for view in VIEWS)]
    if missing:
        raise DatasetError(
            f"{episode.spec.key}: no picture of both views before {len(missing)} of {len(wanted)} control steps ({missing[:5]} ...); "
            f"record with Look(record_every={frame_every}), or fill them in with collection.recorder.fill_frames"
        )
    return {t: recorded[t] for t in wanted}


def file_attributes(episode: Episode) -> dict[str, Any]:
    """Attributes of `/data` that follow from the task, in LIBERO's names. Equal for all episodes of one task."""
    task = dict(episode.provenance.get("task", {}))
    prompt = task.get("language", _prompt(episode))
    problem = {"problem_name": task.get("problem", ""), "domain_name": "robosuite", "language_instruction": prompt}
    bddl_file = task.get("bddl_file", "")
    environment = {"type": 1, "env_name": problem["problem_name"], "problem_name": problem["problem_name"], "bddl_file": bddl_file}
    return {
        "env_name": problem["problem_name"],
        "problem_info": json.dumps(problem),
        "env_args": json.dumps(environment | {"env_kwargs": {"control_freq": _conventions(episode).control_rate_hz}}),
        "bddl_file_name": bddl_file,
        "macros_image_convention": schema.IMAGE_CONVENTION,
        "alignment": schema.ALIGNMENT,
        "format": schema.FORMAT,
    }


def _prompt(episode: Episode) -> str:
    prompts = {step.observation.prompt for step in episode.steps}
    if len(prompts) != 1:
        raise DatasetError(f"{episode.spec.key}: an episode has one instruction, this one has {sorted(prompts)}")
    return prompts.pop()


def _demo_attributes(episode: Episode, frame_every: int, frames: Mapping[int, Observation]) -> dict[str, Any]:
    last = episode.steps[-1]
    return {
        "num_samples": episode.num_steps,
        "init_state": _rows(episode, "sim_states_ED")[0],
        "spec": json.dumps(episode.spec.to_dict()),
        "prompt": _prompt(episode),
        "outcome": episode.outcome.value,
        "reason": episode.reason,
        "success": last.success,
        "terminated": last.terminated,
        "truncated": last.truncated,
        "alignment": schema.ALIGNMENT,
        "frame_policy": schema.DENSE if frame_every == 1 else schema.SPARSE,
        "frame_every": frame_every,
        "num_frames": len(frames),
        "conventions": json.dumps(_conventions(episode).to_dict()),
    }


def _rows(episode: Episode, name: str) -> np.ndarray:
    """One array over all control steps from the chunks' arrays called `name`."""
    parts = [getattr(step, name) for step in episode.steps]
    if any(part is None for part in parts):
        raise DatasetError(f"{episode.spec.key}: {name} was not recorded; record with Look(record_states=True)")
    return np.concatenate(parts)


def _write_rows(demo: h5py.Group, episode: Episode) -> None:
    """The arrays with one row per control step, in LIBERO's dtypes."""
    rewards_N = _rows(episode, "reward_E")
    if not np.isin(rewards_N, (0, 1)).all():
        raise DatasetError(f"{episode.spec.key}: LIBERO's layout stores rewards 0 and 1, these are {np.unique(rewards_N)[:5]}")
    robot_states_NR = _rows(episode, "robot_states_ER")
    observations = schema.robot_observations(robot_states_NR)
    _require_same_states(episode, schema.observed_states(observations))
    dones_N = np.zeros(episode.num_steps, np.uint8)
    dones_N[-1] = 1
    demo["actions"] = episode.actions_NA().astype(np.float64)
    demo["action_labels"] = episode.labels_NA().astype(np.float64)
    demo["states"] = _rows(episode, "sim_states_ED")
    demo["robot_states"] = robot_states_NR[:, : schema.LIBERO_ROBOT_STATE_DIM]
    demo["rewards"] = rewards_N.astype(np.uint8)
    demo["dones"] = dones_N
    demo["intervention"] = _rows(episode, "intervention_E").astype(np.uint8)
    demo["chunk_lengths"] = np.array([len(step.executed_EA) for step in episode.steps], np.int64)
    demo["chunk_weights_version"] = np.array([step.proposed.weights_version for step in episode.steps], np.int64)
    for name, values in observations.items():
        demo.create_dataset(f"obs/{name}", data=values)


def _require_same_states(episode: Episode, states_NS: np.ndarray) -> None:
    """What is stored once (robot states) must be what the actor saw (`Observation.state`), bit for bit."""
    for t, frame in episode.frames().items():
        if not np.array_equal(frame.state, states_NS[t]):
            raise DatasetError(
                f"{episode.spec.key}: before control step {t} the observation's state is {frame.state.tolist()}, "
                f"the recorded robot state says {states_NS[t].tolist()}; they must come from the same substep"
            )


def _write_frames(group: h5py.Group, frames: Mapping[int, Observation], orientation: Orientation, compression: Compression) -> None:
    group["frame_index"] = np.array(list(frames), np.int64)
    for view, key in schema.IMAGE_KEYS.items():
        pictures = np.stack([schema.reorient(frame.images[view], orientation) for frame in frames.values()])
        filters = {} if compression == "none" else {"compression": compression}
        group.create_dataset(key, data=pictures, chunks=(1, *pictures.shape[1:]), **filters)


def _write_final(demo: h5py.Group, final: Observation | None, orientation: Orientation) -> None:
    if final is None:
        return
    demo["final/state"] = final.state
    for view, picture in final.images.items():
        demo[f"final/{schema.IMAGE_KEYS[view]}"] = schema.reorient(picture, orientation)


def demo_names(data: h5py.Group) -> list[str]:
    """The demos of `/data`, in numerical order."""
    return sorted((name for name in map(str, data) if name.startswith("demo_")), key=lambda name: int(name.removeprefix("demo_")))


def data_group(file: h5py.File) -> h5py.Group:
    """`/data` of a file of this format. Raises DatasetError for a file that does not declare its alignment, or another one."""
    data = subgroup(file, "data")
    alignment = data.attrs.get("alignment")
    if alignment is None:
        raise DatasetError(
            f"{file.filename}: does not declare whether an observation lies before or after its action (attribute 'alignment' of "
            "/data), so it was not written by vla-rl. LIBERO's published files are one step late: import them with "
            "datasets.published.import_published."
        )
    if alignment != schema.ALIGNMENT:
        raise DatasetError(f"{file.filename}: alignment is {alignment!r}, only {schema.ALIGNMENT!r} is read; import the file anew")
    return data


def episode_infos(path: str | Path) -> list[EpisodeInfo]:
    """What the episodes of a file are, in order. Raises DatasetError, see `open_file` and `data_group`."""
    with open_file(path) as file:
        data = data_group(file)
        return [_info(Path(path), name, subgroup(data, name)) for name in demo_names(data)]


def _info(path: Path, name: str, demo: h5py.Group) -> EpisodeInfo:
    return EpisodeInfo(
        path=path,
        demo=name,
        spec=EpisodeSpec.from_dict(json.loads(attribute(demo, "spec"))),
        prompt=attribute(demo, "prompt"),
        outcome=Outcome(attribute(demo, "outcome")),
        num_steps=int(attribute(demo, "num_samples")),
        frame_every=int(attribute(demo, "frame_every")),
        num_frames=int(attribute(demo, "num_frames")),
        resolution=dataset(demo, f"obs/{schema.IMAGE_KEYS[VIEWS[0]]}").shape[1],
        conventions=Conventions.from_dict(json.loads(attribute(demo, "conventions"))),
    )


def read_episode(path: str | Path, demo: str = "demo_0") -> Episode:
    """Read one episode back, with the pictures that the file has, in the orientation they were observed in.

    Observations of control steps without a picture carry the state only. Raises DatasetError.
    """
    with open_file(path) as file:
        data = data_group(file)
        if demo not in data:
            raise DatasetError(f"{path}: no episode {demo!r}; it holds {', '.join(demo_names(data)) or 'none'}")
        group = subgroup(data, demo)
        info = _info(Path(path), demo, group)
        return Episode(
            spec=info.spec,
            steps=_read_steps(group, info),
            final_observation=_read_final(group, info),
            outcome=info.outcome,
            reason=attribute(group, "reason"),
            provenance=json.loads(str(dataset(group, "provenance").asstr()[()])),
        )


def _read_pictures(group: h5py.Group, info: EpisodeInfo) -> dict[str, np.ndarray]:
    """View -> pictures that `group` holds, in the orientation they were observed in."""
    orientation = info.conventions.orientation
    stored = {view: array(group, key) for view, key in schema.IMAGE_KEYS.items() if key in group}
    return {view: np.ascontiguousarray(schema.reorient(pictures, orientation)) for view, pictures in stored.items()}


def _read_final(group: h5py.Group, info: EpisodeInfo) -> Observation | None:
    if "final" not in group:
        return None
    final = subgroup(group, "final")
    return Observation(_read_pictures(final, info), array(final, "state"), info.prompt)


def _read_frames(group: h5py.Group, info: EpisodeInfo) -> dict[int, Observation]:
    observations = subgroup(group, "obs")
    states_NS = observed_states(observations)
    pictures = _read_pictures(observations, info)
    index_F = array(observations, "frame_index").tolist()
    return {t: Observation({view: pictures[view][row] for view in VIEWS}, states_NS[t], info.prompt) for row, t in enumerate(index_F)}


def observed_states(observations: h5py.Group) -> np.ndarray:
    """float32[N, 8]: `Observation.state` before every action, from the group `obs`."""
    return schema.observed_states({name: array(observations, name) for name in schema.STATE_PARTS})


def _read_steps(group: h5py.Group, info: EpisodeInfo) -> list[ChunkStep]:
    """The chunks as they were executed."""
    frames = _read_frames(group, info)
    rows = {
        "executed": array(group, "actions").astype(np.float32),
        "labels": array(group, "action_labels").astype(np.float32),
        "reward": array(group, "rewards").astype(np.float32),
        "intervention": array(group, "intervention").astype(bool),
        "sim": array(group, "states"),
        "robot": np.concatenate([array(group, "robot_states"), array(group, "obs/joint_states")], axis=1),
        "observed": observed_states(subgroup(group, "obs")),
    }
    ends = np.cumsum(array(group, "chunk_lengths")).tolist()
    versions = array(group, "chunk_weights_version").tolist()
    steps = [
        _read_chunk({name: values[start:end] for name, values in rows.items()}, range(start, end), frames, info.prompt, version)
        for start, end, version in zip([0, *ends[:-1]], ends, versions)
    ]
    last = steps[-1]
    last.success, last.terminated, last.truncated = (bool(attribute(group, name)) for name in ("success", "terminated", "truncated"))
    return steps


def _read_chunk(
    rows: Mapping[str, np.ndarray], steps: range, frames: Mapping[int, Observation], prompt: str, weights_version: int
) -> ChunkStep:
    executed_EA, labels_EA = rows["executed"], rows["labels"]
    observation = frames[steps.start] if steps.start in frames else Observation({}, rows["observed"][0], prompt)
    return ChunkStep(
        observation=observation,
        proposed=ActionChunk(executed_EA, None if np.array_equal(executed_EA, labels_EA) else labels_EA, weights_version=weights_version),
        executed_EA=executed_EA,
        labels_EA=labels_EA,
        reward_E=rows["reward"],
        intervention_E=rows["intervention"],
        success=False,
        terminated=False,
        truncated=False,
        frames={t: frames[t] for t in steps if t in frames},
        sim_states_ED=rows["sim"],
        robot_states_ER=rows["robot"],
    )
