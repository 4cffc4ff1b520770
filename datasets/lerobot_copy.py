"""Episodes out of LeRobot folders as they are stored, neither decoded nor encoded again: for merging, and for taking over v2 folders.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.lerobot_catalog import Catalog, read_table
from vla_rl.datasets.lerobot_format import IMAGE_FEATURES, Pictures
from vla_rl.datasets.lerobot_parts import PICTURE_TYPE, EpisodeParts
from vla_rl.datasets.lerobot_read import LeRobotInfo, LeRobotPictures, published_provenance, read_replay_row, require_gripper
from vla_rl.datasets.lerobot_tables import as_counts, rows_of_column
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.tally import count_values
from vla_rl.datasets.video import cut_video
from vla_rl.episode import VIEWS, Int64

DESCRIPTION = (
    "outcome",
    "reason",
    "suite",
    "suite_task",
    "init",
    "seed",
    "ended_in_success",
    "terminated",
    "truncated",
    "spec",
    "provenance",
)
"""Our columns of `meta/episodes`, but for the number."""


def kept_pictures(catalog: Catalog) -> Pictures:
    """How a folder keeps its pictures. Raises DatasetError for videos of a codec that is not one of ours."""
    if catalog.layout.pictures is not None:
        return catalog.layout.pictures
    feature = catalog.info["features"][catalog.layout.images[VIEWS[0]]]
    if feature["dtype"] == "image":
        return "png"
    codec = str((feature.get("info") or feature.get("video_info") or {}).get("video.codec", "av1"))
    known: dict[str, Pictures] = {"av1": "av1", "libsvtav1": "av1", "h264": "h264", "libx264": "h264"}
    if codec not in known:
        raise DatasetError(f"{catalog.folder}: videos are {codec}; av1 and h264 are copied; give --pictures to encode anew")
    return known[codec]


def copy_episode(info: LeRobotInfo, catalog: Catalog, number: int) -> EpisodeParts:
    """The parts of one episode under another number, features of others renamed to LeRobot's and completed. Raises DatasetError."""
    renamed: dict[str, str] = {theirs: IMAGE_FEATURES[view] for view, theirs in catalog.layout.images.items()}
    renamed |= {catalog.layout.state: names.STATE, catalog.layout.action: names.ACTION}
    declared: dict[str, Any] = catalog.info["features"]
    features: dict[str, Any] = {renamed.get(name, name): dict(feature) for name, feature in declared.items()}
    table = _rows(info, catalog, renamed)
    replay = read_replay_row(info)
    if not catalog.layout.ours:
        table, features = _completed(table, features, info)
    return EpisodeParts(
        prompt=info.prompt,
        table=table,
        videos={renamed[feature]: cut_video(path, first, info.num_steps, info.fps) for feature, (path, first) in info.entry.videos.items()},
        value_counts=_value_counts(info, replay),
        description={"number": number, **_description(info)},
        features={name: features[name] for name in features if name not in _absent(features, table)},
        fps=info.fps,
        conventions=info.conventions,
        replay={key: value for key, value in replay.items() if key != "episode_index" and not key.startswith("value_counts/")},
    )


def _absent(features: dict[str, Any], table: pa.Table) -> set[str]:
    """Features that are declared and stored nowhere."""
    elsewhere = {name for name, feature in features.items() if feature["dtype"] == "video"} | set(names.POSITIONS)
    return set(features) - set(table.column_names) - elsewhere


def _rows(info: LeRobotInfo, catalog: Catalog, renamed: dict[str, str]) -> pa.Table:
    wanted = [name for name, feature in catalog.info["features"].items() if feature["dtype"] != "video" and name not in names.POSITIONS]
    table = read_table(info.entry.data_file, wanted).slice(info.entry.first_row, info.num_steps)
    if table.num_rows != info.num_steps:
        raise DatasetError(f"{info.name}: {info.entry.data_file} has {table.num_rows} of its {info.num_steps} rows; it was cut off")
    columns = {renamed.get(name, name): _column(table[name], catalog.info["features"][name]["dtype"] == "image") for name in wanted}
    return pa.table(columns)


def _column(column: pa.ChunkedArray, is_picture: bool) -> pa.Array:
    combined = column.combine_chunks()
    if is_picture:
        fields = [combined.field("bytes"), pa.nulls(len(combined), pa.string())]
        return pa.StructArray.from_arrays([fields[0].cast(pa.binary()), fields[1]], fields=list(PICTURE_TYPE))
    return combined


def _completed(table: pa.Table, features: dict[str, Any], info: LeRobotInfo) -> tuple[pa.Table, dict[str, Any]]:
    """A published table with the columns that ours have: labels are the actions, nobody intervened, the last step succeeds."""
    require_gripper(rows_of_column(table[names.ACTION]), info)
    last_N = np.eye(1, info.num_steps, info.num_steps - 1, dtype=np.bool_)[0]
    own = names.data_features("png", info.resolution, info.fps)
    columns = {
        names.LABEL: table[names.ACTION],
        names.INTERVENTION: pa.array(np.zeros(info.num_steps, np.bool_)),
        names.REWARD: pa.array(last_N.astype(np.float32)),
        names.SUCCESS: pa.array(last_N),
        names.DONE: pa.array(last_N),
    }
    for name, column in columns.items():
        if name not in table.column_names:
            table = table.append_column(name, column)
            features[name] = own[name]
    return table, features


def _value_counts(info: LeRobotInfo, replay: dict[str, Any]) -> dict[str, Int64]:
    stored = {name.removeprefix("value_counts/"): values for name, values in replay.items() if name.startswith("value_counts/")}
    if stored:
        return {name: as_counts(values) for name, values in stored.items()}
    pictures_NVHWC = LeRobotPictures().read_episode(info)
    return {IMAGE_FEATURES[view]: count_values(pictures_NVHWC[:, column]) for column, view in enumerate(VIEWS)}


def _description(info: LeRobotInfo) -> dict[str, Any]:
    if info.layout.ours:
        return {name: info.entry.row[name] for name in DESCRIPTION}
    spec = info.spec
    values = (info.outcome.value, "published", spec.suite, spec.task, spec.init, spec.scene_seed, True, True, False)
    return dict(zip(DESCRIPTION, (*values, json.dumps(spec.to_dict()), json.dumps(published_provenance(info)))))


def in_files(episodes: Iterable[EpisodeParts]) -> Iterator[list[EpisodeParts]]:
    """Groups of episodes that share their files, as large as LeRobot's limits allow, at least one each."""
    group: list[EpisodeParts] = []
    data = video = 0
    for parts in episodes:
        own_data, own_video = parts.table.nbytes, max((len(content) for content in parts.videos.values()), default=0)
        if group and (data + own_data > names.DATA_FILE_MIB * 2**20 or video + own_video > names.VIDEO_FILE_MIB * 2**20):
            yield group
            group, data, video = [], 0, 0
        group.append(parts)
        data, video = data + own_data, video + own_video
    if group:
        yield group
