"""Samples: windows and masks against a slow reference, pictures with their own actions, statistics over all rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.datasets.edit import convert
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.frames import FileFrames, MemoryFrames
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.samples import EpisodeDataset, action_windows
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.stats import compute_statistics
from vla_rl.datasets.store import EpisodeStore, list_episodes
from vla_rl.episode import VIEWS, ActionChunk, Episode

MakeStore = Callable[..., EpisodeStore]
MakeEpisode = Callable[..., Episode]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), chunk_length=st.integers(1, 12), data=st.data())
def test_windows_equal_a_loop(lengths: list[int], chunk_length: int, data: st.DataObject) -> None:
    """Row r of the table holds r, so that a window shows which rows it took."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    table = np.arange(bounds[-1], dtype=np.float32)[:, None]
    starts = np.array(data.draw(st.lists(st.integers(0, int(bounds[-1]) - 1), min_size=1, max_size=6)))
    ends = bounds[np.searchsorted(bounds, starts, side="right")]
    actions, mask = action_windows(table, starts, ends, chunk_length)
    assert (actions.shape, mask.shape) == ((len(starts), chunk_length, 1), (len(starts), chunk_length))
    for sample, (start, end) in enumerate(zip(starts, ends)):
        for step in range(chunk_length):
            inside = start + step < end
            assert mask[sample, step] == inside
            assert actions[sample, step, 0] == (start + step if inside else end - 1)


@pytest.mark.parametrize("frame_every", [1, 3])
@pytest.mark.parametrize("labels", ["clean", "executed"])
def test_every_sample_is_an_observed_step_with_its_own_actions(make_store: MakeStore, frame_every: int, labels: str) -> None:
    store = make_store(3, frame_every=frame_every)
    dataset = EpisodeDataset(list_episodes([store.folder]), labels)  # type: ignore[arg-type]
    (batch,) = dataset.sequential(batch_size=100, chunk_length=5)
    expected = []
    for number in store.numbers():
        episode = read_episode(store.path(number))
        actions = episode.labels_NA() if labels == "clean" else episode.actions_NA()
        expected += [(frame, actions[t : t + 5]) for t, frame in episode.frames().items()]
    assert len(dataset) == len(batch.observations) == len(expected)
    for observation, actions_CA, mask_C, (frame, true_actions) in zip(
        batch.observations, batch.actions_BCA, batch.action_mask_BC, expected
    ):
        assert all(np.array_equal(observation.images[view], frame.images[view]) for view in VIEWS)
        assert np.array_equal(observation.state, frame.state) and observation.prompt == frame.prompt
        assert mask_C.tolist() == [step < len(true_actions) for step in range(5)]
        assert np.array_equal(actions_CA[mask_C], true_actions) and np.all(actions_CA[~mask_C] == true_actions[-1])
    assert batch.actions_BCA.dtype == batch.observations[0].state.dtype == np.float32


@pytest.mark.parametrize("frame_every", [1, 2])
def test_of_a_corrected_episode_only_the_operators_steps_are_taught(make_store: MakeStore, frame_every: int) -> None:
    """Against a loop over the episodes: samples, masks inside chunks, weights, and pictures that still belong to their steps."""
    store = make_store(3, frame_every=frame_every, corrected=True)
    episodes = [read_episode(store.path(number)) for number in store.numbers()]
    dataset = EpisodeDataset(list_episodes([store.folder]), human_weight=2.5)
    (batch,) = dataset.sequential(batch_size=100, chunk_length=4)
    expected = []
    for episode in episodes:
        acted = np.concatenate([step.intervention_E for step in episode.steps])
        assert acted.any() and not acted.all()
        expected += [(frame, [*acted[t : t + 4], *[False] * 4][:4]) for t, frame in episode.frames().items() if acted[t]]
    assert [mask.tolist() for mask in batch.action_mask_BC] == [mask for _, mask in expected]
    assert all(np.array_equal(seen.images["image"], frame.images["image"]) for seen, (frame, _) in zip(batch.observations, expected))
    assert batch.weight_B.tolist() == [2.5] * len(expected)
    assert batch.target_count(slice(1, 3)) == 2.5 * 7 * sum(sum(mask) for _, mask in expected[1:3])


def test_episodes_of_one_hand_are_taught_whole(make_store: MakeStore) -> None:
    """A script's steps weigh 1, a person's as much as the recipe says."""
    store = make_store(2)
    dataset = EpisodeDataset(list_episodes([store.folder]), human_weight=3.0)
    assert len(dataset) == 9 + 10 and dataset.weight_R.tolist() == [1.0] * 9 + [3.0] * 10 and dataset.target_R.all()


@pytest.mark.parametrize("kind", ["hdf5", "lerobot"])
def test_observed_windows_equal_a_loop(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    """Every sample, offsets that reach over both ends; the neighbours are pictures of the same episode."""
    paths = [make_store(3).folder]
    if kind == "lerobot":
        paths = [convert(paths, tmp_path / "folder", "lerobot").folder]
    dataset = EpisodeDataset(list_episodes(paths))
    episodes = [load_episode(info) for info in dataset.infos]
    offsets = (-12, -2, 0, 1, 4)
    windows = dataset.observed_windows(np.arange(len(dataset))[::-1], offsets)
    steps = dataset.sample_rows_X - dataset.row_starts[dataset.sample_episodes_X]
    rows = [(episodes[number], t) for number, t in zip(dataset.sample_episodes_X.tolist(), steps.tolist())]
    for row, (episode, t) in enumerate(reversed(rows)):
        for column, offset in enumerate(offsets):
            inside = 0 <= t + offset < episode.num_steps
            frame = episode.frames()[min(max(t + offset, 0), episode.num_steps - 1)]
            assert windows.mask_BT[row, column] == inside
            assert np.array_equal(windows.states_BTS[row, column], frame.state)
            assert all(np.array_equal(windows.images_BTVHWC[row, column, v], frame.images[view]) for v, view in enumerate(VIEWS))


def test_memory_and_files_give_the_same_pictures(make_store: MakeStore) -> None:
    infos = list_episodes([make_store(3, frame_every=3).folder])
    files, memory = FileFrames(infos), MemoryFrames(infos, limit_gib=1)
    episodes, positions = np.array([2, 0, 1, 2]), np.array([1, 0, 2, 0])
    assert np.array_equal(files.read(episodes, positions), memory.read(episodes, positions))


def test_a_cache_that_is_too_small_is_an_error(make_store: MakeStore) -> None:
    with pytest.raises(
        DatasetError, match=r"hold 0\.00 GiB of pictures, cache_limit_gib is 1e-06; raise it, or set cache: false and workers"
    ):
        MemoryFrames(list_episodes([make_store(2).folder]), limit_gib=1e-6)


def test_open_files_are_not_pickled_and_stay_few(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.datasets.frames.OPEN_FILES", 2)
    files = FileFrames(list_episodes([make_store(4).folder]))
    everything = files.read(np.array([0, 1, 2, 3, 0]), np.zeros(5, np.int64))
    assert len(files._hdf5._open) == 2
    copy = pickle.loads(pickle.dumps(files))
    assert not copy._hdf5._open and np.array_equal(copy.read(np.array([3]), np.array([0]))[0], everything[3])


def test_a_file_that_is_cut_while_training_is_named(make_store: MakeStore) -> None:
    store = make_store(2)
    files = FileFrames(list_episodes([store.folder]))
    store.path(1).write_bytes(store.path(1).read_bytes()[:3000])
    with pytest.raises(DatasetError, match=r"episode_000001\.hdf5: not a whole HDF5 file"):
        files.read(np.array([0, 1]), np.array([0, 0]))


def test_statistics_are_numpys_over_all_rows(make_store: MakeStore) -> None:
    store = make_store(4, frame_every=3)
    episodes = [read_episode(store.path(number)) for number in store.numbers()]
    statistics = compute_statistics(EpisodeDataset(list_episodes([store.folder])))
    actions = np.concatenate([episode.labels_NA() for episode in episodes]).astype(np.float64)
    action = statistics.features["action"]
    assert action.count == 9 + 10 + 11 + 12, "rows without a picture count too"
    assert np.array_equal(action.q01, np.quantile(actions, 0.01, axis=0)) and np.array_equal(action.q99, np.quantile(actions, 0.99, axis=0))
    assert np.array_equal(action.min, actions.min(0)) and np.array_equal(action.std, actions.std(0))
    means = np.mean([np.quantile(episode.labels_NA(), 0.01, axis=0) for episode in episodes], axis=0)
    assert not np.allclose(action.q01, means), "a mean of per-episode quantiles is another number (LeRobot #4156)"
    states = np.concatenate(
        [step.robot_states_ER[:, 2:5] for episode in episodes for step in episode.steps if step.robot_states_ER is not None]
    )
    assert np.array_equal(statistics.features["observation.state"].max[:3], states.astype(np.float32).max(0))


def test_a_demonstration_of_no_ops_is_named(make_store: MakeStore, make_episode: MakeEpisode) -> None:
    store = make_store(1)
    still = make_episode(seed=8, steps=6)
    for step in still.steps:
        step.labels_EA = np.tile(np.float32([0, 0, 0, 0, 0, 0, -1]), (len(step.labels_EA), 1))
        step.proposed = ActionChunk(step.executed_EA, step.labels_EA)
    store.write(1, still, 1)
    with pytest.raises(
        DatasetError, match=r"episode_000001\.hdf5:demo_0: all 6 actions are no-ops, .* libero_object task 7 \('pick up the milk"
    ):
        EpisodeDataset(list_episodes([store.folder]))


def test_unlike_episodes_are_named(make_store: MakeStore, make_episode: MakeEpisode) -> None:
    store = make_store(1)
    store.write(1, make_episode(size=16), 1)
    with pytest.raises(DatasetError, match=r"episode_000001\.hdf5:demo_0 \(16 px.* is unlike .*episode_000000\.hdf5:demo_0 \(8 px"):
        EpisodeDataset(list_episodes([store.folder]))
