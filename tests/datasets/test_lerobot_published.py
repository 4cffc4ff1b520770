"""Datasets that others wrote: LIBERO as LeRobot publishes it (made here by LeRobot's own writer), and v2.1 folders."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_rl.cli import main
from vla_rl.conventions import Gripper, Orientation
from vla_rl.datasets.check import check
from vla_rl.datasets.edit import Filter, convert, filter_dataset
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.lerobot_catalog import open_catalog
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.png import encode_png
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import list_episodes
from vla_rl.datasets.video import encode_video
from vla_rl.episode import VIEWS, Outcome
from vla_rl.replay import require_replayable

SIZE, LENGTHS = 64, (5, 3, 4)
TASKS = ("put the bowl on the plate", "open the drawer", "put the bowl on the plate")
SeenByLeRobot = Callable[..., Any]


def picture(episode: int, t: int, view: int) -> np.ndarray:
    """Smooth, and of another brightness in every episode, step and view."""
    ramp = np.linspace(0, 90, SIZE, dtype=np.uint8)[:, None, None]
    return np.broadcast_to(ramp + np.uint8(50 * episode + 9 * t + 4 * view), (SIZE, SIZE, 3)).copy()


def numbers(episode: int) -> tuple[np.ndarray, np.ndarray]:
    """float32[N, 8] states and float32[N, 7] actions; the gripper is -1, then 1."""
    rng = np.random.default_rng(episode)
    states, actions = rng.normal(size=(LENGTHS[episode], 8)), rng.uniform(-1, 1, (LENGTHS[episode], 7))
    actions[:, 6] = np.where(np.arange(LENGTHS[episode]) < 2, -1, 1)
    return states.astype(np.float32), actions.astype(np.float32)


def write_with_lerobot(folder: Path, use_videos: bool) -> None:
    """Three episodes with the features of `lerobot/libero` (video) or `HuggingFaceVLA/libero` (PNG in parquet), 10 fps as there."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    pictures = {"dtype": "video" if use_videos else "image", "shape": (SIZE, SIZE, 3), "names": ["height", "width", "channel"]}
    features = {
        "observation.images.image": pictures,
        "observation.images.image2": pictures,
        "observation.state": {"dtype": "float32", "shape": (8,), "names": ["state"]},
        "action": {"dtype": "float32", "shape": (7,), "names": ["actions"]},
    }
    theirs = LeRobotDataset.create("theirs", fps=10, features=features, root=folder, robot_type="panda", use_videos=use_videos)
    for episode, length in enumerate(LENGTHS):
        states, actions = numbers(episode)
        for t in range(length):
            images = {f"observation.images.{name}": picture(episode, t, view) for view, name in enumerate(VIEWS)}
            theirs.add_frame({**images, "observation.state": states[t], "action": actions[t], "task": TASKS[episode]})
        theirs.save_episode(parallel_encoding=False)
    theirs.finalize()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`png` and `video` folders; the video one has no column `tasks`, as on the hub (LeRobot #4519)."""
    folders = {name: tmp_path_factory.mktemp("published") / name for name in ("png", "video")}
    for name, folder in folders.items():
        write_with_lerobot(folder, use_videos=name == "video")
    (path,) = (folders["video"] / "meta/episodes").rglob("*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["tasks"]), path)
    tasks = folders["video"] / "meta/tasks.parquet"
    pandas.read_parquet(tasks).iloc[::-1].to_parquet(tasks)
    return folders


@pytest.mark.parametrize("kind", ["png", "video"])
def test_published_libero_is_read_as_it_lies(published: dict[str, Path], kind: str) -> None:
    """Several episodes in one file; instructions by `task_index`, although the rows of `tasks.parquet` are in another order."""
    infos = list_episodes([published[kind]])
    assert [info.prompt for info in infos] == list(TASKS) and [info.num_steps for info in infos] == list(LENGTHS)
    conventions = infos[0].conventions
    assert (conventions.orientation, conventions.gripper, conventions.control_rate_hz) == (
        Orientation.ROTATED_180,
        Gripper.CLOSE_POSITIVE,
        20,
    )
    dataset = EpisodeDataset(infos)
    (batch,) = dataset.sequential(100, chunk_length=3)
    rows = [(episode, t) for episode, length in enumerate(LENGTHS) for t in range(length)]
    assert len(dataset) == len(rows)
    for observation, actions_CA, mask_C, (episode, t) in zip(batch.observations, batch.actions_BCA, batch.action_mask_BC, rows):
        states, actions = numbers(episode)
        assert np.array_equal(observation.state, states[t]) and observation.prompt == TASKS[episode]
        assert np.array_equal(actions_CA[mask_C], actions[t : t + 3])
        for view, name in enumerate(VIEWS):
            error = np.abs(observation.images[name].astype(float) - picture(episode, t, view)).mean()
            assert error == 0 if kind == "png" else error < 2, "of 255; the nearest other picture differs by 4"


def test_what_lerobot_itself_reads_is_what_is_read(published: dict[str, Path], seen_by_lerobot: SeenByLeRobot) -> None:
    """Video: bit for bit, because both decode with the same library."""
    theirs = seen_by_lerobot(published["video"], return_uint8=True)
    ours = EpisodeDataset(list_episodes([published["video"]]))
    (batch,) = ours.sequential(100, 1)
    for index, observation in enumerate(batch.observations):
        for name in VIEWS:
            assert np.array_equal(theirs[index][f"observation.images.{name}"].numpy().transpose(1, 2, 0), observation.images[name])


def test_sft_opens_published_folders(published: dict[str, Path]) -> None:
    train, validation = open_datasets(DataConfig((str(published["png"]),), validation_fraction=0.3, cache=False))
    assert validation is not None and len(train.infos) == 2 and len(validation.infos) == 1
    assert all(info.outcome is Outcome.SUCCESS for info in train.infos)


@pytest.mark.parametrize("kind", ["png", "video"])
def test_converting_copies_pictures_and_adds_our_columns(
    published: dict[str, Path], kind: str, tmp_path: Path, seen_by_lerobot: SeenByLeRobot
) -> None:
    done = convert([published[kind]], tmp_path / "ours", "lerobot")
    assert done.episodes == 3 and "nobody published their seeds" in done.notes[0]
    before, after = ([load_episode(info) for info in list_episodes([folder])] for folder in (published[kind], tmp_path / "ours"))
    for theirs, ours in zip(before, after):
        assert np.array_equal(theirs.actions_NA(), ours.actions_NA())
        for t, frame in theirs.frames().items():
            assert all(np.array_equal(frame.images[view], ours.frames()[t].images[view]) for view in VIEWS), "copied, not encoded again"
        assert ours.provenance["source"]["layout"].startswith("lerobot/libero")
    assert len(list((tmp_path / "ours/data").rglob("*.parquet"))) == 1, "episodes share files up to LeRobot's limits"
    item = seen_by_lerobot(tmp_path / "ours")[LENGTHS[0] - 1]
    assert bool(item["next.done"]) and bool(item["next.success"]) and item["task"] == TASKS[0]


def test_published_episodes_can_be_filtered_and_kept_in_another_way(published: dict[str, Path], tmp_path: Path) -> None:
    """Without simulator states: pictures from video to PNG, and one episode left out, the others copied."""
    png = convert([published["video"]], tmp_path / "png", "lerobot", "png").folder
    left = filter_dataset([png], tmp_path / "two", Filter(without_numbers=(1,))).folder
    before, after = ([load_episode(info) for info in list_episodes([folder])] for folder in (published["video"], left))
    assert [episode.num_steps for episode in after] == [LENGTHS[0], LENGTHS[2]]
    for theirs, ours in zip([before[0], before[2]], after):
        assert np.array_equal(theirs.actions_NA(), ours.actions_NA()) and ours.steps[0].sim_states_ED is None
        for t, frame in theirs.frames().items():
            assert np.array_equal(frame.images["image2"], ours.frames()[t].images["image2"])
            assert np.array_equal(frame.state, ours.frames()[t].state)
        assert ours.provenance["filtered"]["from"].startswith(str(png))
    with pytest.raises(DatasetError, match="does not say in which environment it was recorded"):
        require_replayable(list_episodes([left])[0], after[0])


@pytest.mark.parametrize("kind", ["png", "video"])
def test_no_ops_leave_published_episodes_whose_fps_is_not_the_control_rate(published: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Episodes that lose steps lie beside those that are copied, at the 10 rows per second that the folder declares."""
    folder = shutil.copytree(published[kind], tmp_path / "in")
    (path,) = folder.glob("data/*/*.parquet")
    table = pq.read_table(path)
    actions = np.array(table["action"].to_pylist(), np.float32)
    actions[LENGTHS[0] + 1, :6], actions[LENGTHS[0] + 1, 6] = 0, actions[LENGTHS[0], 6]
    place = table.schema.get_field_index("action")
    pq.write_table(table.set_column(place, "action", pa.array(actions.tolist(), table.schema.field(place).type)), path)
    done = filter_dataset([folder], tmp_path / "out", Filter(no_ops=True))
    assert (done.episodes, done.dropped_steps) == (3, 1)
    infos = list_episodes([done.folder])
    assert [info.num_steps for info in infos] == [LENGTHS[0], LENGTHS[1] - 1, LENGTHS[2]]
    assert open_catalog(done.folder).fps == 10 and infos[1].conventions.control_rate_hz == 20
    before, after = (load_episode(list_episodes([where])[1]) for where in (folder, done.folder))
    assert np.array_equal(after.actions_NA(), before.actions_NA()[[0, 2]])
    lossy = 2 if kind == "video" else 0  # mean of grey levels; the pictures of a step differ from the next one's by 9
    assert np.abs(after.frames()[1].images["image"].astype(int) - before.frames()[2].images["image"]).mean() <= lossy


def test_published_data_cannot_become_libero_hdf5(published: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="3 of 3 episodes have no simulator states and joint positions"):
        convert([published["png"]], tmp_path / "hdf5", "hdf5")


OLD_NAMES = {"image": ("image", "wrist_image"), "video": ("observation.images.image", "observation.images.image2")}
OLD_NUMBERS = {"image": ("state", "actions"), "video": ("observation.state", "action")}
"""Features of a v2.1 folder: physical-intelligence's names with pictures as PNG, LeRobot's with one mp4 per episode and view."""


def write_old(folder: Path, kind: str) -> Path:
    """A v2.1 folder: one parquet per episode, JSON lines, pictures of `kind`."""
    views, (state, action) = OLD_NAMES[kind], OLD_NUMBERS[kind]
    pictures: dict[str, Any] = {"dtype": kind, "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channel"]}
    if kind == "video":
        pictures["info"] = {"video.fps": 10.0, "video.codec": "av1", "video.pix_fmt": "yuv420p", "has_audio": False}
    features: dict[str, Any] = dict.fromkeys(views, pictures)
    features |= {state: {"dtype": "float32", "shape": [8], "names": None}, action: {"dtype": "float32", "shape": [7], "names": None}}
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in ("frame_index", "episode_index", "index", "task_index")}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "features": features,
        "chunks_size": 2,
        "total_episodes": 3,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    texts = sorted(set(TASKS))
    (folder / "meta/tasks.jsonl").write_text("".join(json.dumps({"task_index": i, "task": text}) + "\n" for i, text in enumerate(texts)))
    lines = [{"episode_index": i, "tasks": [TASKS[i]], "length": length} for i, length in enumerate(LENGTHS)]
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for episode, length in enumerate(LENGTHS):
        states, actions = numbers(episode)
        columns: dict[str, Any] = {state: states.tolist(), action: actions.tolist()}
        columns |= {"timestamp": [t / 10 for t in range(length)], "frame_index": list(range(length)), "index": list(range(length))}
        columns |= {"episode_index": [episode] * length, "task_index": [texts.index(TASKS[episode])] * length}
        for view, name in enumerate(views):
            seen = np.stack([picture(episode, t, view) for t in range(length)])
            if kind == "image":
                columns[name] = [{"bytes": encode_png(seen[t]), "path": f"frame-{t}.png"} for t in range(length)]
            else:
                write(folder / f"videos/chunk-{episode // 2:03d}/{name}/episode_{episode:06d}.mp4", encode_video(seen, 10, "av1"))
        table = io.BytesIO()
        pq.write_table(pa.table(columns), table)
        write(folder / f"data/chunk-{episode // 2:03d}/episode_{episode:06d}.parquet", table.getvalue())
    return folder


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A v2.1 folder with pictures as PNG."""
    return write_old(tmp_path / "old", "image")


@pytest.mark.parametrize("kind", ["image", "video"])
def test_v2_folders_are_read_and_converted(kind: str, tmp_path: Path, seen_by_lerobot: SeenByLeRobot) -> None:
    """Several chunks of two episodes; videos are copied, so that every picture stays what it was."""
    old = write_old(tmp_path / "old", kind)
    assert convert([old], tmp_path / "new", "lerobot").episodes == 3
    before, after = (list_episodes([folder]) for folder in (old, tmp_path / "new"))
    for episode, (info, twin) in enumerate(zip(before, after, strict=True)):
        loaded, converted = load_episode(info), load_episode(twin)
        assert info.prompt == twin.prompt == TASKS[episode]
        assert np.array_equal(loaded.actions_NA(), numbers(episode)[1]) and np.array_equal(converted.actions_NA(), numbers(episode)[1])
        for t, frame in loaded.frames().items():
            assert np.array_equal(frame.state, numbers(episode)[0][t])
            for view, name in enumerate(VIEWS):
                error = np.abs(frame.images[name].astype(float) - picture(episode, t, view)).mean()
                assert error == 0 if kind == "image" else error < 2, "of 255; the nearest other picture differs by 4"
                assert np.array_equal(frame.images[name], converted.frames()[t].images[name])
    theirs = seen_by_lerobot(tmp_path / "new")
    assert (len(theirs), theirs.fps, theirs[5]["task"]) == (12, 10, TASKS[1])
    assert np.allclose(theirs[5]["observation.state"].numpy(), numbers(1)[0][0], rtol=0, atol=0)
    last = 255 * theirs[11]["observation.images.image2"].numpy().transpose(1, 2, 0)
    assert np.array_equal(last.round(), load_episode(after[2]).frames()[3].images["image2"])


def test_a_v2_video_that_is_shorter_than_its_table_is_named(tmp_path: Path) -> None:
    """A slow encoder lost pictures (LeRobot PR 4462)."""
    old = write_old(tmp_path / "old", "video")
    short = old / "videos/chunk-000/observation.images.image/episode_000001.mp4"
    short.write_bytes(encode_video(np.stack([picture(1, t, 0) for t in range(2)]), 10, "av1"))
    with pytest.raises(DatasetError, match=r"episode_000001\.mp4: has no picture 2"):
        load_episode(list_episodes([old])[1])
    with pytest.raises(DatasetError, match=r"episode_000001\.mp4: has 2 of the pictures 0 to 2"):
        convert([old], tmp_path / "new", "lerobot")


def test_a_layout_that_is_not_known_is_named_with_what_was_expected(old: Path) -> None:
    """DROID-style: state of 7, action of 32 (LeRobot #2963)."""
    info = json.loads((old / "meta/info.json").read_text())
    info["features"]["state"]["shape"], info["features"]["actions"]["shape"] = [7], [32]
    (old / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match=r"expected feature state \(8,\), got \(7,\); expected feature actions \(7,\), got \(32,\)"):
        list_episodes([old])


def test_grippers_between_0_and_1_are_refused(old: Path) -> None:
    for path in (old / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        actions = np.array(table["actions"].to_pylist(), np.float32)
        actions[:, 6] = (actions[:, 6] + 1) / 2
        pq.write_table(table.set_column(table.schema.get_field_index("actions"), "actions", pa.array(actions.tolist())), path)
    with pytest.raises(DatasetError, match=r"gripper actions lie in 0 \.\.\. 1, expected -1 \(open\) \.\.\. 1"):
        EpisodeDataset(list_episodes([old]))


def test_damaged_folders_are_named(published: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(published["video"], broken)
    (path,) = (broken / "data").rglob("*.parquet")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DatasetError, match=r"file-000\.parquet: not a whole parquet file"):
        EpisodeDataset(list_episodes([broken]))
    path.write_bytes(content)
    video = next((broken / "videos").rglob("*.mp4"))
    with av.open(str(video)) as container:
        assert container.streams.video[0].frames == sum(LENGTHS)
    video.write_bytes(video.read_bytes()[:300])
    dataset = EpisodeDataset(list_episodes([broken]))
    with pytest.raises(DatasetError, match=r"file-000\.mp4: not a readable video"):
        next(dataset.sequential(1, 1))
    with pytest.raises(DatasetError, match=r"file-000\.mp4: not a readable video"):
        convert([broken], tmp_path / "copied", "lerobot")
    (rows,) = (broken / "meta/episodes").rglob("*.parquet")
    rows.write_bytes(rows.read_bytes()[:-50])
    with pytest.raises(DatasetError, match=r"meta/episodes/chunk-000/file-000\.parquet: not a whole parquet file"):
        open_catalog(broken)
    (broken / "meta/info.json").write_text("{")
    with pytest.raises(DatasetError, match=r"info\.json: not JSON"):
        open_catalog(broken)


def test_a_picture_that_is_null_is_named(published: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(published["png"], tmp_path / "in")
    (path,) = folder.glob("data/*/*.parquet")
    table = pq.read_table(path)
    place = table.schema.get_field_index("observation.images.image2")
    pictures = table["observation.images.image2"].to_pylist()
    pictures[LENGTHS[0] + 2] = None
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(pictures, table.schema.field(place).type)), path)
    with pytest.raises(DatasetError, match=r"row 7 of row group 0 has no picture in observation\.images\.image2"):
        load_episode(list_episodes([folder])[1])


def test_lerobots_own_quantiles_are_found_wrong_and_made_true(published: dict[str, Path], tmp_path: Path) -> None:
    """LeRobot gives an envelope of per-episode quantiles (LeRobot #4156); `data stats --write` puts the true ones there."""
    folder = tmp_path / "theirs"
    shutil.copytree(published["png"], folder)
    before = [finding for finding in check([folder]).faults if finding.name == "statistics"]
    assert any("q99 of action" in finding.text for finding in before), "count, mean, range and deviation are right"
    assert all(finding.text.startswith("q") for finding in before)
    assert main(["data", "stats", str(folder), "--write"]) == 0
    assert check([folder]).faults == []
