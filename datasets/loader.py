"""Which episodes are trained on, and the endless shuffled stream of training batches: resumable, split by rank, read ahead.

The stream is the permutation of epoch 0, then of epoch 1, ...; update u takes the next `global_batch_size` positions, so that
every batch is full and every sample comes once per epoch (an episode's first picture `first_picture_repeats` times). Rank r
takes the r-th part of it. Which samples form update u depends on (seed, u) and on nothing else: not on workers, ranks, or where a
run was resumed.

Shape legend: B batch (of one rank), X samples of the dataset.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from vla_rl.datasets.episode_rows import EpisodeInfo, require_alike
from vla_rl.datasets.frames import FileFrames, MemoryFrames
from vla_rl.datasets.samples import EpisodeDataset, SampleBatch, SampleColumns
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import Int64, Outcome


@dataclass(frozen=True)
class DataConfig:
    """Which episodes are trained on, and how they are read. Part of a recipe."""

    paths: tuple[str, ...] = ()
    """HDF5 files, folders of them, LeRobot folders (v2 or v3), or run directories of `vla-rl collect`; at least one."""
    labels: Literal["clean", "executed"] = "clean"
    """Targets: `clean` is the expert's intention, `executed` what ran (with the noise of a noisy expert)."""
    human_weight: float = 1.0
    """Weight in the loss of samples at which an operator acted (corrections, teleoperation); others have weight 1. Above 0."""
    first_picture_repeats: int = 1
    """How often training gives out the first picture of each episode where it gives out any other once; at least 1. Only there nothing but
    the prompt says where to go: every later state shows where the hand is already going, and to go on is easier to learn than to read.
    Where an operator corrected a policy, only the operator's steps are samples, so a first picture counts if it was theirs."""
    only_success: bool = True
    """Leave out episodes that did not reach their goal."""
    validation_fraction: float = 0.1
    """Share of scenes (suite, task, init) kept out of training; 0 to 0.5, rounded up to whole scenes."""
    cache: bool = True
    """Keep all pictures in memory as uint8 (fastest); needs workers = 0."""
    cache_limit_gib: float = 8.0
    """Most memory for the pictures (GiB); a larger dataset is an error. Above 0."""
    workers: int = 0
    """Processes that read ahead (constant memory); 0 reads in the training process. 0 to 64."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("paths is empty; name at least one file, folder or collect run")
        if not 0 <= self.validation_fraction <= 0.5:
            raise ValueError(f"validation_fraction is {self.validation_fraction}, must be 0 to 0.5")
        if not self.human_weight > 0:
            raise ValueError(f"human_weight is {self.human_weight}, must be above 0; 1 treats operators like everybody")
        if self.first_picture_repeats < 1:
            raise ValueError(f"first_picture_repeats is {self.first_picture_repeats}, must be at least 1; 1 treats all pictures alike")
        if not 0 <= self.workers <= 64:
            raise ValueError(f"workers is {self.workers}, must be 0 to 64")
        if self.cache_limit_gib <= 0:
            raise ValueError(f"cache_limit_gib is {self.cache_limit_gib}, must be above 0 (cache: false turns the cache off)")
        if self.cache and self.workers:
            raise ValueError(f"cache is true and workers is {self.workers}: the cache lives in one process; set cache: false or workers: 0")


def open_datasets(config: DataConfig) -> tuple[EpisodeDataset, EpisodeDataset | None]:
    """The training and the validation part (None when `validation_fraction` is 0) of the recipe's episodes.

    Raises DatasetError when nothing is left to train on, when files are damaged or unlike, or when the cache is too small.
    """
    found = list_episodes(config.paths)
    kept = [info for info in found if info.outcome is Outcome.SUCCESS or not config.only_success]
    train, validation = split_scenes(kept, config.validation_fraction)
    if not train:
        raise DatasetError(
            f"{', '.join(config.paths)}: {len(found)} episodes, {len(kept)} of them usable (only_success: {config.only_success}), "
            f"{len(train)} for training after validation_fraction {config.validation_fraction}; record more, or loosen these"
        )
    require_alike(kept)
    return _open(config, train), _open(config, validation) if validation else None


def _open(config: DataConfig, infos: Sequence[EpisodeInfo]) -> EpisodeDataset:
    frames = MemoryFrames(infos, config.cache_limit_gib) if config.cache else FileFrames(infos)
    return EpisodeDataset(infos, config.labels, frames, config.human_weight)


def split_scenes(infos: Sequence[EpisodeInfo], fraction: float) -> tuple[list[EpisodeInfo], list[EpisodeInfo]]:
    """Training and validation episodes: `fraction` of the scenes (rounded up) with the smallest hashes are for validation.

    All episodes of one scene (other goals, other samples) are on one side, whatever the order of files.
    """
    scenes = [f"{info.spec.suite}:{info.spec.task}:{info.spec.init}" for info in infos]
    ranked = sorted(set(scenes), key=lambda scene: hashlib.sha256(scene.encode()).hexdigest())
    held_out = set(ranked[: math.ceil(fraction * len(ranked))])
    train = [info for info, scene in zip(infos, scenes) if scene not in held_out]
    return train, [info for info, scene in zip(infos, scenes) if scene in held_out]


def epoch_samples(dataset: EpisodeDataset, first_picture_repeats: int) -> Int64:
    """int64[X']: the samples of one epoch in order, those of the first pictures of episodes several times."""
    repeats_X = np.where(dataset.sample_positions_X == 0, first_picture_repeats, 1)
    return np.repeat(np.arange(len(dataset)), repeats_X)


class BatchOrder:
    """Which samples form which update: a function of (seed, update)."""

    def __init__(self, num_samples: int, global_batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if global_batch_size < 1 or global_batch_size % world_size:
            raise ValueError(f"global_batch_size is {global_batch_size}, must be a positive multiple of the {world_size} ranks")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, must be 0 to {world_size - 1}")
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self._rank, self._per_rank = rank, global_batch_size // world_size
        self._permutations: dict[int, Int64] = {}

    def indices(self, update: int) -> Int64:
        """int64[B]: this rank's samples of `update`."""
        start = update * self.global_batch_size + self._rank * self._per_rank
        positions = np.arange(start, start + self._per_rank)
        epochs, within = np.divmod(positions, self.num_samples)
        return np.concatenate([self._permutation(int(epoch))[within[epochs == epoch]] for epoch in np.unique(epochs)])

    def _permutation(self, epoch: int) -> Int64:
        if epoch not in self._permutations:
            kept = {number: order for number, order in self._permutations.items() if number >= epoch - 1}
            self._permutations = kept | {epoch: np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)}
        return self._permutations[epoch]


class TrainLoader:
    """Iterator over the training batches of one rank, for ever.

    `state_dict` is the number of the next update (and what must not change over a resume); batches that workers had read
    ahead are read again after a resume.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        chunk_length: int,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        first_picture_repeats: int = 1,
    ) -> None:
        self.dataset = dataset
        self.update = 0
        samples_X = epoch_samples(dataset, first_picture_repeats)
        self._order = BatchOrder(len(samples_X), global_batch_size, seed, rank, world_size)
        self._updates = _Updates(dataset, samples_X, self._order, chunk_length)
        self._workers = workers
        self._ahead: Iterator[SampleColumns] | None = None

    @property
    def epoch(self) -> float:
        """How many epochs have been given out."""
        return self.update * self._order.global_batch_size / self._order.num_samples

    def __iter__(self) -> Iterator[SampleBatch]:
        return self

    def __next__(self) -> SampleBatch:
        if self._ahead is None:
            self._ahead = self._start()
        columns = next(self._ahead)
        self.update += 1
        return self.dataset.batch(columns)

    def _start(self) -> Iterator[SampleColumns]:
        first = self.update
        if not self._workers:
            return (self._updates[update] for update in _From(first))
        context = {"multiprocessing_context": "spawn", "persistent_workers": True, "prefetch_factor": 2}
        return iter(
            DataLoader(self._updates, sampler=_From(first), batch_size=None, num_workers=self._workers, collate_fn=_same, **context)
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        order = self._order
        return {"update": self.update, "seed": order.seed, "num_samples": order.num_samples, "global_batch_size": order.global_batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, also with another number of ranks or workers.

        Raises DatasetError when seed, dataset size or batch size are not those of the state: the order would be another one.
        """
        own = self.state_dict()
        unlike = [
            f"{name} is {own[name]}, the checkpoint has {state[name]}" for name in own if name != "update" and own[name] != state[name]
        ]
        if unlike:
            raise DatasetError(
                f"cannot continue this order of samples: {'; '.join(unlike)}; restore the episodes that were added, removed or changed, or "
                "start in a new run_dir"
            )
        self.close()
        self.update = int(state["update"])

    def close(self) -> None:
        """Stop the worker processes; the next batch starts them again."""
        self._ahead = None


class _Updates(Dataset[SampleColumns]):
    """Update number -> columns of this rank's batch; what worker processes hold."""

    def __init__(self, dataset: EpisodeDataset, samples_X: Int64, order: BatchOrder, chunk_length: int) -> None:
        self._dataset, self._samples_X, self._order, self._chunk_length = dataset, samples_X, order, chunk_length

    def __getitem__(self, update: int) -> SampleColumns:
        return self._dataset.columns(self._samples_X[self._order.indices(update)], self._chunk_length, update)


class _From(Sampler[int]):
    """first, first + 1, ..."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[int]:
        update = self._first
        while True:
            yield update
            update += 1


def _same(columns: Any) -> Any:
    """Collate nothing: an item is a whole batch already."""
    return columns
