"""The stream of batches: order, resume, ranks, spawned workers, and the split into training and validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.config import ConfigError, build
from vla_rl.datasets.loader import BatchOrder, DataConfig, TrainLoader, open_datasets, split_scenes
from vla_rl.datasets.samples import EpisodeDataset, SampleBatch
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import EpisodeStore, list_episodes
from vla_rl.episode import Episode, EpisodeSpec, Outcome

MakeStore = Callable[..., EpisodeStore]
MakeEpisode = Callable[..., Episode]


def orders(batches: Iterable[SampleBatch], count: int) -> list[list[int]]:
    return [batch.index_B.tolist() for batch in islice(batches, count)]


@given(num_samples=st.integers(1, 40), per_rank=st.integers(1, 9), ranks=st.integers(1, 4), seed=st.integers(0, 5))
def test_every_epoch_holds_every_sample_once(num_samples: int, per_rank: int, ranks: int, seed: int) -> None:
    """Against the definition: the stream is one permutation after the other, cut into batches, each batch cut into ranks."""
    batch = per_rank * ranks
    parts = [BatchOrder(num_samples, batch, seed, rank, ranks) for rank in range(ranks)]
    updates = -(-3 * num_samples // batch)
    stream = np.concatenate([part.indices(update) for update in range(updates) for part in parts])
    epochs = [stream[epoch * num_samples : (epoch + 1) * num_samples] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(num_samples)) for epoch in epochs)
    whole = BatchOrder(num_samples, batch, seed)
    assert np.array_equal(stream, np.concatenate([whole.indices(update) for update in range(updates)])), "ranks share one global batch"
    assert np.array_equal(whole.indices(0), BatchOrder(num_samples, batch, seed).indices(0))


def test_epochs_and_seeds_differ() -> None:
    order = BatchOrder(30, 30, seed=1)
    assert order.indices(0).tolist() != order.indices(1).tolist() != BatchOrder(30, 30, seed=2).indices(1).tolist()


@pytest.mark.parametrize(
    ("batch", "rank", "ranks", "message"), [(6, 0, 4, "multiple of the 4 ranks"), (8, 4, 4, "rank is 4, must be 0 to 3")]
)
def test_a_batch_that_ranks_cannot_share_is_refused(batch: int, rank: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchOrder(10, batch, 0, rank, ranks)


def test_resume_goes_on_where_it_stopped(make_store: MakeStore) -> None:
    dataset = EpisodeDataset(list_episodes([make_store(3).folder]))
    whole = orders(TrainLoader(dataset, 4, 8, seed=3), 10)
    first = TrainLoader(dataset, 4, 8, seed=3)
    assert orders(first, 4) == whole[:4]
    second = TrainLoader(dataset, 4, 8, seed=3)
    next(second)
    second.load_state_dict(first.state_dict())
    assert orders(second, 6) == whole[4:] and second.update == 10
    assert second.epoch == 80 / len(dataset)


def test_resume_with_another_order_is_refused(make_store: MakeStore) -> None:
    dataset = EpisodeDataset(list_episodes([make_store(2).folder]))
    state = TrainLoader(dataset, 4, 8, seed=3).state_dict()
    with pytest.raises(DatasetError, match="seed is 4, the checkpoint has 3; global_batch_size is 16, the checkpoint has 8"):
        TrainLoader(dataset, 4, 16, seed=4).load_state_dict(state)


def test_a_resume_with_other_samples_is_refused(make_store: MakeStore) -> None:
    """As many of them, too; a checkpoint that was written before the digest existed goes on."""
    infos = list_episodes([make_store(2).folder])
    state = TrainLoader(EpisodeDataset(infos), 4, 8, seed=3).state_dict()
    other = TrainLoader(EpisodeDataset(infos[::-1]), 4, 8, seed=3)
    with pytest.raises(DatasetError, match=r"samples_sha256 is [0-9a-f]{64}, the checkpoint has [0-9a-f]{64}"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "samples_sha256"})


def test_spawned_workers_give_the_same_batches_also_after_a_resume(make_store: MakeStore) -> None:
    """h5py objects cannot be pickled (LIBERO #19): files are opened in the worker; the order does not depend on workers."""
    dataset = EpisodeDataset(list_episodes([make_store(3, frame_every=3).folder]))
    next(dataset.sequential(2, 4))  # files are open in this process now
    alone, workers = TrainLoader(dataset, 4, 6, seed=0), TrainLoader(dataset, 4, 6, seed=0, workers=2)
    next(alone)
    workers.load_state_dict(alone.state_dict())
    for ours, theirs in zip(islice(alone, 5), islice(workers, 5)):
        assert ours.update == theirs.update and np.array_equal(ours.index_B, theirs.index_B)
        assert np.array_equal(ours.actions_BCA, theirs.actions_BCA) and np.array_equal(ours.action_mask_BC, theirs.action_mask_BC)
        for one, other in zip(ours.observations, theirs.observations):
            assert np.array_equal(one.images["image2"], other.images["image2"]) and np.array_equal(one.state, other.state)
    workers.close()


def test_a_worker_that_meets_a_damaged_file_says_which(make_store: MakeStore) -> None:
    store = make_store(2)
    dataset = EpisodeDataset(list_episodes([store.folder]))
    os.truncate(store.path(1), 3000)
    with pytest.raises(DatasetError, match=r"episode_000001\.hdf5: not a whole HDF5 file"):
        orders(TrainLoader(dataset, 4, len(dataset), seed=0, workers=1), 1)


def test_sequential_batches_split_by_rank(make_store: MakeStore) -> None:
    dataset = EpisodeDataset(list_episodes([make_store(2).folder]))
    seen = [index for rank in range(3) for batch in dataset.sequential(4, 4, rank, 3) for index in batch.index_B.tolist()]
    assert sorted(seen) == list(range(len(dataset)))


def test_scenes_are_never_on_both_sides(make_store: MakeStore, make_episode: MakeEpisode) -> None:
    """Two goals in one scene share its pictures: both are held out, or none; and the split ignores the order of files."""
    store = make_store(0)
    for number in range(20):
        goal = "(And (In milk_1 basket_1_contain_region))" if number % 2 else ""
        spec = EpisodeSpec(
            "libero_object", 0, f"sampled:{number // 2}", "demonstrations", goal=goal, prompt="the milk" if goal else "the soup"
        )
        store.write(number, make_episode(seed=number, spec=spec), 1)
    infos = list_episodes([store.folder])
    train, validation = split_scenes(infos, 0.25)
    assert len(validation) == 6 and len(train) == 14, "3 of 10 scenes, rounded up"
    assert not {info.spec.init for info in train} & {info.spec.init for info in validation}
    assert {info.name for info in split_scenes(infos[::-1], 0.25)[1]} == {info.name for info in validation}
    assert split_scenes(infos, 0.0) == (infos, [])


def test_failures_are_left_out_and_an_empty_rest_is_an_error(make_store: MakeStore, make_episode: MakeEpisode) -> None:
    store = make_store(3)
    store.write(3, make_episode(seed=3, outcome=Outcome.FAILURE), 1)
    paths = (str(store.folder),)
    train, validation = open_datasets(DataConfig(paths, validation_fraction=0.3))
    assert validation is not None and len(train.infos) + len(validation.infos) == 3
    train, validation = open_datasets(DataConfig(paths, validation_fraction=0.0, only_success=False, cache=False))
    assert validation is None and len(train.infos) == 4
    for number in range(3):
        store.path(number).unlink()
    with pytest.raises(DatasetError, match=r"1 episodes, 0 of them usable \(only_success: True\), 0 for training .* record more"):
        open_datasets(DataConfig(paths))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "paths is empty"),
        ({"paths": ["a"], "validation_fraction": 0.7}, "validation_fraction is 0.7, must be 0 to 0.5"),
        ({"paths": ["a"], "workers": 2}, "cache is true and workers is 2"),
        ({"paths": ["a"], "first_picture_repeats": 0}, "first_picture_repeats is 0, must be at least 1"),
        ({"paths": ["a"], "cache_limit_gib": 0}, "cache_limit_gib is 0"),
        ({"paths": ["a"], "labels": "noisy"}, "clean"),
        ({"paths": ["a"], "worker": 2}, "workers"),
    ],
)
def test_bad_configurations_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(DataConfig, values, where="data")


def test_first_pictures_come_as_often_as_asked_and_all_others_once(make_store: MakeStore) -> None:
    """Three episodes: an epoch has each first picture five times; validation and the number of samples know nothing of it."""
    dataset = EpisodeDataset(list_episodes([make_store(3).folder]))
    loader = TrainLoader(dataset, 4, 1, seed=3, first_picture_repeats=5)
    epoch = [index for [index] in orders(loader, len(dataset) + 3 * 4)]
    counts = np.bincount(epoch, minlength=len(dataset))
    assert loader.epoch == 1 and (counts == np.where(dataset.sample_positions_X == 0, 5, 1)).all()
    assert (dataset.sample_positions_X == 0).sum() == 3
    assert sum(len(batch.index_B) for batch in dataset.sequential(4, 4)) == len(dataset)


def test_a_resume_with_other_repeats_is_refused(make_store: MakeStore) -> None:
    """The order of samples would be another one."""
    dataset = EpisodeDataset(list_episodes([make_store(2).folder]))
    state = TrainLoader(dataset, 4, 8, seed=3).state_dict()
    with pytest.raises(DatasetError, match=rf"num_samples is {len(dataset) + 4}, the checkpoint has {len(dataset)}"):
        TrainLoader(dataset, 4, 8, seed=3, first_picture_repeats=3).load_state_dict(state)
