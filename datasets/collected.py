"""Where a run puts its episodes while it collects: HDF5 files, a LeRobot folder, or both, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Protocol

from vla_rl.datasets.hdf5 import Compression
from vla_rl.datasets.lerobot_format import Pictures
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import Episode

Format = Literal["hdf5", "lerobot", "both"]


class Store(Protocol):
    """A place for numbered episodes that one process at a time writes to."""

    def numbers(self) -> list[int]:
        """Numbers of the finished episodes, ascending."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Be the only writer. Raises FolderInUseError when another process is."""
        ...

    def write(self, number: int, episode: Episode, frame_every: int) -> int:
        """Write one episode, whole or not at all; returns bytes written. Raises DatasetError and StorageError."""
        ...

    def load(self, number: int) -> Episode:
        """An episode that was written."""
        ...

    def remove(self, number: int) -> None:
        """Take an episode out again (an operator's undo), if it is there: a take that was not kept never was."""
        ...


class BothStores:
    """The same episodes in both formats; an episode is finished when it is in both."""

    def __init__(self, hdf5: EpisodeStore, lerobot: LeRobotStore) -> None:
        self._hdf5, self._lerobot = hdf5, lerobot

    def numbers(self) -> list[int]:
        """Numbers that both have."""
        return sorted(set(self._hdf5.numbers()) & set(self._lerobot.numbers()))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `Store.writing`."""
        with ExitStack() as stack:
            stack.enter_context(self._hdf5.writing())
            stack.enter_context(self._lerobot.writing())
            yield

    def write(self, number: int, episode: Episode, frame_every: int) -> int:
        """See `Store.write`. After a kill between the two, the HDF5 file is written again, which gives the same bytes."""
        return self._hdf5.write(number, episode, frame_every) + self._lerobot.write(number, episode, frame_every)

    def load(self, number: int) -> Episode:
        """See `Store.load`."""
        return self._hdf5.load(number)

    def remove(self, number: int) -> None:
        """See `Store.remove`."""
        self._lerobot.remove(number)
        self._hdf5.remove(number)


def collected_store(run_dir: Path, format: Format, pictures: Pictures, compression: Compression) -> Store:
    """The store of a run directory: `episodes/` for HDF5, `lerobot/` for LeRobot."""
    hdf5 = EpisodeStore(run_dir / "episodes", compression)
    lerobot = LeRobotStore(run_dir / "lerobot", pictures)
    return {"hdf5": hdf5, "lerobot": lerobot, "both": BothStores(hdf5, lerobot)}[format]
