"""What a LeRobot folder holds: the rows of `meta/episodes`, the tasks, and where each episode's rows and pictures lie.

Folders of v2.0 and v2.1 (one file per episode, JSON lines) are catalogued into the same form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.lerobot_format import Layout, find_layout, is_lerobot, read_info
from vla_rl.datasets.schema import DatasetError


@dataclass(frozen=True)
class Entry:
    """One episode and where it lies."""

    episode_index: int
    length: int
    """N, control steps."""
    task: str
    """Its instruction; empty where the dataset has none."""
    data_file: Path
    first_row: int
    """Position of its first row in `data_file`."""
    videos: Mapping[str, tuple[Path, int]]
    """Picture feature -> file and number of its first picture there; empty for pictures in parquet."""
    row: Mapping[str, Any]
    """Its row of `meta/episodes`, without statistics."""


@dataclass(frozen=True)
class Catalog:
    """A folder's own description of itself, as it is on disk."""

    folder: Path
    info: Mapping[str, Any]
    layout: Layout
    tasks: Mapping[int, str]
    """task_index -> instruction."""
    entries: Sequence[Entry]
    """In order of `episode_index`."""

    @property
    def fps(self) -> int:
        """Declared rows per second."""
        return int(self.info["fps"])

    @property
    def num_frames(self) -> int:
        """Rows of all episodes."""
        return sum(entry.length for entry in self.entries)

    def is_video(self, feature: str) -> bool:
        """Whether a picture feature is kept as video."""
        return self.info["features"][feature]["dtype"] == "video"


def open_catalog(folder: str | Path) -> Catalog:
    """Read what a folder says of itself. Raises DatasetError for a folder that is damaged, or of a layout that is not read."""
    folder = Path(folder)
    info = read_info(folder)
    layout = find_layout(folder, info)
    old = str(info["codebase_version"]).startswith("v2.")
    tasks = _old_tasks(folder) if old else read_tasks(folder)
    entries = _old_entries(folder, info, layout) if old else _entries(folder, info, layout, tasks)
    return Catalog(folder, info, layout, tasks, entries)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A parquet file. Raises DatasetError naming a file that is missing or damaged, or lacks a column."""
    with _naming_damage(path):
        table = pq.read_table(path, columns=list(columns) if columns is not None else None)
    missing = [name for name in columns or () if name not in table.column_names]
    if missing:
        raise DatasetError(f"{path}: lacks column {', '.join(missing)}; it has {', '.join(_column_names(path))}")
    return table


def _column_names(path: Path) -> list[str]:
    with _naming_damage(path):
        return pq.read_schema(path).names


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: is missing; restore it, or the dataset is not whole") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a whole parquet file ({error}); restore it, or record or convert again") from error


def read_tasks(folder: Path) -> dict[int, str]:
    """task_index -> instruction, by index and never by row (LeRobot #2467). Empty where there is no such file."""
    path = folder / names.TASKS_PATH
    if not path.is_file():
        return {}
    table = read_table(path)
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise DatasetError(f"{path}: needs columns task and task_index, it has {', '.join(table.column_names)}")
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist()))


def read_episode_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of `meta/episodes` without statistics, by `episode_index`."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet")):
        kept = [name for name in _column_names(path) if not name.startswith("stats/")]
        rows += read_table(path, kept).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _entries(folder: Path, info: Mapping[str, Any], layout: Layout, tasks: Mapping[int, str]) -> list[Entry]:
    rows = read_episode_rows(folder)
    first_of_file: dict[Path, int] = {}
    entries = []
    for row in rows:
        data_file = folder / info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        start = first_of_file.setdefault(data_file, row["dataset_from_index"])
        first_row = row["dataset_from_index"] - start
        entries.append(
            Entry(
                episode_index=row["episode_index"],
                length=row["length"],
                task=_task_of(row, tasks, data_file, first_row),
                data_file=data_file,
                first_row=first_row,
                videos=_videos(folder, info, layout, row),
                row=row,
            )
        )
    return entries


def _task_of(row: Mapping[str, Any], tasks: Mapping[int, str], data_file: Path, first_row: int) -> str:
    """The episode's instruction: of its row, or, where there is no column `tasks` (LeRobot #4519), by `task_index` of its first step."""
    if row.get("tasks"):
        return row["tasks"][0]
    index = read_table(data_file, ["task_index"])["task_index"][first_row].as_py()
    return tasks.get(index, "")


def _videos(folder: Path, info: Mapping[str, Any], layout: Layout, row: Mapping[str, Any]) -> dict[str, tuple[Path, int]]:
    found = {}
    for feature in layout.images.values():
        if info["features"][feature]["dtype"] == "video":
            place = {part: row[f"videos/{feature}/{part}"] for part in ("chunk_index", "file_index")}
            path = folder / info["video_path"].format(video_key=feature, **place)
            found[feature] = (path, round(row[f"videos/{feature}/from_timestamp"] * info["fps"]))
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DatasetError(f"{path}: is missing; a v2 dataset has it")
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not JSON lines ({error}); it was cut off or overwritten, restore it from a copy") from error


def _old_tasks(folder: Path) -> dict[int, str]:
    return {row["task_index"]: row["task"] for row in _json_lines(folder / "meta/tasks.jsonl")}


def _old_entries(folder: Path, info: Mapping[str, Any], layout: Layout) -> list[Entry]:
    """v2: `data/chunk-000/episode_000000.parquet`, `videos/chunk-000/FEATURE/episode_000000.mp4`."""
    entries = []
    for row in sorted(_json_lines(folder / "meta/episodes.jsonl"), key=lambda row: row["episode_index"]):
        index = row["episode_index"]
        place = {"episode_chunk": index // info.get("chunks_size", names.FILES_PER_CHUNK), "episode_index": index}
        videos = {
            feature: (folder / info["video_path"].format(video_key=feature, **place), 0)
            for feature in layout.images.values()
            if info["features"][feature]["dtype"] == "video"
        }
        task = row["tasks"][0] if row.get("tasks") else ""
        entries.append(Entry(index, row["length"], task, folder / info["data_path"].format(**place), 0, videos, row))
    return entries


def lerobot_folder(path: Path) -> Path | None:
    """The LeRobot folder that a path names: itself, or the folder `lerobot` of a run directory that has no HDF5 episodes."""
    if is_lerobot(path):
        return path
    below = path / "lerobot"
    return below if is_lerobot(below) and not any((path / "episodes").glob("[!.]*.hdf5")) else None
