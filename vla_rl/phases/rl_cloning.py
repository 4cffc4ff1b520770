"""Demonstrations beside RL: the endless stream of samples that behaviour cloning takes from."""

from __future__ import annotations

from typing import Any

from vla_rl.datasets.loader import TrainLoader, open_datasets, require_made_for
from vla_rl.datasets.samples import SampleBatch
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.sft_batches import noise_seeds
from vla_rl.policies.module import PolicyModule


class CloningStream:
    """Batches of demonstrations in a fixed order, with the noise seed of each row."""

    def __init__(self, loader: TrainLoader, seed: int) -> None:
        self._loader, self._seed = loader, seed

    def next_samples(self) -> tuple[SampleBatch, list[int]]:
        """The samples of the next update."""
        samples = next(self._loader)
        return samples, noise_seeds(self._seed, f"cloning {samples.update}", range(len(samples.observations)))

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._loader.load_state_dict(state)


def open_cloning(config: RlConfig, policy: PolicyModule) -> CloningStream:
    """The stream of a recipe. The policy keeps its own statistics.

    Raises ConventionMismatch or DatasetError for episodes of other conventions, rate or resolution than the policy was made for.
    """
    assert config.demonstrations is not None, "called where there are some"
    dataset, _ = open_datasets(config.demonstrations)
    require_made_for(dataset, config.initial_policy, policy.spec.conventions, policy.spec.resolution)
    size = config.algorithm.cloning.global_batch_size
    loader = TrainLoader(
        dataset,
        policy.spec.chunk_length,
        size,
        config.seed,
        workers=config.demonstrations.workers,
        first_picture_repeats=config.demonstrations.first_picture_repeats,
    )
    return CloningStream(loader, config.seed)
