"""Episodes as HDF5 in LIBERO's schema: write one, read one, look at what a file holds.

A file is written whole or not at all: HDF5 is built in memory, and the bytes go to a temporary name that is fsynced and
renamed. A full disk or a `kill -9` therefore never leaves a half-written HDF5 file, nor touches a finished one.

What a file does not keep of an `Episode`: proposals that were not executed, flow records, values, privileged information,
pictures of control steps that `frame_every` skips, and wall times: equal episodes give equal bytes, whenever they ran (with
compression `lzf`: equal arrays).

Shape legend: see `vla_rl/episode.py`; F pictures of an episode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets import schema
from vla_rl.datasets.episode_rows import (
    Ending,
    EpisodeInfo,
    EpisodeRows,
    build_steps,
    chunk_columns,
    conventions_of,
    observed_states_of,
    prompt_of,
    required_frames,
    rows_of,
)
from vla_rl.datasets.files import array, attribute, dataset, open_file, subgroup, write_bytes
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import VIEWS, ChunkStep, Episode, EpisodeSpec, Observation, Outcome

Compression = Literal["gzip", "lzf", "none"]
"""Of pictures, one chunk per picture. LIBERO renders at 128²: size 0.55, 0.69, 1; writing 0.8, 0.4, 0.03 and reading 0.36, 0.21, 0.04 ms
a picture. HDF5's LZF looks earlier matches up in a table that it never clears (`INIT_HTAB` 0 in liblzf), so what lay in memory before
decides how it writes a picture down: the same pixels, not always the same bytes. Deflate has no such freedom."""
DEFAULT_COMPRESSION: Compression = "gzip"
_FILTERS: dict[Compression, dict[str, Any]] = {
    "gzip": {"compression": "gzip", "compression_opts": 1},  # higher levels: 2 % smaller, twice as slow to write
    "lzf": {"compression": "lzf"},
    "none": {},
}


def write_episode(path: str | Path, episode: Episode, frame_every: int, compression: Compression = DEFAULT_COMPRESSION) -> int:
    """Write `episode` as `/data/demo_0` of a new file, atomically. Returns the size of the file in bytes.

    Raises DatasetError when the episode lacks something the format promises (a state, a picture before every
    `frame_every`-th control step), and StorageError naming the file and the free space when it cannot be written.
    """
    return write_bytes(Path(path), encode_episode(episode, frame_every, compression))


def encode_episode(episode: Episode, frame_every: int, compression: Compression = DEFAULT_COMPRESSION) -> bytes:
    """The bytes of a file that holds `episode` as `/data/demo_0`. Raises DatasetError, see `write_episode`."""
    frames = required_frames(episode, frame_every)
    with h5py.File("in memory", "w", driver="core", backing_store=False) as file:
        data = file.create_group("data")
        data.attrs.update(file_attributes(episode))
        data.attrs.update(num_demos=1, total=episode.num_steps)
        demo = data.create_group("demo_0")
        demo.attrs.update(_demo_attributes(episode, frame_every, frames))
        _write_rows(demo, episode)
        _write_frames(subgroup(demo, "obs"), frames, conventions_of(episode).orientation, compression)
        _write_final(demo, episode.final_observation, conventions_of(episode).orientation)
        demo["provenance"] = json.dumps(dict(episode.provenance))
        file.flush()
        return file.id.get_file_image()


def file_attributes(episode: Episode) -> dict[str, Any]:
    """Attributes of `/data` that follow from the task, in LIBERO's names. Equal for all episodes of one task."""
    task = dict(episode.provenance.get("task", {}))
    prompt = task.get("language", prompt_of(episode))
    problem = {"problem_name": task.get("problem", ""), "domain_name": "robosuite", "language_instruction": prompt}
    bddl_file = task.get("bddl_file", "")
    environment = {"type": 1, "env_name": problem["problem_name"], "problem_name": problem["problem_name"], "bddl_file": bddl_file}
    return {
        "env_name": problem["problem_name"],
        "problem_info": json.dumps(problem),
        "env_args": json.dumps(environment | {"env_kwargs": {"control_freq": conventions_of(episode).control_rate_hz}}),
        "bddl_file_name": bddl_file,
        "macros_image_convention": schema.IMAGE_CONVENTION,
        "alignment": schema.ALIGNMENT,
        "format": schema.FORMAT,
    }


def _demo_attributes(episode: Episode, frame_every: int, frames: Mapping[int, Observation]) -> dict[str, Any]:
    last = episode.steps[-1]
    return {
        "num_samples": episode.num_steps,
        "init_state": rows_of(episode, "sim_states_ED")[0],
        "spec": json.dumps(episode.spec.to_dict()),
        "prompt": prompt_of(episode),
        "outcome": episode.outcome.value,
        "reason": episode.reason,
        "success": last.success,
        "terminated": last.terminated,
        "truncated": last.truncated,
        "alignment": schema.ALIGNMENT,
        "frame_policy": schema.DENSE if frame_every == 1 else schema.SPARSE,
        "frame_every": frame_every,
        "num_frames": len(frames),
        "conventions": json.dumps(conventions_of(episode).to_dict()),
    }


def _write_rows(demo: h5py.Group, episode: Episode) -> None:
    """The arrays with one row per control step, in LIBERO's dtypes."""
    rewards_N = rows_of(episode, "reward_E")
    if not np.isin(rewards_N, (0, 1)).all():
        raise DatasetError(f"{episode.spec.key}: LIBERO's layout stores rewards 0 and 1, these are {np.unique(rewards_N)[:5]}")
    observed_states_of(episode)
    robot_states_NR = rows_of(episode, "robot_states_ER")
    lengths_T, versions_T = chunk_columns(episode)
    dones_N = np.zeros(episode.num_steps, np.uint8)
    dones_N[-1] = 1
    demo["actions"] = episode.actions_NA().astype(np.float64)
    demo["action_labels"] = episode.labels_NA().astype(np.float64)
    demo["states"] = rows_of(episode, "sim_states_ED")
    demo["robot_states"] = robot_states_NR[:, : schema.LIBERO_ROBOT_STATE_DIM]
    demo["rewards"] = rewards_N.astype(np.uint8)
    demo["dones"] = dones_N
    demo["intervention"] = rows_of(episode, "intervention_E").astype(np.uint8)
    demo["chunk_lengths"], demo["chunk_weights_version"] = lengths_T, versions_T
    for name, values in schema.robot_observations(robot_states_NR).items():
        demo.create_dataset(f"obs/{name}", data=values)


def _write_frames(group: h5py.Group, frames: Mapping[int, Observation], orientation: Orientation, compression: Compression) -> None:
    group["frame_index"] = np.array(list(frames), np.int64)
    for view, key in schema.IMAGE_KEYS.items():
        pictures = np.stack([schema.reorient(frame.images[view], orientation) for frame in frames.values()])
        group.create_dataset(key, data=pictures, chunks=(1, *pictures.shape[1:]), **_FILTERS[compression])


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
            "vla-rl data convert FILE --to hdf5 --into FOLDER --suite SUITE --task N."
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
    observations = subgroup(demo, "obs")
    a_view = next((key for key in schema.IMAGE_KEYS.values() if key in observations), schema.IMAGE_KEYS[VIEWS[0]])
    return EpisodeInfo(
        path=path,
        demo=name,
        spec=EpisodeSpec.from_dict(json.loads(attribute(demo, "spec"))),
        prompt=attribute(demo, "prompt"),
        outcome=Outcome(attribute(demo, "outcome")),
        num_steps=int(attribute(demo, "num_samples")),
        frame_every=int(attribute(demo, "frame_every")),
        num_frames=int(attribute(demo, "num_frames")),
        resolution=dataset(observations, a_view).shape[1],
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
    """The kept observations; a view that the file lacks is not in them, so that a re-simulation can fill it in."""
    observations = subgroup(group, "obs")
    states_NS = observed_states(observations)
    pictures = _read_pictures(observations, info)
    index_F = array(observations, "frame_index").tolist()
    return {t: Observation({view: pictures[view][row] for view in pictures}, states_NS[t], info.prompt) for row, t in enumerate(index_F)}


def observed_states(observations: h5py.Group) -> np.ndarray:
    """float32[N, 8]: `Observation.state` before every action, from the group `obs`."""
    return schema.observed_states({name: array(observations, name) for name in schema.STATE_PARTS})


def _read_steps(group: h5py.Group, info: EpisodeInfo) -> list[ChunkStep]:
    """The chunks as they were executed."""
    rows = EpisodeRows(
        executed_NA=array(group, "actions").astype(np.float32),
        labels_NA=array(group, "action_labels").astype(np.float32),
        reward_N=array(group, "rewards").astype(np.float32),
        intervention_N=array(group, "intervention").astype(bool),
        observed_NS=observed_states(subgroup(group, "obs")),
        sim_states_ND=array(group, "states"),
        robot_states_NR=np.concatenate([array(group, "robot_states"), array(group, "obs/joint_states")], axis=1),
        chunk_lengths_T=array(group, "chunk_lengths"),
        weights_version_T=array(group, "chunk_weights_version"),
    )
    ending = Ending(*(bool(attribute(group, name)) for name in ("success", "terminated", "truncated")))
    return build_steps(rows, _read_frames(group, info), info.prompt, ending)
