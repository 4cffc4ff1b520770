"""Converting, merging and filtering: nothing that both formats hold is lost, and provenance says what was taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets.edit import Filter, convert, filter_dataset, merge_datasets, moving_steps, removed_steps
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.hdf5 import encode_episode
from vla_rl.datasets.inspect import overview
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.stats import dataset_statistics
from vla_rl.datasets.store import EpisodeStore, list_episodes
from vla_rl.episode import Episode, EpisodeSpec, Outcome
from vla_rl.replay import main as replay
from vla_rl.replay import require_replayable

MakeStore = Callable[..., EpisodeStore]
MakeEpisode = Callable[..., Episode]
WriteFolder = Callable[..., LeRobotStore]
SeenByLeRobot = Callable[..., Any]


def test_hdf5_to_lerobot_and_back_is_byte_for_byte(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(3)
    assert convert([store.folder], tmp_path / "lerobot", "lerobot").notes == ()
    back = convert([tmp_path / "lerobot"], tmp_path / "back", "hdf5")
    assert (back.episodes, back.steps) == (3, 9 + 10 + 11)
    for number in store.numbers():
        assert (tmp_path / "back" / store.path(number).name).read_bytes() == store.path(number).read_bytes()


def test_what_cannot_be_held_is_said(make_store: MakeStore, write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"2 of 2 episodes have pictures before every 3\. step only .* replay DATASET --fill-into"):
        convert([make_store(2, frame_every=3).folder], tmp_path / "lerobot_out", "lerobot")
    folder = write_folder([make_episode(size=16)], "h264").folder
    assert "what its codec lost is not there" in convert([folder], tmp_path / "hdf5", "hdf5").notes[0]
    assert "lossy" in convert([tmp_path / "hdf5"], tmp_path / "again", "lerobot", "h264").notes[0]
    with pytest.raises(DatasetError, match="is not empty; name a new folder"):
        convert([folder], tmp_path / "hdf5", "hdf5")


def test_merging_folders_copies_bytes_into_large_files(
    write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path, seen_by_lerobot: SeenByLeRobot
) -> None:
    """Videos too: the pictures of three files in one, none of them encoded again, found by number and by LeRobot by time."""
    first = write_folder([make_episode(seed=seed, steps=5 + seed, size=16) for seed in range(2)], "h264", "a")
    second = write_folder([make_episode(seed=5, steps=4, size=16)], "h264", "b")
    done = merge_datasets([first.folder, second.folder], tmp_path / "merged")
    assert (done.episodes, done.steps) == (3, 15) and len(list((tmp_path / "merged").rglob("*.mp4"))) == 2
    before = [load_episode(info) for info in list_episodes([first.folder, second.folder])]
    after = [load_episode(info) for info in list_episodes([tmp_path / "merged"])]
    assert [encode_episode(episode, 1) for episode in before] == [encode_episode(episode, 1) for episode in after]
    theirs = seen_by_lerobot(tmp_path / "merged", return_uint8=True)
    pictures = [frame.images["image2"] for episode in after for frame in episode.frames().values()]
    for index, picture in enumerate(pictures):
        assert np.array_equal(theirs[index]["observation.images.image2"].numpy().transpose(1, 2, 0), picture)
    assert theirs.meta.stats["action"]["count"][0] == 15


def test_mixtures_are_refused(make_store: MakeStore, write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path) -> None:
    png, video = write_folder([make_episode(size=16)], "png", "p").folder, write_folder([make_episode(size=16)], "h264", "v").folder
    with pytest.raises(DatasetError, match="HDF5 files and LeRobot folders together"):
        merge_datasets([make_store(1).folder, png], tmp_path / "m")
    with pytest.raises(DatasetError, match=r"pictures are kept in different ways .*png.*h264"):
        merge_datasets([png, video], tmp_path / "m")


def test_only_episodes_of_one_kind_are_merged_and_nothing_is_left_behind(
    write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path
) -> None:
    """A folder declares orientation and rate once: another folder's pictures must not go in upside down, without a word."""
    upright, turned = (
        make_episode(seed, conventions=Conventions(orientation=o)) for seed, o in enumerate((Orientation.RAW, Orientation.ROTATED_180))
    )
    folders = [write_folder([episode], folder=name).folder for name, episode in (("a", upright), ("b", turned))]
    slow = write_folder([make_episode(conventions=Conventions(control_rate_hz=10, orientation=Orientation.RAW))], folder="c").folder
    large = write_folder([make_episode(size=16, conventions=Conventions(orientation=Orientation.RAW))], folder="d").folder
    for other, what in ((folders[1], "rotated_180"), (slow, "'control_rate_hz': 10"), (large, "16 px")):
        with pytest.raises(DatasetError, match=f"{what}.*is unlike.*only episodes of one kind go together"):
            merge_datasets([folders[0], other], tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    store = LeRobotStore(folders[0])
    with store.writing(), pytest.raises(DatasetError, match="orientation is rotated_180, there raw"):
        store.write(1, turned, 1)
    hdf5 = EpisodeStore(tmp_path / "hdf5")
    for number, episode in enumerate((upright, turned)):
        hdf5.write(number, episode, 1)
    with pytest.raises(DatasetError, match="orientation is rotated_180, there raw"):
        convert([hdf5.folder], tmp_path / "converted", "lerobot")
    assert not (tmp_path / "converted").exists(), "the same command can be given again"


def test_codecs_are_not_mixed_in_one_file(write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path) -> None:
    folders = [write_folder([make_episode(size=64)], kind, kind).folder for kind in ("h264", "av1")]
    with pytest.raises(DatasetError, match="pictures are kept in different ways"):
        convert(folders, tmp_path / "out", "lerobot")


def test_instructions_of_any_alphabet_keep_tasks_apart(make_store: MakeStore, make_episode: MakeEpisode, tmp_path: Path) -> None:
    prompts = ("拿起牛奶", "放下黄油", 'mettre "le lait" à côté')
    store = make_store(0)
    for number, prompt in enumerate(prompts):
        spec = EpisodeSpec("libero_object", 0, f"sampled:{number}", "demonstrations", prompt=prompt)
        store.write(number, make_episode(seed=number, spec=spec), 1)
    assert merge_datasets([store.folder], tmp_path / "merged").episodes == 3
    assert len(list((tmp_path / "merged").glob("*_demo.hdf5"))) == 3
    convert([store.folder], tmp_path / "lerobot", "lerobot")
    assert [info.prompt for info in list_episodes([tmp_path / "lerobot"])] == list(prompts)


def still_at(episode: Episode, steps: set[int]) -> Episode:
    """The episode with actions of nothing but the gripper held at these steps, and one gripper everywhere."""
    start, changed = 0, []
    for step in episode.steps:
        actions = step.executed_EA.copy()
        actions[:, 6] = -1
        for row in range(len(actions)):
            if start + row in steps:
                actions[row, :6] = 0
        start += len(actions)
        changed.append(replace(step, executed_EA=actions))
    return replace(episode, steps=changed)


@pytest.mark.parametrize("kind", ["hdf5", "lerobot"])
def test_filter_drops_no_ops_failures_and_tasks_and_says_so(
    make_store: MakeStore, write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path, kind: str
) -> None:
    other = EpisodeSpec("libero_object", 2, "sampled:9", "demonstrations")
    episodes = [
        still_at(make_episode(seed=0, steps=9), {0, 4, 5, 8}),
        make_episode(seed=1, outcome=Outcome.FAILURE),
        make_episode(seed=2, spec=other),
    ]
    if kind == "hdf5":
        store = make_store(0)
        for number, episode in enumerate(episodes):
            store.write(number, episode, 1)
        folder = store.folder
    else:
        folder = write_folder(episodes).folder
    done = filter_dataset([folder], tmp_path / "out", Filter(no_ops=True, failures=True, tasks=("libero_object:7",)))
    assert (done.episodes, done.steps, done.dropped_episodes, done.dropped_steps) == (1, 5, 2, 4)
    (info,) = list_episodes([tmp_path / "out"])
    left, kept = load_episode(info), [1, 2, 3, 6, 7]
    assert np.array_equal(left.actions_NA(), episodes[0].actions_NA()[kept])
    for row, t in enumerate(kept):
        assert np.array_equal(left.frames()[row].images["image"], episodes[0].frames()[t].images["image"])
    assert left.provenance["filtered"]["removed_steps"] == [0, 4, 5, 8]
    assert {key: value for key, value in left.provenance.items() if key != "filtered"} == episodes[0].provenance
    assert left.provenance["filtered"]["from"].endswith(("demo_0", "episode_000000"))


def test_episodes_of_nothing_but_no_ops_are_named_by_the_numbers_that_leave_them_out(
    make_store: MakeStore, make_episode: MakeEpisode, tmp_path: Path
) -> None:
    """Positions in the dataset, whatever else the filter drops before them; and nothing is written."""
    store = make_store(0)
    failed, moving = make_episode(seed=0, outcome=Outcome.FAILURE), make_episode(seed=1)
    for number, episode in enumerate([failed, moving, *(still_at(make_episode(seed=seed), set(range(10))) for seed in (2, 3))]):
        store.write(number, episode, 1)
    with pytest.raises(DatasetError, match=r"all 10 actions are no-ops; leave such episodes out with --without-numbers 2 3$"):
        filter_dataset([store.folder], tmp_path / "out", Filter(no_ops=True, failures=True))
    assert not (tmp_path / "out").exists()
    done = filter_dataset([store.folder], tmp_path / "out", Filter(no_ops=True, failures=True, without_numbers=(2, 3)))
    assert (done.episodes, done.dropped_episodes) == (1, 3)


@pytest.mark.parametrize("kind", ["hdf5", "lerobot"])
def test_a_filter_of_a_filter_keeps_the_first_ones_note(
    write_folder: WriteFolder, make_store: MakeStore, make_episode: MakeEpisode, tmp_path: Path, kind: str
) -> None:
    """Steps that were taken out stay known, or a replay would execute what is left as if it were all."""
    episodes = [still_at(make_episode(seed=0), {3, 4}), make_episode(seed=1)]
    store = write_folder(episodes) if kind == "lerobot" else make_store(0)
    with store.writing():
        for number, episode in enumerate(episodes):
            store.write(number, episode, 1)
    filter_dataset([store.folder], tmp_path / "moving", Filter(no_ops=True))
    filter_dataset([tmp_path / "moving"], tmp_path / "one", Filter(without_numbers=(1,)))
    (info,) = list_episodes([tmp_path / "one"])
    left = load_episode(info)
    assert removed_steps(left.provenance) == [3, 4] and left.provenance["filtered"]["earlier"]["no_ops"]
    with pytest.raises(DatasetError, match="2 steps were filtered out of it, so it cannot happen again"):
        require_replayable(info, left)


def test_a_folder_without_episodes_is_named(write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path) -> None:
    store = write_folder([make_episode()])
    with store.writing():
        store.remove(0)
    for edit in (
        lambda: convert([store.folder], tmp_path / "out", "hdf5"),
        lambda: merge_datasets([store.folder], tmp_path / "out"),
        lambda: overview([store.folder]),
        lambda: replay([str(store.folder)]),
    ):
        with pytest.raises(DatasetError, match="there is no episode in it"):
            edit()


def test_no_ops_are_those_of_openvla() -> None:
    """Against a loop in its words: norm of the motion below 1e-4, and the gripper as at the last step that was kept."""
    rng = np.random.default_rng(0)
    actions = (rng.normal(size=(60, 7)) * (rng.random((60, 1)) < 0.5)).astype(np.float32)
    actions[:, 6] = np.where(rng.random(60) < 0.7, -1, 1)
    kept, previous = [], None
    for t, action in enumerate(actions):
        no_op = np.linalg.norm(action[:6]) < 1e-4 and (previous is None or action[6] == previous)
        if not no_op:
            kept.append(t)
        if not no_op or previous is None:
            previous = action[6]
    assert np.flatnonzero(moving_steps(actions)).tolist() == kept and 20 < len(kept) < 60


def test_filters_that_leave_nothing_or_name_nothing_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    folder = make_store(2).folder
    with pytest.raises(DatasetError, match="no task 'libero_goal:1' here; there are libero_object:7"):
        filter_dataset([folder], tmp_path / "out", Filter(tasks=("libero_goal:1",)))
    with pytest.raises(DatasetError, match="no episode 2; there are 0 to 1"):
        filter_dataset([folder], tmp_path / "out", Filter(without_numbers=(2,)))
    with pytest.raises(DatasetError, match="nothing is left of 2 episodes"):
        filter_dataset([folder], tmp_path / "out", Filter(without_numbers=(0, 1)))


def test_statistics_of_both_formats_agree(make_store: MakeStore, tmp_path: Path, seen_by_lerobot: SeenByLeRobot) -> None:
    folder = make_store(3).folder
    convert([folder], tmp_path / "lerobot", "lerobot")
    one, other = (dataset_statistics(list_episodes([path]), pictures=True) for path in (folder, tmp_path / "lerobot"))
    assert one == other and len(one) == 4
    stored = seen_by_lerobot(tmp_path / "lerobot").meta.stats
    assert all(np.array_equal(np.array(value), stored[name][kind]) for name, kinds in one.items() for kind, value in kinds.items())
