"""Files below the datasets: whole-or-nothing writing, opening with errors that help, and typed access to HDF5."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vla_rl.datasets.schema import DatasetError, StorageError
from vla_rl.telemetry.files import atomic_path

ROOM_EPISODES = 10
"""Recording stops when the disk has room for fewer episodes than this."""


def write_bytes(path: Path, content: bytes) -> int:
    """Write a file atomically; returns its size. Raises StorageError naming the file, what is needed and what is free."""
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise storage_error(path, len(content), error) from error
    return len(content)


def storage_error(path: Path, needed: int, error: Exception) -> StorageError:
    """A StorageError that says what was to be written where, and what is free there."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free_mib = shutil.disk_usage(folder).free / 2**20
    reason = getattr(error, "strerror", None) or error
    return StorageError(
        f"{path}: cannot write {needed / 2**20:.2f} MiB ({reason}); {free_mib:.2f} MiB are free in {folder}. "
        "Files that were finished before are whole. Make room (or raise the quota or file size limit) and start again: it resumes."
    )


def require_room(folder: Path, episode_bytes: int) -> None:
    """Raise StorageError while there still is room for some episodes: what runs now could then be written, and nothing is lost."""
    free = shutil.disk_usage(folder).free
    if free < ROOM_EPISODES * episode_bytes:
        raise StorageError(
            f"{folder}: {free / 2**20:.0f} MiB free, an episode takes {episode_bytes / 2**20:.1f} MiB: stopped before the disk is full. "
            "Everything finished is written. Make room and start again: it resumes."
        )


@contextmanager
def open_file(path: str | Path) -> Iterator[h5py.File]:
    """Open a dataset file for reading.

    Raises FileNotFoundError, and DatasetError with the remedy for a file that is cut off or is no HDF5 file, here or while it is read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such dataset file")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DatasetError:
    """The error for a file that HDF5 cannot read."""
    size = f"{path.stat().st_size} bytes" if path.exists() else "it is gone"
    return DatasetError(
        f"{path}: not a whole HDF5 file ({error}; {size}). It was cut off or overwritten after it was written. "
        "Restore it from a copy, or delete it: collecting again into the same run directory records only what is missing."
    )


def subgroup(group: h5py.Group, name: str) -> h5py.Group:
    """`group[name]`, a group. Raises DatasetError naming the file and what is there."""
    found = _member(group, name)
    if not isinstance(found, h5py.Group):
        raise DatasetError(f"{group.file.filename}: {group.name}/{name} is an array, expected a group")
    return found


def dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """`group[name]`, an array on disk. Raises DatasetError naming the file and what is there."""
    found = _member(group, name)
    if not isinstance(found, h5py.Dataset):
        raise DatasetError(f"{group.file.filename}: {group.name}/{name} is a group, expected an array")
    return found


def array(group: h5py.Group, name: str) -> np.ndarray:
    """All of `group[name]` in memory."""
    return np.asarray(dataset(group, name)[()])


def attribute(group: h5py.Group, name: str) -> Any:
    """An attribute. Raises DatasetError naming the file and the attributes there are."""
    if name not in group.attrs:
        raise DatasetError(
            f"{group.file.filename}: {group.name} has no attribute {name!r}; it has {', '.join(sorted(group.attrs)) or 'none'}. "
            "The file is not of this format, or an older one: record or import it again."
        )
    return group.attrs[name]


def _member(group: h5py.Group, name: str) -> Any:
    if name not in group:
        raise DatasetError(f"{group.file.filename}: {group.name} has no {name!r}; it has {', '.join(sorted(group)) or 'nothing'}")
    return group[name]
