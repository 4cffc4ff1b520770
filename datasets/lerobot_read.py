"""Reading LeRobot folders: what their episodes are, their numbers, their pictures, and whole episodes.

Shape legend: see `vla_rl/episode.py`; F pictures, V views.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.episode_rows import Ending, EpisodeInfo, EpisodeRows, build_steps
from vla_rl.datasets.lerobot_catalog import Catalog, Entry, open_catalog, read_table
from vla_rl.datasets.lerobot_format import Layout
from vla_rl.datasets.lerobot_tables import rows_of_column
from vla_rl.datasets.png import PngColumns, decode_png
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.video import VideoFiles
from vla_rl.episode import ACTION_DIM, VIEWS, Bool, Episode, EpisodeSpec, Float32, Int64, Observation, Outcome, UInt8


@dataclass(frozen=True)
class LeRobotInfo(EpisodeInfo):
    """An episode of a LeRobot folder: pictures before every control step."""

    entry: Entry
    layout: Layout
    fps: int
    """Declared rows per second, which timestamps follow; the control rate is in `conventions`."""


def lerobot_infos(folder: str | Path) -> list[LeRobotInfo]:
    """What the episodes of a folder are: ours by their recipe's number, others by `episode_index`. Raises DatasetError."""
    catalog = open_catalog(folder)
    infos = [_info(catalog, entry) for entry in catalog.entries]
    return sorted(infos, key=lambda info: info.entry.row["number"]) if catalog.layout.ours else infos


def _info(catalog: Catalog, entry: Entry) -> LeRobotInfo:
    ours = catalog.layout.ours and entry.row.get("spec")
    return LeRobotInfo(
        path=catalog.folder,
        demo=f"episode_{entry.episode_index:06d}",
        spec=EpisodeSpec.from_dict(json.loads(entry.row["spec"])) if ours else _published_spec(catalog, entry),
        prompt=entry.task,
        outcome=Outcome(entry.row["outcome"]) if ours else Outcome.SUCCESS,
        num_steps=entry.length,
        frame_every=1,
        num_frames=entry.length,
        resolution=picture_size(catalog),
        conventions=catalog.layout.conventions,
        entry=entry,
        layout=catalog.layout,
        fps=catalog.fps,
    )


def _published_spec(catalog: Catalog, entry: Entry) -> EpisodeSpec:
    """A name for an episode of others; it cannot restore the scene, whose seed nobody published."""
    task = next((index for index, text in catalog.tasks.items() if text == entry.task), 0)
    return EpisodeSpec(names.PUBLISHED_SUITE, task, f"sampled:{entry.episode_index}", "demonstrations", prompt=entry.task)


def picture_size(catalog: Catalog) -> int:
    """Height and width of the pictures. Raises DatasetError when they are not square or the views differ."""
    shapes = {feature: tuple(catalog.info["features"][feature]["shape"]) for feature in catalog.layout.images.values()}
    sizes = {shape[1:] if shape[0] == 3 else shape[:2] for shape in shapes.values()}
    height, width = next(iter(sizes))
    if len(sizes) != 1 or height != width:
        raise DatasetError(f"{catalog.folder}: expected square pictures of one size, got {shapes}")
    return int(height)


@lru_cache(maxsize=4)
def _table(path: Path, columns: tuple[str, ...], modified: int) -> pa.Table:
    return read_table(path, columns)


def read_rows(info: LeRobotInfo, columns: Sequence[str]) -> pa.Table:
    """The episode's rows of some features, as many as are there; a file's last tables are kept, because episodes share files.

    Raises DatasetError for a file that is missing or damaged.
    """
    entry = info.entry
    modified = entry.data_file.stat().st_mtime_ns if entry.data_file.exists() else 0
    return _table(entry.data_file, tuple(columns), modified).slice(entry.first_row, entry.length)


def read_columns(info: LeRobotInfo, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """The episode's rows of some features that are numbers. Raises DatasetError for a file that is damaged or too short."""
    entry = info.entry
    table = read_rows(info, columns)
    if table.num_rows != entry.length:
        raise DatasetError(f"{info.name}: {entry.data_file} has {table.num_rows} of its {entry.length} rows; it was cut off")
    return {name: rows_of_column(table[name]) for name in columns}


def read_steps(info: LeRobotInfo, labels: bool) -> tuple[Float32, Float32, Int64]:
    """float32[N, 7] labels (or executed actions), float32[N, 8] states, int64[N] control steps that have pictures."""
    action = names.LABEL if labels and info.layout.ours else info.layout.action
    rows = read_columns(info, (action, info.layout.state))
    require_gripper(rows[action], info)
    return rows[action].astype(np.float32), rows[info.layout.state].astype(np.float32), np.arange(info.num_steps)


def read_interventions(info: LeRobotInfo) -> Bool:
    """bool[N]: the actions that a person chose; all False in datasets of others, which do not say."""
    if not info.layout.ours:
        return np.zeros(info.num_steps, np.bool_)
    return read_columns(info, (names.INTERVENTION,))[names.INTERVENTION].astype(np.bool_)


def require_gripper(actions_NA: np.ndarray, info: LeRobotInfo) -> None:
    """Raise DatasetError for gripper actions in 0 ... 1, the convention of RLDS data and GR00T, in a dataset that declares none."""
    gripper_N = actions_NA[:, ACTION_DIM - 1]
    if not info.layout.ours and gripper_N.min() == 0.0:
        raise DatasetError(
            f"{info.name}: gripper actions lie in {gripper_N.min():g} ... {gripper_N.max():g}, expected -1 (open) ... 1 (closed) as in "
            f"{info.layout.name}; convert them first (GR00T's g becomes -sign(2 g - 1))"
        )


class LeRobotPictures:
    """Pictures of LeRobot folders, read when asked. Files are opened in the process that needs them."""

    def __init__(self) -> None:
        self._videos = VideoFiles()
        self._columns = PngColumns()

    def read(self, infos: Sequence[LeRobotInfo], positions_B: Int64, pictures_BVHWC: UInt8) -> None:
        """Fill uint8[B, V, H, W, 3] with picture `positions_B[b]` of `infos[b]`; each video file is gone through once."""
        for view, name in enumerate(VIEWS):
            by_video: dict[Path, list[tuple[int, int]]] = {}
            for row, (info, position) in enumerate(zip(infos, positions_B.tolist())):
                feature, entry = info.layout.images[name], info.entry
                if feature in entry.videos:
                    path, first = entry.videos[feature]
                    by_video.setdefault(path, []).append((row, first + position))
                else:
                    content = self._columns.read(entry.data_file, feature, entry.first_row + position)
                    pictures_BVHWC[row, view] = decode_png(content, f"{info.name}: picture {position} of {feature}")
            for path, wanted in by_video.items():
                rows, numbers = zip(*wanted)
                pictures_BVHWC[list(rows), view] = self._videos.read(path, np.array(numbers), infos[rows[0]].fps)

    def read_episode(self, info: LeRobotInfo) -> UInt8:
        """uint8[N, V, H, W, 3]."""
        pictures = np.empty((info.num_steps, len(VIEWS), info.resolution, info.resolution, 3), np.uint8)
        self.read([info] * info.num_steps, np.arange(info.num_steps), pictures)
        return pictures


def read_lerobot_episode(info: LeRobotInfo, pictures: LeRobotPictures | None = None) -> Episode:
    """One episode with its pictures. Episodes of others have no simulator states, one step per chunk, and end in success.

    Raises DatasetError.
    """
    pictures_NVHWC = (pictures or LeRobotPictures()).read_episode(info)
    replay = _read_replay(info)
    rows = _episode_rows(info, replay)
    frames = {
        t: Observation(dict(zip(VIEWS, pictures_VHWC)), rows.observed_NS[t], info.prompt) for t, pictures_VHWC in enumerate(pictures_NVHWC)
    }
    row, ours = info.entry.row, info.layout.ours
    ending = Ending(row["ended_in_success"], row["terminated"], row["truncated"]) if ours else Ending(True, True, False)
    return Episode(
        spec=info.spec,
        steps=build_steps(rows, frames, info.prompt, ending),
        final_observation=_final(replay, info),
        outcome=info.outcome,
        reason=row["reason"] if ours else "published",
        provenance=json.loads(row["provenance"]) if ours else published_provenance(info),
    )


def published_provenance(info: LeRobotInfo) -> dict[str, Any]:
    """Where an episode of others comes from."""
    source = {"folder": str(info.path), "layout": info.layout.name, "episode_index": info.entry.episode_index, "fps": info.fps}
    return {"conventions": info.conventions.to_dict(), "source": source}


def _episode_rows(info: LeRobotInfo, replay: dict[str, Any]) -> EpisodeRows:
    steps, ones = info.num_steps, np.ones(info.num_steps, np.int64)
    if not info.layout.ours:
        rows = read_columns(info, (info.layout.action, info.layout.state))
        actions_NA, states_NS = (rows[name].astype(np.float32) for name in (info.layout.action, info.layout.state))
        reward_N = np.eye(1, steps, steps - 1, dtype=np.float32)[0]
        return EpisodeRows(actions_NA, actions_NA, reward_N, np.zeros(steps, np.bool_), states_NS, None, None, ones, 0 * ones)
    replayable = (names.ROBOT_STATE,) if replay else ()
    rows = read_columns(info, (names.ACTION, names.LABEL, names.REWARD, names.INTERVENTION, names.STATE, *replayable))
    states = np.array(replay["simulator_states"], np.float64).reshape(steps, replay["simulator_state_dim"]) if replay else None
    return EpisodeRows(
        executed_NA=rows[names.ACTION],
        labels_NA=rows[names.LABEL],
        reward_N=rows[names.REWARD],
        intervention_N=rows[names.INTERVENTION].astype(np.bool_),
        observed_NS=rows[names.STATE],
        sim_states_ND=states,
        robot_states_NR=rows[names.ROBOT_STATE] if replay else None,
        chunk_lengths_T=np.array(replay["chunk_lengths"], np.int64) if replay else ones,
        weights_version_T=np.array(replay["chunk_weights_version"], np.int64) if replay else 0 * ones,
    )


def read_replay_row(info: LeRobotInfo) -> dict[str, Any]:
    """The episode's row of `replay/`; empty for datasets of others."""
    if not info.layout.ours:
        return {}
    path = info.path / names.Place(info.entry.row["data/chunk_index"], info.entry.row["data/file_index"]).path(names.REPLAY_PATH)
    table = read_table(path)
    return table.slice(table["episode_index"].to_pylist().index(info.entry.episode_index), 1).to_pylist()[0]


def _read_replay(info: LeRobotInfo) -> dict[str, Any]:
    row = read_replay_row(info)
    return row if row.get("simulator_states") else {}


def _final(replay: dict[str, Any], info: LeRobotInfo) -> Observation | None:
    if not replay or replay["final_state"] is None:
        return None
    images = {view: decode_png(replay[f"final_{view}"], info.name) for view in VIEWS if replay[f"final_{view}"] is not None}
    return Observation(images, np.array(replay["final_state"], np.float32), info.prompt)
