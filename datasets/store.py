"""A folder of episodes, one file each, and LIBERO's one file per task made from it.

    FOLDER/episode_000123.hdf5     episode 123 of the recipe's list; written whole or not at all, in any order
    FOLDER/.lock                   held by the one process that writes

Numbers come from the recipe, not from who finished first, so the folder's content does not depend on timing. After a
`kill -9` every finished episode is there and readable, and recording goes on with the numbers that are missing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py

from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.files import attribute, open_file, storage_error, subgroup
from vla_rl.datasets.hdf5 import (
    DEFAULT_COMPRESSION,
    Compression,
    data_group,
    episode_infos,
    read_episode,
    write_episode,
)
from vla_rl.datasets.lerobot_catalog import lerobot_folder
from vla_rl.datasets.lerobot_read import lerobot_infos
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import Episode
from vla_rl.telemetry.files import atomic_path, only_writer

_NAME = re.compile(r"episode_(\d{6,})\.hdf5")
_SHARED = ("env_name", "problem_info", "env_args", "bddl_file_name", "macros_image_convention", "alignment", "format")
"""Attributes of `/data` in which episodes of one merged file must agree."""


class EpisodeStore:
    """A folder of numbered episode files."""

    def __init__(self, folder: str | Path, compression: Compression = DEFAULT_COMPRESSION) -> None:
        self.folder = Path(folder)
        self._compression: Compression = compression

    def path(self, number: int) -> Path:
        """Where episode `number` is or will be."""
        return self.folder / f"episode_{number:06d}.hdf5"

    def numbers(self) -> list[int]:
        """Numbers of the finished episodes, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("episode_*.hdf5"))
        return sorted(int(match[1]) for match in matches if match)

    def write(self, number: int, episode: Episode, frame_every: int) -> int:
        """Write one episode atomically; returns bytes written. Raises DatasetError and StorageError, see `write_episode`."""
        return write_episode(self.path(number), episode, frame_every, self._compression)

    def load(self, number: int) -> Episode:
        """An episode that was written. Raises DatasetError for a damaged file."""
        return read_episode(self.path(number))

    def remove(self, number: int) -> None:
        """Delete an episode's file, if it is there."""
        self.path(number).unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only writer: lock the folder (also against other processes) and remove what a killed writer left unfinished.

        Raises FolderInUseError when another process is writing here. The lock ends with the process, however that ends.
        """
        with only_writer(self.folder):
            for leftover in self.folder.glob(".episode_*.hdf5.*.tmp"):
                leftover.unlink()
            yield


def dataset_files(paths: Sequence[str | Path]) -> list[Path]:
    """The HDF5 files that `paths` name: each a file, a folder of files, or a run directory with a folder `episodes`.

    Raises DatasetError naming a path that does not exist or holds no episode, or a file that is named twice.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        folder = path / "episodes" if (path / "episodes").is_dir() else path
        found = [path] if path.is_file() else sorted(folder.glob("[!.]*.hdf5"))
        if not found:
            raise DatasetError(
                f"{path}: {'holds no .hdf5 file' if path.exists() else 'does not exist'}; give a file, a folder or a collect run"
            )
        files += found
    require_once([str(file) for file in files])
    return files


def list_episodes(paths: Sequence[str | Path]) -> list[EpisodeInfo]:
    """All episodes of `paths` (HDF5 files, folders of them, LeRobot folders, run directories), in their order. Raises DatasetError.

    Within a path: by file name and demo number, or by the recipe's number.
    """
    require_once([str(Path(path)) for path in paths])
    found: list[EpisodeInfo] = []
    for path in map(Path, paths):
        folder = lerobot_folder(path)
        found += lerobot_infos(folder) if folder else [info for file in dataset_files([path]) for info in episode_infos(file)]
    require_once([info.name for info in found])
    return found


def require_once(named: Sequence[str]) -> None:
    """Raise DatasetError for what is named twice."""
    twice = sorted(name for name, count in Counter(named).items() if count > 1)
    if twice:
        raise DatasetError(f"named twice: {', '.join(twice[:3])}; its episodes would count double")


def require_some(infos: Sequence[EpisodeInfo]) -> None:
    """Raise DatasetError for a dataset that has no episode: LeRobot's folders can be empty."""
    if not infos:
        raise DatasetError("there is no episode in it; record some first (vla-rl collect)")


def merge(paths: Sequence[str | Path], folder: str | Path) -> list[Path]:
    """Write LIBERO's form, one `TASK_demo.hdf5` per task with `demo_0`, `demo_1`, ..., from episodes of `paths`.

    Arrays are copied as they are; each file is written atomically. Returns the files' paths.
    Raises DatasetError when episodes of one task disagree on what is declared per file, StorageError on a full disk.
    """
    by_task: dict[str, list[EpisodeInfo]] = defaultdict(list)
    for info in list_episodes(paths):
        by_task[_task_name(info)].append(info)
    return [_merge_task(Path(folder) / f"{name}_demo.hdf5", infos) for name, infos in sorted(by_task.items())]


def _task_name(info: EpisodeInfo) -> str:
    """LIBERO's name of the task (of its BDDL file); the instruction where a goal of our own replaces the task's."""
    if info.spec.goal or info.spec.prompt:
        return re.sub(r"\W+", "_", f"{info.spec.suite}_{info.spec.task}_{info.prompt}".lower()).strip("_")
    with open_file(info.path) as file:
        bddl_file = attribute(data_group(file), "bddl_file_name")
    return Path(bddl_file).stem or f"{info.spec.suite}_{info.spec.task}"


def _merge_task(path: Path, infos: Sequence[EpisodeInfo]) -> Path:
    needed = sum(file.stat().st_size for file in {info.path for info in infos})
    try:
        with atomic_path(path) as temporary, h5py.File(temporary, "w") as output:
            _copy_episodes(output.create_group("data"), infos)
    except (OSError, RuntimeError) as error:  # HDF5 reports a failed flush as RuntimeError
        raise storage_error(path, needed, error) from error
    return path


def _copy_episodes(data: h5py.Group, infos: Sequence[EpisodeInfo]) -> None:
    for number, info in enumerate(infos):
        with open_file(info.path) as source:
            group = data_group(source)
            _share_attributes(data, group, info)
            source.copy(subgroup(group, info.demo), data, name=f"demo_{number}")
    data.attrs.update(num_demos=len(infos), total=sum(info.num_steps for info in infos))


def _share_attributes(data: h5py.Group, source: h5py.Group, info: EpisodeInfo) -> None:
    for name in _SHARED:
        value = attribute(source, name)
        if name not in data.attrs:
            data.attrs[name] = value
        elif data.attrs[name] != value:
            raise DatasetError(f"{info.name}: {name} is {value!r}, but {data.attrs[name]!r} in the episodes before it; merge them apart")
