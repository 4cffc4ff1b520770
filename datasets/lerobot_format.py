"""LeRobotDataset v3.0 on disk: names, paths, features, and the published layouts that are read.

    FOLDER/meta/info.json                                  format, fps, features, totals; written last
    FOLDER/meta/stats.json                                 true statistics over all frames
    FOLDER/meta/tasks.parquet                              instruction -> task_index; row order is task_index
    FOLDER/meta/episodes/chunk-000/file-000.parquet        one row per episode: where it lies, its tasks, its statistics
    FOLDER/data/chunk-000/file-000.parquet                 one row per control step; PNG pictures inside
    FOLDER/videos/FEATURE/chunk-000/file-000.mp4           pictures as video instead
    FOLDER/meta/vla_rl.json                                ours: conventions, and how pictures are kept
    FOLDER/replay/chunk-000/file-000.parquet               ours: what replays an episode bit for bit, and LeRobot has no place for

Every file holds one or more whole episodes. `LeRobotDataset` reads such a folder and ignores our two additions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vla_rl.conventions import Conventions, Gripper, Orientation, Rotation
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.video import Codec, video_info
from vla_rl.episode import ACTION_DIM, ROBOT_STATE_DIM, STATE_DIM, VIEW_AGENT, VIEW_WRIST, VIEWS
from vla_rl.telemetry.files import read_json

VERSION = "v3.0"
"""`codebase_version` that is written."""
OURS = "vla-rl lerobot 1"
"""Value of `format` in `meta/vla_rl.json`."""
FILES_PER_CHUNK = 1000
DATA_FILE_MIB, VIDEO_FILE_MIB = 100, 200
"""LeRobot's limits of one file."""
INFO_PATH, STATS_PATH, TASKS_PATH, OURS_PATH = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/vla_rl.json"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"
REPLAY_PATH = f"replay/{_FILE}.parquet"

STATE, ACTION = "observation.state", "action"
IMAGE_FEATURES: Mapping[str, str] = {VIEW_AGENT: "observation.images.image", VIEW_WRIST: "observation.images.image2"}
"""View -> feature."""
LABEL = "intended_action"
"""The clean intention. Its name must not begin with `action`: LeRobot takes every such feature for something to predict."""
ROBOT_STATE = "robot_state"
"""See `episode.ROBOT_STATE_DIM`. Nor may this begin with `observation`: LeRobot would feed it to policies."""
INTERVENTION, REWARD, SUCCESS, DONE = "intervention", "next.reward", "next.success", "next.done"
POSITIONS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""LeRobot's own columns of every dataset."""

Pictures = Literal["png", "av1", "h264"]
"""How pictures are kept: PNG in parquet (exact) or video (small, lossy)."""


def data_features(pictures: Pictures, resolution: int, fps: int) -> dict[str, dict[str, Any]]:
    """`features` of `meta/info.json`."""
    features = {feature: _picture_feature(pictures, resolution, fps) for feature in IMAGE_FEATURES.values()}
    state_names = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right"]
    action_names = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
    robot_names = [f"gripper_{i}" for i in range(2)] + [f"eef_{axis}" for axis in "xyz"]
    robot_names += [f"quaternion_{axis}" for axis in "xyzw"] + [f"joint_{i}" for i in range(7)]
    vectors = {STATE: ("float32", state_names), ACTION: ("float32", action_names)}
    vectors |= {LABEL: ("float32", action_names), ROBOT_STATE: ("float64", robot_names)}
    assert [len(names) for _, names in vectors.values()] == [STATE_DIM, ACTION_DIM, ACTION_DIM, ROBOT_STATE_DIM]
    features |= {name: {"dtype": dtype, "shape": [len(names)], "names": names} for name, (dtype, names) in vectors.items()}
    scalars = {INTERVENTION: "bool", REWARD: "float32", SUCCESS: "bool", DONE: "bool"}
    scalars |= {name: "float32" if name == "timestamp" else "int64" for name in POSITIONS}
    return features | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in scalars.items()}


def _picture_feature(pictures: Pictures, resolution: int, fps: int) -> dict[str, Any]:
    feature: dict[str, Any] = {"dtype": "image", "shape": [resolution, resolution, 3], "names": ["height", "width", "channels"]}
    if pictures != "png":
        feature |= {"dtype": "video", "info": video_info(pictures, resolution, resolution, fps)}
    return feature


def new_info(features: Mapping[str, Mapping[str, Any]], fps: int, episodes: int, frames: int, tasks: int) -> dict[str, Any]:
    """The contents of `meta/info.json`."""
    has_video = any(feature["dtype"] == "video" for feature in features.values())
    return {
        "codebase_version": VERSION,
        "robot_type": "panda",
        "fps": fps,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": DATA_FILE_MIB,
        "video_files_size_in_mb": VIDEO_FILE_MIB,
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if has_video else None,
        "features": dict(features),
    }


def is_lerobot(path: Path) -> bool:
    """Whether a path is the folder of a LeRobot dataset, of any version."""
    return (path / INFO_PATH).is_file()


def read_info(folder: Path) -> dict[str, Any]:
    """`meta/info.json`. Raises DatasetError for one that is damaged or lacks what every version has."""
    path = folder / INFO_PATH
    try:
        info = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DatasetError(f"{folder}: no LeRobot dataset, {INFO_PATH} is missing") from error
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: not JSON ({error}); restore it") from error
    missing = [key for key in ("codebase_version", "fps", "features", "data_path") if key not in info]
    if missing:
        raise DatasetError(f"{path}: lacks {', '.join(missing)}; it has {', '.join(info) or 'nothing'}")
    if not str(info["codebase_version"]).startswith(("v2.", "v3.")):
        raise DatasetError(f"{path}: codebase_version is {info['codebase_version']!r}; v2.0, v2.1 and v3.x are read")
    return info


@dataclass(frozen=True)
class Layout:
    """Where a dataset keeps what an `Observation` and an action are made of."""

    name: str
    images: Mapping[str, str]
    """View -> feature."""
    state: str
    """Feature of the eight numbers of `Observation.state`."""
    action: str
    """Feature of the executed actions."""
    conventions: Conventions
    """Of pictures, states, gripper; its rate is the control rate, whatever `fps` says."""
    pictures: Pictures | None = None
    """How this project's writer kept the pictures; None for datasets of others."""

    @property
    def ours(self) -> bool:
        """Whether this project wrote it: only then are its own columns and the replay files there."""
        return self.pictures is not None


_AS_LEROBOT = Conventions(Orientation.ROTATED_180, Rotation.AXIS_ANGLE_ROBOSUITE, Gripper.CLOSE_POSITIVE, control_rate_hz=20)
"""Of the converted LIBERO sets: they declare 10 frames per second, the simulator ran at 20 Hz (OpenTau PR 312: 92 -> 39 %)."""
PUBLISHED_SUITE = "lerobot"
"""Suite in the specs of published episodes, which do not say which one they belong to."""
PUBLISHED = (
    Layout("lerobot/libero and HuggingFaceVLA/libero", IMAGE_FEATURES, STATE, ACTION, _AS_LEROBOT),
    Layout("physical-intelligence/libero", {VIEW_AGENT: "image", VIEW_WRIST: "wrist_image"}, "state", "actions", _AS_LEROBOT),
)
"""Layouts of others, known by their features' names and sizes."""


def find_layout(folder: Path, info: Mapping[str, Any]) -> Layout:
    """The layout of a folder: declared in `meta/vla_rl.json`, or one of `PUBLISHED`.

    Raises DatasetError naming the features that fit none, with what was expected.
    """
    path = folder / OURS_PATH
    if path.is_file():
        declared = read_json(path)
        conventions = Conventions.from_dict(declared["conventions"])
        return Layout(declared["format"], IMAGE_FEATURES, STATE, ACTION, conventions, declared["pictures"])
    features = info["features"]
    problems = {layout.name: _misfits(layout, features) for layout in PUBLISHED}
    fitting = [layout for layout in PUBLISHED if not problems[layout.name]]
    if not fitting:
        listed = "\n".join(f"  unlike {name}: {'; '.join(misfits)}" for name, misfits in problems.items())
        raise DatasetError(
            f"{folder}: not a layout that can be read\n{listed}\nIts features are "
            + ", ".join(f"{name} {tuple(feature['shape'])}" for name, feature in features.items())
        )
    return fitting[0]


def _misfits(layout: Layout, features: Mapping[str, Mapping[str, Any]]) -> list[str]:
    expected = {layout.state: (STATE_DIM,), layout.action: (ACTION_DIM,)}
    found = {name: tuple(features[name]["shape"]) if name in features else "nothing" for name in expected}
    problems = [f"expected feature {name} {shape}, got {found[name]}" for name, shape in expected.items() if found[name] != shape]
    return problems + [f"no feature {feature}" for feature in layout.images.values() if feature not in features]


def ours(conventions: Conventions, pictures: Pictures) -> dict[str, Any]:
    """The contents of `meta/vla_rl.json`."""
    return {"format": OURS, "conventions": conventions.to_dict(), "pictures": pictures}


@dataclass(frozen=True)
class Place:
    """Which file of a family (`data`, `videos`, ...) something lies in."""

    chunk_index: int
    file_index: int

    @classmethod
    def number(cls, number: int) -> Place:
        """The `number`-th file."""
        return cls(*divmod(number, FILES_PER_CHUNK))

    def path(self, pattern: str, **names: str) -> str:
        """The file's path below the folder."""
        return pattern.format(**asdict(self), **names)


VIDEO_OF: Mapping[Pictures, Codec] = {"av1": "av1", "h264": "h264"}
"""Codec of the video forms."""
assert set(IMAGE_FEATURES) == set(VIEWS)
