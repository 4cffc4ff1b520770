"""A LeRobot v3.0 folder that is written while episodes are collected, and is whole after every one of them.

An episode's files are written in this order, each under a temporary name that is fsynced and renamed: videos, `replay/`,
`data/`, `meta/tasks.parquet`, its row in `meta/episodes/` (from here on this project's reader sees it), `meta/info.json` (from here on
`LeRobotDataset` does). A file is never appended to. After a `kill -9` every finished episode is there, files of the one that was
being written are removed by the next writer, and recording goes on.

Episodes have two numbers: `episode_index`, in the order in which they ended (LeRobot reads them by position), and `number`,
the recipe's, by which this project's reader sorts them, so that what is trained on does not depend on who finished first.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from vla_rl.conventions import Conventions
from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.files import write_bytes
from vla_rl.datasets.lerobot_catalog import open_catalog, read_episode_rows, read_table, read_tasks
from vla_rl.datasets.lerobot_copy import copy_episode
from vla_rl.datasets.lerobot_format import Pictures, Place, is_lerobot
from vla_rl.datasets.lerobot_parts import EpisodeParts, parts_of, require_fitting
from vla_rl.datasets.lerobot_read import LeRobotInfo, lerobot_infos, read_lerobot_episode
from vla_rl.datasets.lerobot_tables import (
    as_counts,
    data_file_number,
    episode_table,
    files_of,
    json_bytes,
    parquet_bytes,
    replay_table,
    rows_of_column,
    tasks_table,
)
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.tally import Tally
from vla_rl.datasets.video import join_videos
from vla_rl.episode import Episode
from vla_rl.telemetry.files import only_writer, read_json

STATISTICS_EVERY = 1.02
"""`meta/stats.json` is written again when the dataset has grown by this factor (and at the end): quantiles take all rows."""


ASIDE = ".aside"
"""Folder of episodes that are about to move up."""


class LeRobotStore:
    """A folder that episodes are appended to. Only one process writes at a time, inside `writing()`."""

    def __init__(self, folder: str | Path, pictures: Pictures = "png") -> None:
        self.folder = Path(folder)
        self.pictures: Pictures = pictures
        self._state: _State | None = None

    def numbers(self) -> list[int]:
        """Numbers of the finished episodes, ascending."""
        return sorted(row["number"] for row in read_episode_rows(self.folder) if "number" in row)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only writer: lock the folder, remove what a killed writer left unfinished, and bring the totals up to date.

        Raises FolderInUseError when another process is writing here, DatasetError when the folder is not one of ours.
        """
        with only_writer(self.folder):
            self._state = _State(self.folder, self.pictures)
            try:
                self._bring_back()
                yield
            finally:
                state, self._state = self._state, None
                state.write_statistics()

    def write(self, number: int, episode: Episode, frame_every: int) -> int:
        """Append an episode; returns the bytes written, 0 if `number` is there already.

        Raises DatasetError for sparse pictures and for what `parts_of` refuses, StorageError when it cannot be written.
        """
        if frame_every != 1:
            raise DatasetError(f"frame_every is {frame_every}: a LeRobot dataset has a picture in every row; record with frame_every: 1")
        if number in self._writer().numbers:
            self._writer().write_info()  # what failed may have been this, after the episode's row
            return 0
        return self.append([parts_of(number, episode, self.pictures)])

    def load(self, number: int) -> Episode:
        """An episode that was written. Raises DatasetError for a number that is not there, or a damaged file."""
        found = [info for info in lerobot_infos(self.folder) if info.entry.row["number"] == number]
        if not found:
            raise DatasetError(f"{self.folder}: no episode with number {number}")
        return read_lerobot_episode(found[0])

    def remove(self, number: int) -> None:
        """Take an episode out again, if it is there. Those after it move up, because LeRobot finds episodes by their position.

        They are copied aside first, so that a kill in between loses none.
        """
        writer = self._writer()
        if number not in writer.numbers:
            return
        infos = sorted(lerobot_infos(self.folder), key=lambda info: info.entry.episode_index)
        place = [info.entry.row["number"] for info in infos].index(number)
        if later := infos[place + 1 :]:
            aside = LeRobotStore(self.folder / ASIDE, self.pictures)
            with aside.writing():
                _copy(later, aside)
        while len(writer.numbers) > place:
            writer.remove_last()
        self._bring_back()

    def _bring_back(self) -> None:
        """Append what was copied aside and is missing here."""
        aside = self.folder / ASIDE
        if is_lerobot(aside):
            infos = sorted(lerobot_infos(aside), key=lambda info: info.entry.episode_index)
            _copy([info for info in infos if info.entry.row["number"] not in self._writer().numbers], self)
        if aside.exists():
            shutil.rmtree(aside)

    def append(self, episodes: Sequence[EpisodeParts]) -> int:
        """Append episodes that share their files; returns the bytes written. Raises DatasetError and StorageError."""
        return self._writer().append(episodes)

    def _writer(self) -> _State:
        if self._state is None:
            raise RuntimeError(f"{self.folder}: write inside `with store.writing():`")
        return self._state


class _State:
    """What the writer knows of the folder: totals, tasks, and the tally behind `stats.json`."""

    def __init__(self, folder: Path, pictures: Pictures) -> None:
        self.folder = folder
        self._pictures: Pictures = pictures
        self._rows = read_episode_rows(folder)
        self._tasks = {text: index for index, text in read_tasks(folder).items()}
        self._tasks_changed = not self._tasks
        self._tally = Tally()
        self._features: dict[str, Any] | None = None
        self._fps = 0
        self._conventions = Conventions()
        self._files = 1 + max((data_file_number(row) for row in self._rows), default=-1)
        self._statistics_at = 0
        if self._rows and not (folder / names.OURS_PATH).is_file():
            raise DatasetError(f"{folder}: not written by vla-rl; convert it into a folder of its own with vla-rl data convert")
        self._require_same_pictures()
        self._remove_leftovers()
        if self._rows:
            self._recall()

    def _require_same_pictures(self) -> None:
        path = self.folder / names.OURS_PATH
        if self._rows and (there := read_json(path)["pictures"]) != self._pictures:
            raise DatasetError(
                f"{self.folder}: keeps pictures as {there}, not as {self._pictures}; use another folder, or pictures: {there}"
            )

    @property
    def numbers(self) -> set[int]:
        """Numbers of the finished episodes."""
        return {row["number"] for row in self._rows}

    def _remove_leftovers(self) -> None:
        """Files that no finished episode names: of a writer that was killed."""
        kept = {path for row in self._rows for path in files_of(row)}
        for pattern in ("data/*/*", "replay/*/*", "videos/*/*/*", "meta/*/*/*", "meta/*", "*"):
            for path in self.folder.glob(pattern):
                unfinished = path.name.startswith(".") and path.name.endswith(".tmp")
                orphan = path.suffix in (".parquet", ".mp4") and path.parent.name.startswith("chunk-")
                if path.is_file() and (unfinished or (orphan and str(path.relative_to(self.folder)) not in kept)):
                    path.unlink()

    def _recall(self) -> None:
        """Take features and statistics up from the files, and write `info.json` anew: its writer may have been killed just before."""
        info = names.read_info(self.folder)
        self._features, self._fps = info["features"], info["fps"]
        self._conventions = Conventions.from_dict(read_json(self.folder / names.OURS_PATH)["conventions"])
        for place in map(Place.number, sorted({data_file_number(row) for row in self._rows})):
            replay, data = self.folder / place.path(names.REPLAY_PATH), self.folder / place.path(names.DATA_PATH)
            vectors = [name for name, feature in info["features"].items() if feature["dtype"] not in ("image", "video")]
            self._count_rows(read_table(data, vectors))
            self._count_pictures(read_table(replay))
        self.write_info()

    def _count_rows(self, table: pa.Table) -> None:
        for name in table.column_names:
            if not pa.types.is_struct(table.schema.field(name).type):
                self._tally.add_rows(name, rows_of_column(table[name]))

    def _count_pictures(self, replay: pa.Table) -> None:
        lengths = {row["episode_index"]: row["length"] for row in self._rows}
        for name in replay.column_names:
            if name.startswith("value_counts/"):
                for index, counts in zip(replay["episode_index"].to_pylist(), replay[name].to_pylist()):
                    self._tally.add_pictures(name.removeprefix("value_counts/"), as_counts(counts), lengths[index])

    def append(self, episodes: Sequence[EpisodeParts]) -> int:
        """See `LeRobotStore.append`. After a StorageError the same call again is right: what it remembers follows what is written."""
        if self._features is None:
            self._features, self._fps, self._conventions = dict(episodes[0].features), episodes[0].fps, episodes[0].conventions
            write_bytes(self.folder / names.OURS_PATH, json_bytes(names.ours(self._conventions, self._pictures)))
            self.write_info()
        for parts in episodes:
            require_fitting(self.folder, self._features, self._fps, self._conventions, parts)
        place = Place.number(self._files)
        new_tasks = [parts.prompt for parts in episodes if parts.prompt not in self._tasks]
        self._tasks |= {text: len(self._tasks) + i for i, text in enumerate(dict.fromkeys(new_tasks))}
        self._tasks_changed |= bool(new_tasks)
        rows, tables = self._place(episodes, place)
        size = self._write_videos(episodes, place)
        replay = replay_table(rows, episodes)
        size += write_bytes(self.folder / place.path(names.REPLAY_PATH), parquet_bytes([replay]))
        size += write_bytes(self.folder / place.path(names.DATA_PATH), parquet_bytes(tables))
        if self._tasks_changed:
            self._write_tasks()
            self._tasks_changed = False
        size += write_bytes(self.folder / place.path(names.EPISODES_PATH), parquet_bytes([episode_table(rows, tables, episodes)]))
        self._rows += rows
        self._files += 1
        for table in tables:
            self._count_rows(table)
        self._count_pictures(replay)
        self.write_info()
        if len(self._rows) >= self._statistics_at:
            self.write_statistics()
        return size

    def remove_last(self) -> None:
        """Take the last episode out. Totals shrink before its files go, so that nothing is promised that is not there."""
        last = self._rows.pop()
        self.write_info()
        for path in reversed(files_of(last)):
            (self.folder / path).unlink()
        self._tally = Tally()
        if self._rows:
            self._recall()

    def _place(self, episodes: Sequence[EpisodeParts], place: Place) -> tuple[list[dict[str, Any]], list[pa.Table]]:
        """The rows of `meta/episodes`, and each episode's table with LeRobot's own columns, behind what is there."""
        rows: list[dict[str, Any]] = []
        tables = []
        picture = 0
        for parts in episodes:
            before = [*self._rows, *rows]
            start, index = before[-1]["dataset_to_index"] if before else 0, len(before)
            row: dict[str, Any] = {"episode_index": index, "tasks": [parts.prompt], "length": parts.num_steps}
            row |= {"dataset_from_index": start, "dataset_to_index": start + parts.num_steps}
            for family in ("data", "meta/episodes", *(f"videos/{feature}" for feature in parts.videos)):
                row |= {f"{family}/chunk_index": place.chunk_index, f"{family}/file_index": place.file_index}
            for feature in parts.videos:
                row[f"videos/{feature}/from_timestamp"] = picture / self._fps
                row[f"videos/{feature}/to_timestamp"] = (picture + parts.num_steps) / self._fps
            picture += parts.num_steps
            rows.append(row | dict(parts.description))
            tables.append(self._with_positions(parts, index, start))
        return rows, tables

    def _with_positions(self, parts: EpisodeParts, episode_index: int, start: int) -> pa.Table:
        steps = list(range(parts.num_steps))
        columns = {
            "timestamp": pa.array([step / self._fps for step in steps], pa.float32()),
            "frame_index": pa.array(steps, pa.int64()),
            "episode_index": pa.array([episode_index] * len(steps), pa.int64()),
            "index": pa.array([start + step for step in steps], pa.int64()),
            "task_index": pa.array([self._tasks[parts.prompt]] * len(steps), pa.int64()),
        }
        table = parts.table
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table

    def _write_videos(self, episodes: Sequence[EpisodeParts], place: Place) -> int:
        size = 0
        for feature in episodes[0].videos:
            content = join_videos([parts.videos[feature] for parts in episodes], self._fps)
            size += write_bytes(self.folder / place.path(names.VIDEO_PATH, video_key=feature), content)
        return size

    def _write_tasks(self) -> None:
        texts = sorted(self._tasks, key=lambda text: self._tasks[text])
        write_bytes(self.folder / names.TASKS_PATH, parquet_bytes([tasks_table(texts)]))

    def write_info(self) -> None:
        """Bring `info.json` up to date."""
        assert self._features is not None
        frames = self._rows[-1]["dataset_to_index"] if self._rows else 0
        info = names.new_info(self._features, self._fps, len(self._rows), frames, len(self._tasks))
        write_bytes(self.folder / names.INFO_PATH, json_bytes(info))

    def write_statistics(self) -> None:
        """Bring `stats.json` up to date."""
        if self._rows:
            write_bytes(self.folder / names.STATS_PATH, json_bytes(self._tally.statistics()))
            self._statistics_at = math.ceil(STATISTICS_EVERY * len(self._rows))


def _copy(infos: Sequence[LeRobotInfo], store: LeRobotStore) -> None:
    """Append episodes as they are stored, under their own numbers."""
    for info in infos:
        store.append([copy_episode(info, open_catalog(info.path), info.entry.row["number"])])
