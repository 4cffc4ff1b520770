"""FAST action tokens of a run: trained on its demonstrations, once, before the policy is made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from vla_rl.datasets.samples import EpisodeDataset, action_windows
from vla_rl.engine.world import World
from vla_rl.episode import ACTION_DIM
from vla_rl.policies.checkpoint import atomic_folder
from vla_rl.policies.factory import PolicyConfig
from vla_rl.policies.processor import Affine
from vla_rl.policies.statistics import ACTION, Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.fast import ACTION_TOKENIZER_FILE, train_fast

_CHUNKS = 4096
"""Chunks that are transformed at once."""


def tokenizer_folder(config: PolicyConfig, dataset: EpisodeDataset, statistics: Statistics, folder: Path, world: World) -> str | None:
    """Where the policy's tokenizers are; None for the config's own folder.

    Where the config asks for FAST tokens and its folder has none, `folder` gets the prompts' tokenizer and one trained on the actions
    of `dataset`. Rank 0 writes it; every rank calls this.
    """
    if not isinstance(config, TokenConfig) or config.action_tokens.kind != "fast":
        return None
    prompts = Path(config.tokenizer or SHIPPED_TOKENIZER)
    if (prompts / ACTION_TOKENIZER_FILE).is_file():
        return None
    if world.leads and not folder.is_dir():
        trained = train_fast(_normalised_chunks(config, dataset, statistics), config.action_tokens, config.chunk_length)
        with atomic_folder(folder) as temporary:
            shutil.copytree(prompts, temporary, dirs_exist_ok=True)
            trained.pairs.save(str(temporary / ACTION_TOKENIZER_FILE))
    world.barrier()
    return str(folder)


def _normalised_chunks(config: TokenConfig, dataset: EpisodeDataset, statistics: Statistics) -> Iterator[torch.Tensor]:
    """float32[X, C, 7]: the chunk of every sample, in order, as the policy will see it."""
    affine = Affine(statistics.feature(ACTION, ACTION_DIM), config.normalization)
    ends_X = dataset.row_starts[dataset.sample_episodes_X + 1]
    for start in range(0, len(dataset), _CHUNKS):
        part = slice(start, start + _CHUNKS)
        actions_XCA, _ = action_windows(dataset.actions_RA, dataset.sample_rows_X[part], ends_X[part], config.chunk_length)
        yield affine.forward(torch.from_numpy(actions_XCA))
