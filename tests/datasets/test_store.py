"""Folders of episodes: listing, merging, one writer, and what a SIGKILL or a full disk leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path

import h5py
import numpy as np
import pytest

from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.schema import DatasetError, StorageError
from vla_rl.datasets.store import EpisodeStore, list_episodes, merge
from vla_rl.episode import Episode, EpisodeSpec
from vla_rl.telemetry.files import FolderInUseError

MakeEpisode = Callable[..., Episode]
Limit = Callable[[], AbstractContextManager[None]]
MakeStore = Callable[..., EpisodeStore]


def test_lists_by_number_and_ignores_what_is_not_finished(make_store: MakeStore) -> None:
    store = make_store(3)
    (store.folder / ".episode_000009.hdf5.77.tmp").write_bytes(b"half")
    (store.folder / "notes.txt").write_text("not an episode")
    assert store.numbers() == [0, 1, 2]
    assert [info.num_steps for info in list_episodes([store.folder])] == [9, 10, 11]
    assert [info.num_steps for info in list_episodes([store.folder.parent])] == [9, 10, 11], "a run directory stands for its episodes"


def test_paths_without_episodes_and_double_paths_are_named(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(1)
    with pytest.raises(DatasetError, match="nowhere: does not exist"):
        list_episodes([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"empty: holds no \.hdf5 file"):
        list_episodes([tmp_path / "empty"])
    with pytest.raises(DatasetError, match=r"named twice: .*episode_000000\.hdf5"):
        list_episodes([store.folder, store.path(0)])


def test_merge_gives_one_libero_file_per_task(make_store: MakeStore, make_episode: MakeEpisode, tmp_path: Path) -> None:
    store = make_store(3)
    other = EpisodeSpec(
        "libero_object", 7, "sampled:5", "demonstrations", goal="(And (In butter_1 basket_1_contain_region))", prompt="Take the butter!"
    )
    store.write(3, make_episode(seed=9, spec=other), 1)
    files = merge([store.folder], tmp_path / "merged")
    assert [file.name for file in files] == [
        "libero_object_7_take_the_butter_demo.hdf5",
        "pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5",
    ]
    with h5py.File(files[1]) as merged:
        assert sorted(merged["data"]) == ["demo_0", "demo_1", "demo_2"]
        assert (merged["data"].attrs["num_demos"], merged["data"].attrs["total"]) == (3, 9 + 10 + 11)
    for number in range(3):
        single, together = read_episode(store.path(number)), read_episode(files[1], f"demo_{number}")
        assert np.array_equal(single.actions_NA(), together.actions_NA())
        assert np.array_equal(single.frames()[4].images["image"], together.frames()[4].images["image"])
    assert [info.num_steps for info in list_episodes([files[1]])] == [9, 10, 11]


def test_merge_refuses_what_differs_per_file(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(2)
    with h5py.File(store.path(1), "a") as file:
        file["data"].attrs["env_args"] = "{}"
    with pytest.raises(DatasetError, match=r"episode_000001\.hdf5:demo_0: env_args is '\{\}', but"):
        merge([store.folder], tmp_path / "merged")
    assert list((tmp_path / "merged").iterdir()) == []


def test_only_one_process_writes(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    with store.writing(), pytest.raises(FolderInUseError, match=r"is being written to by process \d+"), EpisodeStore(tmp_path).writing():
        pass
    with store.writing():
        pass


def _write_for_ever(folder: Path, make: MakeEpisode, reports: Connection) -> None:
    store = EpisodeStore(folder, "none")
    with store.writing():
        for number in range(len(store.numbers()), 10_000):
            store.write(number, make(seed=number, steps=20, size=64), 1)
            reports.send(number)


@pytest.mark.faults
def test_sigkill_at_any_moment_loses_at_most_the_running_episode(
    tmp_path: Path, make_episode: MakeEpisode, kill_writer: Callable[..., list[int]]
) -> None:
    """Each round kills the writer at another moment after an episode; what it reported is there and whole, and recording goes on."""
    for round_number in range(12):
        reported = kill_writer(_write_for_ever, (tmp_path, make_episode), 2, round_number * 0.0013)
        numbers = EpisodeStore(tmp_path).numbers()
        assert numbers in (list(range(reported[-1] + 1)), list(range(reported[-1] + 2))), "a gap, or a reported episode is not there"
        assert all(read_episode(EpisodeStore(tmp_path).path(number)).num_steps == 20 for number in numbers[-5:])
    with EpisodeStore(tmp_path).writing():
        assert not list(tmp_path.glob(".*.tmp")), "leftovers of killed writers are removed by the next one"


@pytest.mark.faults
def test_a_full_disk_names_file_and_free_space_and_loses_nothing(
    make_store: MakeStore, make_episode: MakeEpisode, files_of_4_kib: Limit
) -> None:
    store = make_store(2)
    before = {number: store.path(number).read_bytes() for number in store.numbers()}
    with files_of_4_kib():
        with pytest.raises(
            StorageError, match=r"episode_000002\.hdf5: cannot write 0\.\d+ MiB \(File too large\); \d+\.\d+ MiB are free in"
        ):
            store.write(2, make_episode(), 1)
        with pytest.raises(StorageError, match=r"_demo\.hdf5: cannot write"):
            merge([store.folder], store.folder.parent / "merged")
    assert {number: store.path(number).read_bytes() for number in store.numbers()} == before
    assert sorted(os.listdir(store.folder)) == ["episode_000000.hdf5", "episode_000001.hdf5"]
    assert os.listdir(store.folder.parent / "merged") == []
    store.write(2, make_episode(), 1)
    assert read_episode(store.path(2)).num_steps == 10


def test_a_merged_file_is_what_robomimic_reads(make_store: MakeStore, tmp_path: Path) -> None:
    """By h5py alone, the steps of robomimic 0.3's `SequenceDataset`, which was run on such a file by hand (docs/datasets.md):
    demos sorted by number, `num_samples`, float32 of `actions`, `rewards`, `dones` and of each `obs/KEY`, one row per step."""
    (path,) = merge([make_store(3).folder], tmp_path / "merged")
    with h5py.File(path, "r", swmr=True, libver="latest") as file:
        demos = list(file["data"].keys())
        demos = [demos[i] for i in np.argsort([int(name[5:]) for name in demos])]
        assert demos == ["demo_0", "demo_1", "demo_2"] and file["data"].attrs["total"] == 30
        for demo in demos:
            length = file[f"data/{demo}"].attrs["num_samples"]
            for key in ("actions", "rewards", "dones", "states"):
                assert file[f"data/{demo}/{key}"][()].astype("float32").shape[0] == length
            for key in ("agentview_rgb", "eye_in_hand_rgb", "ee_pos", "ee_ori", "gripper_states", "joint_states"):
                rows = file[f"data/{demo}/obs/{key}"][()].astype("float32")
                assert len(rows) == length and rows.ndim in (2, 4)
            assert np.abs(file[f"data/{demo}/actions"][()]).max() <= 1
