"""Checks of what files say of themselves against what they hold: rows, pictures, timestamps, statistics.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.check_numbers import TIME_TOLERANCE_S
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.files import array, dataset, open_file, subgroup
from vla_rl.datasets.findings import Finding
from vla_rl.datasets.lerobot_catalog import open_catalog, read_table
from vla_rl.datasets.lerobot_read import LeRobotInfo, read_rows
from vla_rl.datasets.lerobot_tables import rows_of_column
from vla_rl.datasets.schema import IMAGE_KEYS, DatasetError
from vla_rl.datasets.tally import vector_statistics
from vla_rl.datasets.video import VideoFiles
from vla_rl.episode import Float64
from vla_rl.telemetry.files import DamagedFileError, read_json

RECORD_AGAIN = "record it again, or leave it out: vla-rl data filter --without-numbers"
STATISTICS_TOLERANCE = 1e-3
"""Of the range of a dimension; float32 statistics of other writers differ by 1e-6 of it."""
SHOWN_CHARACTERS = 80
"""Of what stands where numbers should."""


def file_findings(infos: Sequence[EpisodeInfo]) -> Iterator[Finding]:
    """Rows and pictures that are missing, timestamps off the rate."""
    videos = VideoFiles()
    for info in infos:
        yield from _lerobot(info, videos) if isinstance(info, LeRobotInfo) else _hdf5(info)


def _hdf5(info: EpisodeInfo) -> Iterator[Finding]:
    with open_file(info.path) as file:
        demo = subgroup(file, f"data/{info.demo}")
        rows = {name: len(array(demo, name)) for name in ("actions", "states", "rewards")}
        index_F = array(demo, "obs/frame_index")
        observations = subgroup(demo, "obs")
        pictures = {view: len(dataset(observations, key)) if key in observations else 0 for view, key in IMAGE_KEYS.items()}
    short = {name: count for name, count in rows.items() if count != info.num_steps}
    if short:
        yield Finding("dropped-tail", info.name, f"declares {info.num_steps} control steps, has {short}", RECORD_AGAIN)
    expected = np.arange(0, info.num_steps, info.frame_every)
    if not np.array_equal(index_F, expected) or any(count != len(expected) for count in pictures.values()):
        text = f"declares {len(expected)} pictures (of {info.num_steps} steps every {info.frame_every}.), has {len(index_F)}: {pictures}"
        yield Finding("missing-picture", info.name, text, "re-simulate them: vla-rl replay DATASET --fill-into FOLDER")


def _lerobot(info: LeRobotInfo, videos: VideoFiles) -> Iterator[Finding]:
    entry = info.entry
    try:
        table = read_rows(info, names.POSITIONS)
    except DatasetError as error:
        yield Finding("unreadable", info.name, str(error), "restore the file")
        return
    if table.num_rows != info.num_steps:
        yield Finding(
            "dropped-tail", info.name, f"declares {info.num_steps} control steps, {entry.data_file} has {table.num_rows}", RECORD_AGAIN
        )
        return
    yield from _positions(info, table)
    for feature in info.layout.images.values():
        if feature in entry.videos:
            path, first = entry.videos[feature]
            count = videos.count(path) if path.is_file() else 0
            if count < first + info.num_steps:
                text = f"{feature}: {path} has {max(0, count - first)} of its {info.num_steps} pictures"
                yield Finding("missing-picture", info.name, text, RECORD_AGAIN)
        else:
            missing = sum(size == 0 for size in picture_sizes(entry.data_file, feature)[entry.first_row : entry.first_row + info.num_steps])
            if missing:
                yield Finding("missing-picture", info.name, f"{feature}: {missing} of {info.num_steps} pictures are empty", RECORD_AGAIN)


@lru_cache(maxsize=2)
def picture_sizes(path: Path, feature: str) -> list[int]:
    """Bytes of the picture in each row of a file, 0 where there is none."""
    values = read_table(path, [feature])[feature].to_pylist()
    return [len(value["bytes"] or b"") if value is not None else 0 for value in values]


def _positions(info: LeRobotInfo, table: pa.Table) -> Iterator[Finding]:
    columns = {name: rows_of_column(table[name]).reshape(-1) for name in names.POSITIONS}
    expected = {
        "frame_index": np.arange(info.num_steps),
        "episode_index": np.full(info.num_steps, info.entry.episode_index),
    }
    for name, values in expected.items():
        wrong = np.flatnonzero(columns[name] != values)
        if len(wrong):
            t = int(wrong[0])
            text = f"{name} is {columns[name][t]} in row {t}, expected {values[t]}: rows are missing, doubled or out of order"
            yield Finding("timestamps", info.name, text, RECORD_AGAIN)
    drift = np.abs(columns["timestamp"] - np.arange(info.num_steps) / info.fps)
    if drift.max() > TIME_TOLERANCE_S:
        t = int(np.argmax(drift > TIME_TOLERANCE_S))
        text = f"timestamp {columns['timestamp'][t]:.4f} s in row {t}, at {info.fps} rows per second it is {t / info.fps:.4f} s"
        yield Finding("timestamps", info.name, text, "timestamps follow from the row: convert the dataset, which writes them anew")


def statistics_findings(infos: Sequence[EpisodeInfo]) -> Iterator[Finding]:
    """`meta/stats.json` of every LeRobot folder against its rows, and tasks that have a number but no text."""
    for folder in dict.fromkeys(info.path for info in infos if isinstance(info, LeRobotInfo)):
        of_folder = [info for info in infos if isinstance(info, LeRobotInfo) and info.path == folder]
        yield from _stale(folder, of_folder)
        yield from _untold(folder, of_folder)


def _stale(folder: Path, infos: Sequence[LeRobotInfo]) -> Iterator[Finding]:
    path, remedy = folder / names.STATS_PATH, "write true ones: vla-rl data stats DATASET --write"
    if not path.is_file():
        yield Finding("statistics", str(folder), f"{names.STATS_PATH} is missing", remedy)
        return
    try:
        stored = read_json(path)
    except DamagedFileError as error:
        yield Finding("statistics", str(folder), str(error), f"delete it and {remedy}")
        return
    layout = infos[0].layout
    for feature in (layout.state, layout.action):
        true = vector_statistics(all_rows(infos, feature))
        if feature not in stored:
            yield Finding("statistics", str(folder), f"{names.STATS_PATH} has nothing about {feature}", remedy)
            continue
        yield from (Finding("statistics", str(folder), text, remedy) for text in _differences(feature, stored[feature], true))


def all_rows(infos: Sequence[LeRobotInfo], feature: str) -> np.ndarray:
    """float[R, D]: a feature over all episodes."""
    return np.concatenate([rows_of_column(read_rows(info, (feature,))[feature]) for info in infos])


def _differences(feature: str, stored: Any, true: dict[str, Any]) -> Iterator[str]:
    scale = np.maximum(np.array(true["max"]) - np.array(true["min"]), 1e-6)
    for kind, value in true.items():
        if not isinstance(stored, dict) or kind not in stored:
            yield f"{feature} has no {kind}, which normalisation needs"
            continue
        numbers = _numbers(stored[kind])
        if len(numbers) != len(value) or not np.isfinite(numbers).all():
            yield f"{kind} of {feature} is {str(stored[kind])[:SHOWN_CHARACTERS]}, not {len(value)} finite numbers"
        elif kind == "count":
            if int(numbers[0]) != value[0]:
                yield f"{feature} was computed over {int(numbers[0])} rows, the dataset has {value[0]}"
        else:
            off = np.abs(numbers - np.array(value)) / scale
            if off.max() > STATISTICS_TOLERANCE:
                worst = int(off.argmax())
                yield f"{kind} of {feature}[{worst}] is {numbers[worst]:.4g}, over all rows it is {value[worst]:.4g}"


def _numbers(value: Any) -> Float64:
    """What a file gives as numbers, flat; nothing where they are none."""
    try:
        return np.ravel(np.array(value, np.float64))
    except (TypeError, ValueError):
        return np.zeros(0)


def _untold(folder: Path, infos: Sequence[LeRobotInfo]) -> Iterator[Finding]:
    tasks = open_catalog(folder).tasks
    for info in infos:
        for index in read_rows(info, ("task_index",))["task_index"].unique().to_pylist():
            if index not in tasks:
                text = f"task_index {index} has no text in {names.TASKS_PATH}, which has {sorted(tasks)}"
                yield Finding("task-without-text", info.name, text, "restore meta/tasks.parquet")
            elif info.prompt and tasks[index] != info.prompt:
                text = f"its row of meta/episodes says {info.prompt!r}, its task_index {index} means {tasks[index]!r}"
                yield Finding("task-without-text", info.name, text, "tasks go by task_index: restore meta/tasks.parquet")
