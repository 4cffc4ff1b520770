"""LeRobot v3.0 folders of our own: LeRobot's class loads them, nothing is lost, and reading gives the samples that HDF5 gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.hdf5 import encode_episode
from vla_rl.datasets.lerobot_format import IMAGE_FEATURES, Pictures
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.loader import TrainLoader
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import EpisodeStore, list_episodes
from vla_rl.episode import VIEWS, Episode, EpisodeSpec, Outcome

MakeEpisode = Callable[..., Episode]
WriteFolder = Callable[..., LeRobotStore]
SeenByLeRobot = Callable[..., Any]


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.FAILURE])
@pytest.mark.parametrize("orientation", [Orientation.ROTATED_180, Orientation.RAW])
def test_png_loses_nothing_the_hdf5_file_is_the_same_bytes(
    write_folder: WriteFolder, make_episode: MakeEpisode, outcome: Outcome, orientation: Orientation
) -> None:
    first, second = (
        make_episode(seed=s, steps=10 + s, outcome=outcome, conventions=Conventions(orientation=orientation), corrected=True)
        for s in (1, 2)
    )
    store = write_folder([first, second])
    for episode, info in zip([first, second], list_episodes([store.folder])):
        assert encode_episode(load_episode(info), 1) == encode_episode(episode, 1)


@pytest.mark.parametrize("pictures", ["av1", "h264"])
def test_video_changes_nothing_but_pixels_and_those_a_little(
    write_folder: WriteFolder, make_episode: MakeEpisode, smooth_pictures: Callable[[Episode], Episode], pictures: Pictures
) -> None:
    episode = smooth_pictures(make_episode(steps=9, size=64))
    back = load_episode(list_episodes([write_folder([make_episode(seed=7, size=64), episode], pictures).folder])[1])
    for name in ("executed_EA", "labels_EA", "reward_E", "intervention_E", "sim_states_ED", "robot_states_ER"):
        for ours, theirs in zip(back.steps, episode.steps):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert back.provenance == episode.provenance and back.spec == episode.spec
    for t, frame in episode.frames().items():
        for view in VIEWS:
            error = np.abs(back.frames()[t].images[view].astype(float) - frame.images[view]).mean()
            assert 0 < error < 4, "of 255; a neighbouring picture differs by 8 or more, so it would not pass for this one"


@pytest.mark.parametrize("pictures", ["png", "av1", "h264"])
def test_lerobots_own_class_loads_ours(
    write_folder: WriteFolder, seen_by_lerobot: SeenByLeRobot, make_episode: MakeEpisode, pictures: Pictures
) -> None:
    """Every column of every row, also of windows that reach over both ends of an episode."""
    episodes = [make_episode(seed=seed, steps=5 + seed, size=64) for seed in range(2)]
    episodes[1] = make_episode(
        seed=1, steps=6, size=64, spec=EpisodeSpec("libero_object", 3, "sampled:4", "demonstrations", prompt="do it")
    )
    store = write_folder(episodes, pictures)
    ours = [load_episode(info) for info in list_episodes([store.folder])]
    theirs = seen_by_lerobot(store.folder, delta_timestamps={"action": [-0.05, 0, 0.05, 0.1], "observation.images.image2": [-0.05, 0]})
    assert (len(theirs), theirs.num_episodes, theirs.fps) == (11, 2, 20)
    rows = [(episode, t) for episode in ours for t in range(episode.num_steps)]
    for index, (episode, t) in enumerate(rows):
        item, frames, actions = theirs[index], episode.frames(), episode.actions_NA()
        steps = np.array([t - 1, t, t + 1, t + 2])
        inside = (steps >= 0) & (steps < len(actions))
        assert item["action_is_pad"].tolist() == (~inside).tolist()
        assert np.array_equal(item["action"].numpy()[inside], actions[steps[inside]])
        for feature, step in ((IMAGE_FEATURES["image"], None), (IMAGE_FEATURES["image2"], 1)):
            picture = item[feature] if step is None else item[feature][step]
            view = "image" if step is None else "image2"
            assert np.array_equal((picture.numpy().transpose(1, 2, 0) * 255).round().astype(np.uint8), frames[t].images[view])
        assert np.array_equal(item["observation.state"].numpy(), frames[t].state)
        assert item["task"] == frames[t].prompt
        assert np.array_equal(item["intended_action"].numpy(), episode.labels_NA()[t])
        last = t == len(actions) - 1
        assert (bool(item["next.done"]), bool(item["next.success"]), float(item["next.reward"])) == (last, last, float(last))
        assert bool(item["intervention"]) == np.concatenate([step.intervention_E for step in episode.steps])[t]
        assert float(item["timestamp"]) == np.float32(t / 20) and int(item["frame_index"]) == t
    row = theirs.meta.episodes[1]
    assert (row["outcome"], row["init"], row["suite_task"], row["tasks"]) == ("success", "sampled:4", 3, ["do it"])
    assert row["seed"] == episodes[1].spec.scene_seed and json.loads(row["provenance"])["fixtures"] == {"basket_1": [0.1, 0.2]}


def test_statistics_are_true_quantiles_over_all_frames(
    write_folder: WriteFolder, seen_by_lerobot: SeenByLeRobot, make_episode: MakeEpisode
) -> None:
    """Against numpy over all rows and all pixels; a second writer goes on with the statistics of the first."""
    episodes = [make_episode(seed=seed, steps=8 + 3 * seed) for seed in range(3)]
    store = write_folder(episodes[:2])
    with store.writing():
        store.write(2, episodes[2], 1)
    stats = seen_by_lerobot(store.folder).meta.stats
    actions = np.concatenate([episode.actions_NA() for episode in episodes]).astype(np.float64)
    pixels = np.concatenate([f.images["image2"].reshape(-1, 3) for e in episodes for f in e.frames().values()]) / 255
    for name, share in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        assert np.array_equal(stats["action"][name], np.quantile(actions, share, axis=0))
        # 1e-12: numpy interpolates quotients, the tally interpolates bytes and divides once
        assert np.allclose(stats[IMAGE_FEATURES["image2"]][name].reshape(3), np.quantile(pixels, share, axis=0), rtol=0, atol=1e-12)
    for name, value in (("mean", pixels.mean(0)), ("std", pixels.std(0)), ("min", pixels.min(0)), ("max", pixels.max(0))):
        assert np.allclose(stats[IMAGE_FEATURES["image2"]][name].reshape(3), value, rtol=0, atol=1e-12), name
    assert np.array_equal(stats["action"]["std"], actions.std(0)) and stats["action"]["count"][0] == len(actions)


@pytest.mark.parametrize("pictures", ["png", "h264"])
def test_training_sees_the_same_samples_from_both_formats(
    make_episode: MakeEpisode, smooth_pictures: Callable[[Episode], Episode], tmp_path: Path, pictures: Pictures
) -> None:
    """Whoever finished first: folders are read in the order of the recipe's numbers."""
    episodes = {number: smooth_pictures(make_episode(seed=number, steps=9 + number, size=16)) for number in range(3)}
    hdf5, folder = EpisodeStore(tmp_path / "hdf5"), LeRobotStore(tmp_path / "lerobot", pictures)
    with folder.writing():
        for number in (2, 0, 1):
            hdf5.write(number, episodes[number], 1)
            folder.write(number, episodes[number], 1)
    one, other = (EpisodeDataset(list_episodes([store.folder])) for store in (hdf5, folder))
    (first,), (second,) = one.sequential(100, 5), other.sequential(100, 5)
    assert np.array_equal(first.actions_BCA, second.actions_BCA) and np.array_equal(first.action_mask_BC, second.action_mask_BC)
    for a, b in zip(first.observations, second.observations):
        assert np.array_equal(a.state, b.state) and a.prompt == b.prompt
        for view in VIEWS:
            error = np.abs(a.images[view].astype(float) - b.images[view]).mean()
            assert error == 0 if pictures == "png" else error < 4, "of 255; neighbouring pictures differ by 8"
    loaders = [TrainLoader(dataset, 5, 8, seed=1) for dataset in (one, other)]
    assert [next(loaders[0]).index_B.tolist() for _ in range(5)] == [next(loaders[1]).index_B.tolist() for _ in range(5)]


@pytest.mark.parametrize("pictures", ["png", "h264"])
def test_observed_windows_are_lerobots_delta_timestamps(
    write_folder: WriteFolder, seen_by_lerobot: SeenByLeRobot, make_episode: MakeEpisode, pictures: Pictures
) -> None:
    """Pictures, states and the mask, at every sample of two episodes."""
    store = write_folder([make_episode(seed=seed, steps=6 + seed, size=16) for seed in range(2)], pictures)
    offsets, names = (-4, -1, 0, 2), [*IMAGE_FEATURES.values(), "observation.state"]
    theirs = seen_by_lerobot(store.folder, delta_timestamps={name: [offset / 20 for offset in offsets] for name in names})
    windows = EpisodeDataset(list_episodes([store.folder])).observed_windows(np.arange(len(theirs)), offsets)
    for index in range(len(theirs)):
        item = theirs[index]
        assert windows.mask_BT[index].tolist() == (~item["observation.state_is_pad"]).tolist()
        assert np.array_equal(windows.states_BTS[index], item["observation.state"].numpy())
        for view, feature in enumerate(IMAGE_FEATURES.values()):
            pixels = (item[feature].numpy().transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
            assert np.array_equal(windows.images_BTVHWC[index, :, view], pixels)


def test_spawned_workers_read_folders(write_folder: WriteFolder, make_episode: MakeEpisode) -> None:
    dataset = EpisodeDataset(list_episodes([write_folder([make_episode(size=16)], "h264").folder]))
    alone, workers = TrainLoader(dataset, 4, 6, seed=0), TrainLoader(dataset, 4, 6, seed=0, workers=1)
    next(alone), next(workers)
    ours, theirs = next(alone), next(workers)
    assert all(np.array_equal(a.images["image2"], b.images["image2"]) for a, b in zip(ours.observations, theirs.observations))
    workers.close()


def test_what_a_folder_cannot_hold_is_refused(write_folder: WriteFolder, make_episode: MakeEpisode, tmp_path: Path) -> None:
    store = write_folder([make_episode()])
    with store.writing():
        assert store.write(0, make_episode(), 1) == 0, "the same number again: it is there already"
        with pytest.raises(DatasetError, match="frame_every is 3: a LeRobot dataset has a picture in every row"):
            store.write(1, make_episode(frame_every=3), 3)
        with pytest.raises(DatasetError, match=r"does not fit .*images\.image is image \(16, 16, 3\), there image \(8, 8, 3\)"):
            store.write(1, make_episode(size=16), 1)
    with pytest.raises(DatasetError, match="keeps pictures as png, not as av1"), LeRobotStore(store.folder, "av1").writing():
        pass
    small = LeRobotStore(tmp_path / "v", "av1")
    with small.writing(), pytest.raises(DatasetError, match=r"8 x 8; av1 video needs .* at least 64"):
        small.write(0, make_episode(), 1)
