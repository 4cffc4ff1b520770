"""Kills and full disks while a LeRobot folder is written: finished episodes stay readable, by us and by LeRobot, and writing goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.bench.crashes import problems_of
from vla_rl.datasets.collected import collected_store
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.lerobot_format import Pictures
from vla_rl.datasets.lerobot_store import LeRobotStore, _State
from vla_rl.datasets.schema import StorageError
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import Episode
from vla_rl.telemetry.files import FolderInUseError, append_jsonl

MakeEpisode = Callable[..., Episode]
Limit = Callable[[], AbstractContextManager[None]]
WriteFolder = Callable[..., LeRobotStore]
SeenByLeRobot = Callable[..., Any]
KillWriter = Callable[..., list[int]]
WRITES_OF_AN_EPISODE = 9
"""Two videos, replay, data, tasks (the first one only), episodes, info, stats, and one to spare."""


class Killed(BaseException):
    """Stands for a SIGKILL between two renames."""


@pytest.mark.parametrize("writes", range(1, WRITES_OF_AN_EPISODE))
def test_stopped_between_any_two_files_lerobot_loads_the_finished_episodes(
    write_folder: WriteFolder, make_episode: MakeEpisode, seen_by_lerobot: SeenByLeRobot, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """After `writes` files of the second episode, as a kill there leaves the folder; then the next writer mends it."""
    episodes = [make_episode(seed=seed, steps=5, size=16) for seed in range(2)]
    store = write_folder(episodes[:1], "h264")
    left = writes
    replace = os.replace

    def stop(source: Any, target: Any) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    monkeypatch.setattr("vla_rl.datasets.lerobot_store._State.write_statistics", lambda self: None)  # a killed process writes none
    try:
        with store.writing():
            store.write(1, episodes[1], 1)
    except Killed:
        pass
    monkeypatch.undo()
    ours, theirs = list_episodes([store.folder]), seen_by_lerobot(store.folder)
    assert theirs.num_episodes <= len(ours) in (1, 2), "LeRobot sees an episode when its totals are written, after everything else"
    assert all(load_episode(info).num_steps == 5 for info in ours)
    assert np.array_equal(theirs[4]["action"].numpy(), episodes[0].actions_NA()[4]) and len(theirs) in (5, 10)
    with store.writing():
        store.write(1, episodes[1], 1)
    again = seen_by_lerobot(store.folder)
    assert (len(again), store.numbers()) == (10, [0, 1])
    assert np.array_equal(again[9]["action"].numpy(), episodes[1].actions_NA()[4])
    assert len(list(store.folder.rglob("file-*"))) == 10 and not list(store.folder.rglob(".*.tmp"))


def _write_for_ever(run_dir: Path, make: MakeEpisode, pictures: Pictures, reports: Connection) -> None:
    store = collected_store(run_dir, "both", pictures, "none")
    with store.writing():
        for number in range(len(store.numbers()), 10_000):
            store.write(number, make(seed=number, steps=8, size=64), 1)
            reports.send(number)


@pytest.mark.faults
@pytest.mark.parametrize("pictures", ["png", "h264"])
def test_sigkill_while_both_formats_are_written(
    tmp_path: Path, make_episode: MakeEpisode, seen_by_lerobot: SeenByLeRobot, kill_writer: KillWriter, pictures: Pictures
) -> None:
    """Three moments here; docs/results/crash_safety has fifty."""
    for moment_s in np.random.default_rng(0).uniform(0, 0.05, 3):
        reported = kill_writer(_write_for_ever, (tmp_path, make_episode, pictures), 1, float(moment_s))
        for folder in (tmp_path / "episodes", tmp_path / "lerobot"):
            infos = list_episodes([folder])
            numbers = [info.spec.init_number for info in infos]
            assert numbers in (list(range(reported[-1] + 1)), list(range(reported[-1] + 2))), "a gap, or a reported episode is gone"
            assert all(load_episode(info).num_steps == 8 for info in infos[-2:])
        assert seen_by_lerobot(tmp_path / "lerobot").num_episodes in (reported[-1] + 1, reported[-1] + 2)


@pytest.mark.faults
def test_a_full_disk_names_the_file_and_loses_nothing(write_folder: WriteFolder, make_episode: MakeEpisode, files_of_4_kib: Limit) -> None:
    store = write_folder([make_episode()])
    with store.writing():
        message = r"file-001\.parquet: cannot write .* MiB \(File too large\); .* MiB are free in"
        with files_of_4_kib(), pytest.raises(StorageError, match=message):
            store.write(1, make_episode(), 1)
        assert [info.num_steps for info in list_episodes([store.folder])] == [10]
        store.write(1, make_episode(seed=1, steps=12), 1)
    assert [info.num_steps for info in list_episodes([store.folder])] == [10, 12]


def test_only_one_process_writes(write_folder: WriteFolder) -> None:
    store = write_folder([])
    with store.writing(), pytest.raises(FolderInUseError, match="is being written to by"), LeRobotStore(store.folder).writing():
        pass


@pytest.mark.parametrize("number", [0, 1, 2])
def test_undo_takes_an_episode_out_and_later_ones_move_up(
    write_folder: WriteFolder, make_episode: MakeEpisode, seen_by_lerobot: SeenByLeRobot, number: int
) -> None:
    store = write_folder([make_episode(seed=seed, steps=5 + seed) for seed in range(3)])
    left = [n for n in range(3) if n != number]
    with store.writing():
        store.remove(number)
        store.write(7, make_episode(seed=9, steps=4), 1)
        store.remove(5)  # a take that was not kept: there is nothing to take out
    assert store.numbers() == [*left, 7] and [store.load(n).num_steps for n in (*left, 7)] == [*(5 + n for n in left), 4]
    theirs = seen_by_lerobot(store.folder)
    assert len(theirs) == sum(5 + n for n in left) + 4
    rows = np.stack([theirs[i]["action"].numpy() for i in range(len(theirs))])
    assert np.array_equal(rows, np.concatenate([store.load(n).actions_NA() for n in (*left, 7)]))
    assert np.array_equal(theirs.meta.stats["action"]["max"], rows.max(0))


@pytest.mark.parametrize("removals", [0, 1, 2])
def test_killed_during_an_undo_nothing_but_its_episode_may_be_gone(
    write_folder: WriteFolder, make_episode: MakeEpisode, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    """After so many episodes have left their place: the next writer brings those that were copied aside back."""
    store = write_folder([make_episode(seed=seed, steps=5 + seed) for seed in range(4)])
    left, remove_last = removals, _State.remove_last

    def stop(self: _State) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        remove_last(self)

    with pytest.raises(Killed), store.writing():
        monkeypatch.setattr(_State, "remove_last", stop)
        store.remove(1)
    monkeypatch.undo()
    with store.writing():
        pass
    assert store.numbers() == [0, 1, 2, 3] and [store.load(n).num_steps for n in range(4)] == [5, 6, 7, 8]
    assert not (store.folder / ".aside").exists()


def test_the_crash_benchmark_sees_a_loss(tmp_path: Path, make_episode: MakeEpisode) -> None:
    """What `vla-rl bench crashes` counts: an episode that was counted and is gone, one too many, one that is not whole."""
    store = collected_store(tmp_path, "both", "png", "none")
    with store.writing():
        for number in range(4):
            store.write(number, make_episode(seed=number), 1)
    for number in range(3):
        append_jsonl(tmp_path / "episodes.jsonl", {"number": number, "kept": True})
    assert problems_of(tmp_path, newest=4) == [], "one that was written and not yet counted is right"
    (tmp_path / "episodes/episode_000001.hdf5").unlink()
    append_jsonl(tmp_path / "episodes.jsonl", {"number": 9, "kept": True})
    assert problems_of(tmp_path, newest=4) == ["episodes: [1, 9] were counted and are gone", "lerobot: [9] were counted and are gone"]
