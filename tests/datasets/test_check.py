"""`data check`: real recordings pass in both formats, and each fault that is planted is found under its own name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_rl.datasets.check import check
from vla_rl.datasets.check_numbers import Motion
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.orientation import thumbnail
from vla_rl.datasets.store import list_episodes

Folders = dict[str, Path]
Spoil = Callable[[Path], None]


@pytest.mark.parametrize("format", ["hdf5", "lerobot"])
def test_real_recordings_pass(reach_folders: Folders, format: str) -> None:
    report = check([reach_folders[format]])
    assert report.findings == (), report.text()
    assert report.episodes == 6 and report.text().endswith("nothing is wrong with them")


def edit_arrays(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray], only_first: bool = False) -> None:
    """Change a dataset of every demo in place, whatever the format would refuse to write."""
    for path in sorted(folder.glob("*.hdf5"))[: 1 if only_first else None]:
        with h5py.File(path, "a") as file:
            demo = file["data/demo_0"]
            values = change(demo[name][()])
            del demo[name]
            demo[name] = values


def edit_column(folder: Path, name: str, change: Callable[[list], list], pattern: str = "data/*/file-000.parquet") -> None:
    """Change a column of the first file of a family."""
    (path,) = folder.glob(pattern)
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    column = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)
    pq.write_table(table.set_column(place, name, column), path, compression="NONE", use_dictionary=False)


def shifted(values: np.ndarray) -> np.ndarray:
    """Every row one step earlier: as in files whose observations lie after their actions."""
    return np.concatenate([values[1:], values[-1:]])


def repeat_third_picture(values: np.ndarray) -> np.ndarray:
    values[3] = values[2]
    return values


def with_value(row: int, column: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[row, column] = value
        return values

    return change


def cut_row_out(folder: Path) -> None:
    """A control step that was never written, in the rows and in the count."""
    path = max(folder.glob("*.hdf5"), key=lambda path: path.stat().st_size)
    with h5py.File(path, "a") as file:
        demo = file["data/demo_0"]
        for name in ("actions", "action_labels", "states", "robot_states", "rewards", "dones", "intervention"):
            values = np.delete(demo[name][()], 2, axis=0)
            del demo[name]
            demo[name] = values
        for name in list(demo["obs"]):
            values = np.delete(demo["obs"][name][()], 2, axis=0)
            del demo["obs"][name]
            demo["obs"][name] = np.arange(len(values)) if name == "frame_index" else values
        lengths = demo["chunk_lengths"][()]
        del demo["chunk_lengths"], demo["chunk_weights_version"]
        demo["chunk_lengths"], demo["chunk_weights_version"] = lengths[1:], np.zeros(len(lengths) - 1, np.int64)
        demo.attrs["num_samples"] = demo.attrs["num_frames"] = len(demo["actions"])


def late_observations(folder: Path) -> None:
    for name in ("robot_states", "obs/ee_pos", "obs/ee_ori", "obs/gripper_states", "obs/joint_states"):
        edit_arrays(folder, name, shifted)


def no_motion(folder: Path) -> None:
    still = np.float64([0, 0, 0, 0, 0, 0, -1])
    edit_arrays(folder, "actions", lambda values: np.tile(still, (len(values), 1)), only_first=True)


def turned_pictures(folder: Path) -> None:
    for name in ("obs/agentview_rgb", "obs/eye_in_hand_rgb"):
        edit_arrays(folder, name, lambda values: values[:, ::-1], only_first=True)


def fingers_move_with(sign: float) -> Callable[[Path], None]:
    """Fingers that follow the gripper action of the step before, closing at `sign`."""

    def spoil(folder: Path) -> None:
        for path in folder.glob("*.hdf5"):
            with h5py.File(path, "a") as file:
                demo = file["data/demo_0"]
                gripper_N = np.where(np.arange(len(demo["actions"])) % 4 < 2, -1.0, 1.0)
                gap_N = np.concatenate([[0.02], 0.02 - 0.005 * sign * np.cumsum(gripper_N)[:-1]])
                demo["actions"][:, 6] = gripper_N
                demo["robot_states"][:, 0] = demo["obs/gripper_states"][:, 0] = gap_N
                demo["robot_states"][:, 1] = demo["obs/gripper_states"][:, 1] = -gap_N

    return spoil


def lost_picture(folder: Path) -> None:
    edit_arrays(folder, "obs/frame_index", lambda values: values[:-1], only_first=True)


def lost_view(folder: Path) -> None:
    path = min(folder.glob("*.hdf5"))
    with h5py.File(path, "a") as file:
        del file["data/demo_0/obs/eye_in_hand_rgb"]


def beyond_the_controller(folder: Path) -> None:
    edit_arrays(folder, "actions", with_value(2, 0, 1.5), only_first=True)


def not_a_number(folder: Path) -> None:
    edit_arrays(folder, "actions", with_value(2, 1, np.nan), only_first=True)


def repeated_picture(folder: Path) -> None:
    edit_arrays(folder, "obs/agentview_rgb", repeat_third_picture, only_first=True)


def gripper_from_0_to_1(folder: Path) -> None:
    def recode(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:, :6], np.arange(len(values))[:, None] % 2], axis=1)

    edit_arrays(folder, "actions", recode, only_first=True)


def no_reward(folder: Path) -> None:
    edit_arrays(folder, "rewards", lambda values: values * 0, only_first=True)


HDF5_FAULTS: list[tuple[str, str, Spoil]] = [
    ("misaligned-actions", r"the arm moves 1 control step\(s\) before the action", late_observations),
    ("no-ops-only", r"all \d+ actions are no-ops, the demonstration of reach task 0", no_motion),
    ("repeated-picture", r"view 'image': 1 pictures equal the one before .* first at control step 3", repeated_picture),
    (
        "missing-picture",
        r"declares \d+ pictures .* has \d+",
        lost_picture,
    ),
    ("missing-picture", r"has \d+: \{'image': \d+, 'image2': 0\}", lost_view),
    ("gripper-range", r"gripper actions lie in 0 \.\.\. 1", gripper_from_0_to_1),
    ("gripper-range", r"1 motions lie outside \[-1, 1\] \(up to 1.5\)", beyond_the_controller),
    ("gripper-sign", r"the fingers open when the action says close", fingers_move_with(-1.0)),
    ("rotated-pictures", r"pictures look upside down: .* as declared \(rotated_180\)", turned_pictures),
    (
        "not-finite",
        r"actions are not finite at 1 control steps, first 2",
        not_a_number,
    ),
    ("timestamps", r"between control steps 1 and 2 the simulator's clock moves 0\.1000 s, at 20 Hz it is 0\.0500 s", cut_row_out),
    ("dropped-tail", r"ended in success \(predicate\), but the last of its \d+ steps has reward 0", no_reward),
]


@pytest.mark.parametrize(("name", "text", "spoil"), HDF5_FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(HDF5_FAULTS)])
def test_a_planted_fault_is_named(reach_folders: Folders, name: str, text: str, spoil: Spoil) -> None:
    folder = reach_folders["hdf5"]
    spoil(folder)
    report = check([folder])
    assert {finding.name for finding in report.faults} == {name}, report.text()
    assert report.faults[0].remedy
    assert re.search(text, report.text()), report.text()


def test_fingers_that_close_when_told_pass(reach_folders: Folders) -> None:
    fingers_move_with(1.0)(reach_folders["hdf5"])
    assert check([reach_folders["hdf5"]]).faults == []


def test_an_empty_instruction_is_named(reach_folders: Folders) -> None:
    for path in sorted(reach_folders["hdf5"].glob("*.hdf5"))[:1]:
        with h5py.File(path, "a") as file:
            file["data/demo_0"].attrs["prompt"] = " "
    assert [finding.name for finding in check([reach_folders["hdf5"]]).faults] == ["task-without-text"]


def late_timestamp(folder: Path) -> None:
    edit_column(folder, "timestamp", lambda values: [*values[:2], 0.11, *values[3:]])


def empty_picture(folder: Path) -> None:
    edit_column(folder, "observation.images.image", lambda values: [*values[:-1], {"bytes": None}])


def other_task(folder: Path) -> None:
    edit_column(folder, "task_index", lambda values: [1 - index for index in values])


LEROBOT_FAULTS: list[tuple[str, str, Spoil]] = [
    (
        "timestamps",
        r"timestamp 0\.1100 s in row 2, at 20 rows .* 0\.1000",
        late_timestamp,
    ),
    ("timestamps", r"frame_index is 2 in row 3, expected 3", lambda f: edit_column(f, "frame_index", lambda v: [*v[:3], 2, *v[4:]])),
    (
        "missing-picture",
        r"1 of \d+ pictures are empty",
        empty_picture,
    ),
    ("task-without-text", r"task_index 9 has no text", lambda f: edit_column(f, "task_index", lambda v: [9] * len(v))),
    (
        "task-without-text",
        r"says 'reach the .*', its task_index 1 means",
        other_task,
    ),
    ("dropped-tail", r"declares \d+ control steps, .*file-000\.parquet has \d+", lambda f: drop_last_row(f)),
    ("statistics", r"q99 of action\[0\] is 0\.123, over all rows it is", lambda f: edit_stats(f, "q99", lambda v: [0.123, *v[1:]])),
    ("statistics", r"action was computed over 5 rows, the dataset has", lambda f: edit_stats(f, "count", lambda v: [5])),
    ("statistics", r"q99 of action is \[nan, .*, not 7 finite numbers", lambda f: edit_stats(f, "q99", lambda v: [float("nan"), *v[1:]])),
    ("statistics", r"q01 of action is \[.*, not 7 finite numbers", lambda f: edit_stats(f, "q01", lambda v: [*v, 1.0])),
    ("statistics", r"mean of action is None, not 7 finite numbers", lambda f: edit_stats(f, "mean", lambda v: None)),
    ("statistics", r"std of action is \['a'\], not 7 finite numbers", lambda f: edit_stats(f, "std", lambda v: ["a"])),
    ("statistics", r"meta/stats\.json is missing", lambda f: (f / "meta/stats.json").unlink()),
    ("statistics", r"meta/stats\.json: not JSON(?s:.)*-> delete it and write true ones", lambda f: cut(f / "meta/stats.json")),
]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def edit_stats(folder: Path, kind: str, change: Callable[[list], list]) -> None:
    path = folder / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["action"][kind] = change(stats["action"][kind])
    path.write_text(json.dumps(stats))


def drop_last_row(folder: Path) -> None:
    (path,) = folder.glob("data/*/file-000.parquet")
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)


@pytest.mark.parametrize(("name", "text", "spoil"), LEROBOT_FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(LEROBOT_FAULTS)])
def test_a_fault_planted_in_a_lerobot_folder_is_named(reach_folders: Folders, name: str, text: str, spoil: Spoil) -> None:
    spoil(reach_folders["lerobot"])
    report = check([reach_folders["lerobot"]])
    found = {finding.name for finding in report.faults}
    assert name in found and found <= {name, "statistics", "unreadable"}, report.text()
    assert re.search(text, report.text()), report.text()


@pytest.mark.parametrize("lag", [-1, 0, 1, 2])
def test_the_lag_of_a_simulated_arm_is_found(reach_folders: Folders, lag: int) -> None:
    """Against an arm that answers each random action with 5 mm, a known number of steps later."""
    (first, *_) = [(info, load_episode(info)) for info in list_episodes([reach_folders["hdf5"]])]
    rng, motion = np.random.default_rng(0), Motion()
    actions_N3 = rng.uniform(-1, 1, (400, 3))
    motion._first = first[0]
    motion._add_motion(actions_N3[5:-5], 0.005 * actions_N3[5 - lag : 395 - lag - 1] + rng.normal(0, 1e-4, (389, 3)))
    assert motion.begins_at() == lag


@pytest.mark.parametrize("size", [8, 16, 30, 128])
def test_thumbnails_are_block_means(size: int) -> None:
    picture = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    small = thumbnail(picture)
    assert small.shape == (16, 16) and np.isclose(small.mean(), picture.mean(), atol=1.5), "cells of unequal size weigh differently"
    if size % 16 == 0:
        block = size // 16
        assert np.allclose(small[3, 5], picture[3 * block : 4 * block, 5 * block : 6 * block].mean(), atol=1e-3)
    assert np.array_equal(thumbnail(picture[::-1]), small[::-1]) or size % 16, "turning a picture turns its thumbnail"
