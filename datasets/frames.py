"""Where the pictures of a dataset come from: read from the files when asked, or kept in memory.

Both give the same bytes, in the orientation of the episodes' conventions.

Shape legend: see `vla_rl/episode.py`; B batch, V views, F pictures of all episodes together.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from vla_rl.datasets import schema
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.files import damaged, dataset, subgroup
from vla_rl.datasets.lerobot_read import LeRobotInfo, LeRobotPictures
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import VIEWS, Int64, UInt8

OPEN_FILES = 256
"""Files that one process keeps open."""


class Frames(Protocol):
    """Pictures by (episode, position in the episode's pictures)."""

    def read(self, episodes_B: Int64, positions_B: Int64) -> UInt8:
        """uint8[B, V, H, W, 3], views in the order of `VIEWS`."""
        ...


class FileFrames:
    """Pictures read from their files at every call, in constant memory.

    Files are opened when they are first needed, in the process that needs them: an instance can be sent to a spawned worker.
    """

    def __init__(self, infos: Sequence[EpisodeInfo]) -> None:
        self._infos = list(infos)
        self._hdf5 = _Hdf5Pictures()
        self._lerobot = LeRobotPictures()

    def read(self, episodes_B: Int64, positions_B: Int64) -> UInt8:
        """uint8[B, V, H, W, 3]. Raises DatasetError for a file that is damaged or gone."""
        infos = [self._infos[episode] for episode in episodes_B.tolist()]
        size = infos[0].resolution if infos else 0
        pictures = np.empty((len(infos), len(VIEWS), size, size, 3), np.uint8)
        in_folders = np.array([isinstance(info, LeRobotInfo) for info in infos], np.bool_)
        for row in np.flatnonzero(~in_folders):
            self._hdf5.read(infos[row], int(positions_B[row]), pictures[row])
        if in_folders.all():
            self._lerobot.read([info for info in infos if isinstance(info, LeRobotInfo)], positions_B, pictures)
        elif in_folders.any():
            of_folders = pictures[in_folders]
            self._lerobot.read([info for info in infos if isinstance(info, LeRobotInfo)], positions_B[in_folders], of_folders)
            pictures[in_folders] = of_folders
        return pictures

    def read_episode(self, episode: int) -> UInt8:
        """uint8[F, V, H, W, 3]: all pictures of one episode."""
        count = self._infos[episode].num_frames
        return self.read(np.full(count, episode), np.arange(count))


class _Pictures:
    """The pictures of one view in an HDF5 file."""

    def __init__(self, stored: h5py.Dataset) -> None:
        self._stored = stored
        self._shape: tuple[int, ...] = stored.shape[1:]
        self._deflated = stored.compression == "gzip" and not stored.shuffle and stored.chunks == (1, *self._shape)

    def read(self, position: int) -> np.ndarray:
        """uint8[H, W, 3]. Deflated pictures are taken as they lie, which is faster than through HDF5's filters."""
        if self._deflated:
            skipped_filters, content = self._stored.id.read_direct_chunk((position, 0, 0, 0))
            if not skipped_filters:
                return np.frombuffer(zlib.decompress(content), np.uint8).reshape(self._shape)
        return self._stored[position]


class _Hdf5Pictures:
    """Pictures of HDF5 files, which stay open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, h5py.File] = OrderedDict()
        self._views: dict[Path, dict[str, list[_Pictures]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": OrderedDict(), "_views": {}}

    def read(self, info: EpisodeInfo, position: int, pictures_VHWC: UInt8) -> None:
        """Fill uint8[V, H, W, 3] with one picture of each view, in the orientation it was observed in."""
        try:
            for view, pictures in enumerate(self._datasets(info)):
                pictures_VHWC[view] = schema.reorient(pictures.read(position), info.conventions.orientation)
        except (OSError, zlib.error) as error:
            raise damaged(info.path, error) from error

    def _datasets(self, info: EpisodeInfo) -> list[_Pictures]:
        """The pictures of each view, opened once: that takes as long as decoding one."""
        file = self._file(info.path)
        demos = self._views.setdefault(info.path, {})
        if info.demo not in demos:
            group = subgroup(file, f"data/{info.demo}/obs")
            demos[info.demo] = [_Pictures(dataset(group, schema.IMAGE_KEYS[name])) for name in VIEWS]
        return demos[info.demo]

    def _file(self, path: Path) -> h5py.File:
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                oldest, file = self._open.popitem(last=False)
                self._views.pop(oldest, None)
                file.close()
            self._open[path] = h5py.File(path, "r", rdcc_nbytes=0)  # pictures come at random: none is worth 8 MiB a dataset for a cache
        self._open.move_to_end(path)
        return self._open[path]


class MemoryFrames:
    """All pictures in memory as uint8, read once."""

    def __init__(self, infos: Sequence[EpisodeInfo], limit_gib: float) -> None:
        counts = np.array([info.num_frames for info in infos], np.int64)
        size = infos[0].resolution
        needed = int(counts.sum()) * len(VIEWS) * size * size * 3
        if needed > limit_gib * 2**30:
            raise DatasetError(
                f"{len(infos)} episodes hold {needed / 2**30:.2f} GiB of pictures, cache_limit_gib is {limit_gib}; "
                "raise it, or set cache: false and workers: 2"
            )
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._pictures = np.empty((int(counts.sum()), len(VIEWS), size, size, 3), np.uint8)
        files = FileFrames(infos)
        for episode in range(len(infos)):
            self._pictures[self._starts[episode] : self._starts[episode + 1]] = files.read_episode(episode)

    def read(self, episodes_B: Int64, positions_B: Int64) -> UInt8:
        """uint8[B, V, H, W, 3]."""
        return self._pictures[self._starts[episodes_B] + positions_B]
