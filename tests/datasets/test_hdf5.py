"""Writing and reading one episode: nothing changes, everything is declared, bad input is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from vla_rl.conventions import Conventions, Gripper, Orientation
from vla_rl.datasets.hdf5 import encode_episode, episode_infos, read_episode, write_episode
from vla_rl.datasets.schema import DatasetError, quaternions_to_axis_angles
from vla_rl.episode import Episode, Observation, Outcome

MakeEpisode = Callable[..., Episode]


def assert_same(first: object, second: object, where: str) -> None:
    """Equal values, shapes and dtypes, through dataclasses, mappings and lists."""
    assert type(first) is type(second), where
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        assert first.dtype == second.dtype and np.array_equal(first, second), where
    elif isinstance(first, dict) and isinstance(second, dict):
        assert list(first) == list(second), where
        for key in first:
            assert_same(first[key], second[key], f"{where}[{key}]")
    elif isinstance(first, list) and isinstance(second, list):
        assert len(first) == len(second), where
        for number, pair in enumerate(zip(first, second)):
            assert_same(*pair, f"{where}[{number}]")
    elif dataclasses.is_dataclass(first) and dataclasses.is_dataclass(second):
        for field in dataclasses.fields(first):
            assert_same(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}")
    else:
        assert first == second, where


@pytest.mark.parametrize("frame_every", [1, 3])
@pytest.mark.parametrize("compression", ["gzip", "lzf", "none"])
@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.FAILURE])
def test_round_trip_is_bit_equal(tmp_path: Path, make_episode: MakeEpisode, frame_every: int, compression: str, outcome: Outcome) -> None:
    episode = make_episode(seed=1, steps=11, chunk=4, frame_every=frame_every, outcome=outcome, corrected=True)
    write_episode(tmp_path / "e.hdf5", episode, frame_every, compression)  # type: ignore[arg-type]
    assert_same(episode, read_episode(tmp_path / "e.hdf5"), "episode")


@pytest.mark.parametrize("orientation", list(Orientation))
def test_pictures_are_stored_raw_and_come_back_as_observed(tmp_path: Path, make_episode: MakeEpisode, orientation: Orientation) -> None:
    """A renderer gives `raw`; the env turns it by hand here; the file must hold `raw` again (LIBERO's opengl convention)."""
    raw = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    turned = {Orientation.RAW: raw, Orientation.VERTICAL_FLIP: raw[::-1], Orientation.ROTATED_180: raw[::-1, ::-1]}[orientation]
    episode = make_episode(steps=3, chunk=1, conventions=Conventions(orientation=orientation))
    for step in episode.steps:
        step.frames = {t: Observation(dict.fromkeys(frame.images, turned), frame.state, frame.prompt) for t, frame in step.frames.items()}
    write_episode(tmp_path / "e.hdf5", episode, 1)
    with h5py.File(tmp_path / "e.hdf5") as file:
        assert all(np.array_equal(picture, raw) for picture in file["data/demo_0/obs/agentview_rgb"])
        assert file["data"].attrs["macros_image_convention"] == "opengl"
    assert np.array_equal(read_episode(tmp_path / "e.hdf5").frames()[2].images["image2"], turned)


def test_file_has_libero_layout(tmp_path: Path, make_episode: MakeEpisode) -> None:
    """Names, shapes and dtypes of LIBERO's `create_dataset.py`; sparse pictures are declared."""
    episode = make_episode(steps=7, frame_every=3)
    write_episode(tmp_path / "e.hdf5", episode, 3)
    with h5py.File(tmp_path / "e.hdf5") as file:
        data, demo = file["data"], file["data/demo_0"]
        assert {"env_name", "problem_info", "env_args", "bddl_file_name", "macros_image_convention", "num_demos", "total"} <= set(
            data.attrs
        )
        assert (data.attrs["num_demos"], data.attrs["total"], data.attrs["alignment"]) == (1, 7, "observation before action")
        assert json.loads(data.attrs["problem_info"])["language_instruction"] == "pick up the milk and place it in the basket"
        shapes = {name: (demo[name].shape, demo[name].dtype.str) for name in ("actions", "states", "robot_states", "rewards", "dones")}
        assert shapes == {
            "actions": ((7, 7), "<f8"),
            "states": ((7, 45), "<f8"),
            "robot_states": ((7, 9), "<f8"),
            "rewards": ((7,), "|u1"),
            "dones": ((7,), "|u1"),
        }
        observations = {name: demo["obs"][name].shape for name in demo["obs"]}
        assert observations == {
            "agentview_rgb": (3, 8, 8, 3),
            "eye_in_hand_rgb": (3, 8, 8, 3),
            "frame_index": (3,),
            "gripper_states": (7, 2),
            "joint_states": (7, 7),
            "ee_states": (7, 6),
            "ee_pos": (7, 3),
            "ee_ori": (7, 3),
        }
        assert (demo.attrs["frame_policy"], demo.attrs["frame_every"]) == ("sparse", 3)
        assert demo["obs/frame_index"][()].tolist() == [0, 3, 6]
        assert demo["rewards"][()].tolist() == demo["dones"][()].tolist() == [0, 0, 0, 0, 0, 0, 1]
        assert np.array_equal(demo["action_labels"][()].astype(np.float32), episode.labels_NA())


def test_equal_episodes_give_equal_bytes(make_episode: MakeEpisode) -> None:
    first, second = make_episode(seed=5), make_episode(seed=5)
    second.wall_s = 12.5
    assert encode_episode(first, 1) == encode_episode(second, 1)


def test_axis_angles_equal_robosuites_bit_for_bit() -> None:
    from robosuite.utils.transform_utils import quat2axisangle

    rng = np.random.default_rng(0)
    quaternions = rng.normal(size=(500, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    edges = np.array([[0, 0, 0, 1], [0, 0, 0, -1], [1, 0, 0, 0], [0, 0, 1e-9, 1.0000001]], float)
    quaternions = np.concatenate([quaternions, edges])
    expected = np.array([quat2axisangle(q.copy()) for q in quaternions])
    assert np.array_equal(quaternions_to_axis_angles(quaternions), expected)


def test_infos_describe_without_reading_arrays(tmp_path: Path, make_episode: MakeEpisode) -> None:
    episode = make_episode(steps=10, frame_every=3, size=16)
    write_episode(tmp_path / "e.hdf5", episode, 3)
    (info,) = episode_infos(tmp_path / "e.hdf5")
    assert (info.num_steps, info.num_frames, info.frame_every, info.resolution) == (10, 4, 3, 16)
    assert (info.spec, info.outcome, info.conventions) == (episode.spec, Outcome.SUCCESS, Conventions())


def test_a_missing_picture_is_named(make_episode: MakeEpisode) -> None:
    with pytest.raises(DatasetError, match=r"no picture of both views before 6 of 10 control steps \(\[1, 2, 4, 5, 7\].*fill_frames"):
        encode_episode(make_episode(steps=10, frame_every=3), 1)


def test_a_missing_state_is_named(make_episode: MakeEpisode) -> None:
    episode = make_episode()
    episode.steps[1].sim_states_ED = None
    with pytest.raises(DatasetError, match="sim_states_ED was not recorded; record with Look"):
        encode_episode(episode, 1)


def test_state_of_another_substep_is_refused(make_episode: MakeEpisode) -> None:
    episode = make_episode()
    robot = episode.steps[0].robot_states_ER
    assert robot is not None
    episode.steps[0].robot_states_ER = robot + 1e-6
    with pytest.raises(DatasetError, match="before control step 0 the observation's state is"):
        encode_episode(episode, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e, "provenance", {}), "provenance has no 'conventions'"),
        (lambda e: setattr(e, "steps", []), "has no control step"),
        (lambda e: e.steps[0].reward_E.__setitem__(0, 0.5), r"stores rewards 0 and 1, these are \[0"),
        (
            lambda e: setattr(e, "provenance", {"conventions": Conventions(gripper=Gripper.OPEN_POSITIVE).to_dict()}),
            "gripper.*close_positive",
        ),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(make_episode: MakeEpisode, change: Callable[[Episode], None], message: str) -> None:
    episode = make_episode()
    change(episode)
    with pytest.raises(DatasetError, match=message):
        encode_episode(episode, 1)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_cut_off_file_is_named_with_its_remedy(tmp_path: Path, make_episode: MakeEpisode, keep: float) -> None:
    path = tmp_path / "episode_000003.hdf5"
    write_episode(path, make_episode(), 1)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(DatasetError, match=r"episode_000003\.hdf5: not a whole HDF5 file .* delete it: collecting again"):
        read_episode(path)


def test_undeclared_or_other_alignment_is_refused(tmp_path: Path, make_episode: MakeEpisode) -> None:
    path = tmp_path / "e.hdf5"
    write_episode(path, make_episode(), 1)
    with h5py.File(path, "a") as file:
        file["data"].attrs["alignment"] = "observation after action"
    with pytest.raises(DatasetError, match="alignment is 'observation after action', only"):
        read_episode(path)
    with h5py.File(path, "a") as file:
        del file["data"].attrs["alignment"]
    with pytest.raises(DatasetError, match="one step late: import them"):
        episode_infos(path)


def test_an_unknown_demo_or_file_is_named(tmp_path: Path, make_episode: MakeEpisode) -> None:
    write_episode(tmp_path / "e.hdf5", make_episode(), 1)
    with pytest.raises(DatasetError, match="no episode 'demo_1'; it holds demo_0"):
        read_episode(tmp_path / "e.hdf5", "demo_1")
    with pytest.raises(FileNotFoundError, match=r"f\.hdf5: no such dataset file"):
        read_episode(tmp_path / "f.hdf5")
