"""Demonstrations beside RL: the endless stream of samples that behaviour cloning takes from."""

from __future__ import annotations

from typing import Any

from vla_rl.config import ConfigError
from vla_rl.conventions import require_equal
from vla_rl.datasets.loader import TrainLoader, open_datasets
from vla_rl.datasets.samples import SampleBatch
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.sft import noise_seeds
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

    Raises ConfigError for pictures of another size than it was made for, ConventionMismatch for data of other conventions.
    """
    assert config.demonstrations is not None, "called where there are some"
    dataset, _ = open_datasets(config.demonstrations)
    require_equal("initial_policy", policy.spec.conventions, "demonstrations", dataset.infos[0].conventions)
    found = dataset.infos[0].resolution
    if found != policy.spec.resolution:
        raise ConfigError(f"demonstrations has pictures of {found} px, the initial policy was made for {policy.spec.resolution} px")
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
