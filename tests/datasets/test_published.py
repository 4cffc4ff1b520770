"""Import of files in LIBERO's published layout, whose observations are one step late, and in OpenVLA's, whose are not."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from robosuite.utils.transform_utils import quat2axisangle

from vla_rl.cli import main
from vla_rl.conventions import Orientation
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.published import axis_angles_to_quaternions, import_published
from vla_rl.datasets.schema import DatasetError, quaternions_to_axis_angles
from vla_rl.datasets.store import EpisodeStore, list_episodes

STEPS, SIZE = 20, 4
PROMPT = "Pick the milk and place it in the basket"


def simulated(seed: int, steps: int = STEPS) -> dict[str, np.ndarray]:
    """A moving arm at control steps 0 .. steps: what a stock env would have shown at each."""
    rng = np.random.default_rng(seed)
    joints = np.cumsum(rng.uniform(-0.05, 0.05, (steps + 1, 7)), axis=0)
    quaternions = rng.normal(size=(steps + 1, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    return {
        "actions": rng.uniform(-1, 1, (steps, 7)),
        "states": np.concatenate([np.arange(steps + 1)[:, None] * 0.05, joints, rng.normal(size=(steps + 1, 30))], axis=1),
        "joint_states": joints - 0.002 * rng.uniform(-1, 1, joints.shape),  # observables lag the state by one substep
        "gripper_states": rng.normal(size=(steps + 1, 2)),
        "ee_pos": rng.normal(size=(steps + 1, 3)),
        "quaternions": quaternions,
        "agentview_rgb": rng.integers(0, 256, (steps + 1, SIZE, SIZE, 3), np.uint8),
        "eye_in_hand_rgb": rng.integers(0, 256, (steps + 1, SIZE, SIZE, 3), np.uint8),
    }


def write_demo(data: h5py.Group, name: str, seen: dict[str, np.ndarray], late: int) -> None:
    """As `create_dataset.py` (late = 1) or `regenerate_libero_dataset.py` (late = 0) orders the rows."""
    steps = len(seen["actions"])
    observed = slice(late, late + steps)
    demo = data.create_group(name)
    demo.attrs["model_file"] = '<mujoco><asset><mesh file="/home/somebody/robosuite/models/assets/panda/link0.stl"/></asset></mujoco>'
    demo["actions"], demo["states"] = seen["actions"], seen["states"][:steps]
    robot = np.concatenate([seen["gripper_states"], seen["ee_pos"], seen["quaternions"]], axis=1)[observed]
    orientation = np.array([quat2axisangle(q.copy()) for q in seen["quaternions"][observed]])
    if not late:
        robot[0, 5:] = [0, 0, 0, 1]  # OpenVLA copies this row from another moment
    demo["robot_states"] = robot
    demo["rewards"] = demo["dones"] = np.eye(1, steps, steps - 1, dtype=np.uint8)[0]
    for key in ("joint_states", "gripper_states", "ee_pos", "agentview_rgb", "eye_in_hand_rgb"):
        demo[f"obs/{key}"] = seen[key][observed]
    demo["obs/ee_ori"] = orientation
    demo["obs/ee_states"] = np.concatenate([seen["ee_pos"][observed], orientation], axis=1)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Two demos in LIBERO's published layout."""
    path = tmp_path / "pick_up_the_milk_demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"problem_name": "libero_floor_manipulation", "language_instruction": PROMPT})
        data.attrs["macros_image_convention"], data.attrs["tag"] = "opengl", "libero-v1"
        data.attrs["bddl_file_name"] = "bddl_files/libero_object/pick_up_the_milk.bddl"
        write_demo(data, "demo_0", simulated(0), late=1)
        write_demo(data, "demo_10", simulated(1, STEPS + 3), late=1)
    return path


def test_late_observations_move_to_the_action_they_precede(published: Path, tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "imported")
    done = import_published(published, store, "libero_object", 7)
    assert (done.episodes, done.late_by, store.numbers()) == (2, 1, [0, 1])
    seen, episode = simulated(1, STEPS + 3), read_episode(store.path(1))
    assert episode.spec.init == "sampled:10" and episode.num_steps == STEPS + 2
    assert np.array_equal(episode.actions_NA(), seen["actions"][1:].astype(np.float32))
    for t, frame in episode.frames().items():
        assert np.array_equal(frame.images["image"], seen["agentview_rgb"][t + 1]), "the picture that precedes action t + 1"
        expected = [*seen["ee_pos"][t + 1], *quat2axisangle(seen["quaternions"][t + 1].copy()), *seen["gripper_states"][t + 1]]
        assert np.array_equal(frame.state, np.array(expected, np.float32))
        assert episode.steps[t].sim_states_ED is not None
        assert np.array_equal(episode.steps[t].sim_states_ED[0], seen["states"][t + 1])
    assert episode.final_observation is not None
    assert np.array_equal(episode.final_observation.images["image2"], seen["eye_in_hand_rgb"][-1])
    assert episode.provenance["observations_were_late_by"] == 1 and episode.steps[0].observation.prompt == PROMPT
    assert episode.provenance["conventions"]["orientation"] == Orientation.RAW.value


def test_paired_files_are_recognised_and_keep_every_action(tmp_path: Path) -> None:
    path = tmp_path / "regenerated.hdf5"
    with h5py.File(path, "w") as file:
        write_demo(file.create_group("data"), "demo_3", simulated(2), late=0)
    store = EpisodeStore(tmp_path / "imported")
    assert import_published(path, store, "libero_object", 7, prompt="pick up the milk").late_by == 0
    seen, episode = simulated(2), read_episode(store.path(0))
    assert np.array_equal(episode.actions_NA(), seen["actions"].astype(np.float32))
    frames = episode.frames()
    assert all(np.array_equal(frames[t].images["image"], seen["agentview_rgb"][t]) for t in range(STEPS))
    # robot_states[0] is of another moment in these files: the observation's own orientation counts, to rounding (float32: 6e-8 of pi)
    assert np.allclose(frames[0].state[3:6], quat2axisangle(seen["quaternions"][0].copy()), rtol=0, atol=5e-7)
    assert np.array_equal(frames[1].state[3:6], quat2axisangle(seen["quaternions"][1].copy()).astype(np.float32))


def test_an_arm_that_hardly_moves_is_undecidable_not_guessed(tmp_path: Path) -> None:
    path, seen = tmp_path / "still.hdf5", simulated(3)
    seen["joint_states"] = seen["joint_states"] * 0 + np.random.default_rng(0).normal(size=seen["joint_states"].shape)
    with h5py.File(path, "w") as file:
        write_demo(file.create_group("data"), "demo_0", seen, late=1)
    with pytest.raises(DatasetError, match=r"still\.hdf5: cannot tell whether observations lie before or after .* rad in sum if before"):
        import_published(path, EpisodeStore(tmp_path / "imported"), "libero_object", 7, prompt="x")


def test_a_demonstration_of_no_ops_is_named(published: Path, tmp_path: Path) -> None:
    with h5py.File(published, "a") as file:
        file["data/demo_10/actions"][:, :6] = 0
        file["data/demo_10/actions"][:, 6] = -1
    with pytest.raises(
        DatasetError, match=rf"demo\.hdf5:demo_10: all {STEPS + 3} actions are no-ops.* libero_object task 7 \('Pick the milk"
    ):
        import_published(published, EpisodeStore(tmp_path / "imported"), "libero_object", 7)
    assert EpisodeStore(tmp_path / "imported").numbers() == [], "nothing of the file is imported"


def test_a_missing_instruction_and_our_own_format_are_named(published: Path, tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "imported")
    import_published(published, store, "libero_object", 7)
    with pytest.raises(DatasetError, match="declares its alignment"):
        import_published(store.path(0), store, "libero_object", 7)
    with h5py.File(published, "a") as file:
        del file["data"].attrs["problem_info"]
    with pytest.raises(DatasetError, match="no attribute problem_info to take the instruction from; give prompt"):
        import_published(published, store, "libero_object", 7)


def test_axis_angles_and_quaternions_are_inverse() -> None:
    quaternions = np.random.default_rng(4).normal(size=(100, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    # acos loses half the digits near w = 1: 1e-7 is what float64 leaves there
    assert np.allclose(axis_angles_to_quaternions(quaternions_to_axis_angles(quaternions)), quaternions, rtol=0, atol=1e-7)


def test_a_model_of_another_machine_is_not_read(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model_file` names meshes where somebody else's robosuite lay (cpgen #7): pictures are imported, and what needs the scene says so."""
    store = EpisodeStore(tmp_path / "imported")
    import_published(published, store, "libero_object", 7)
    assert b"/home/somebody" not in store.path(0).read_bytes()
    assert main(["replay", str(store.folder)]) == 2
    assert "the scene of imported data cannot be restored" in capsys.readouterr().err


def test_the_command_corrects_published_files(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As typed; what the file says about itself is refused elsewhere with this command as the remedy."""
    assert main(["data", "check", str(published)]) == 2
    assert "vla-rl data convert FILE --to hdf5 --into FOLDER --suite SUITE --task N" in capsys.readouterr().err
    into = ["--to", "hdf5", "--into", str(tmp_path / "out"), "--suite", "libero_object", "--task", "7"]
    assert main(["data", "convert", str(published), *into]) == 0
    assert "2 episodes" in (out := capsys.readouterr().out) and "observations were 1 step(s) late" in out
    assert [info.prompt for info in list_episodes([tmp_path / "out"])] == [PROMPT, PROMPT]
