"""Samples as a policy's training loss takes them, the noise that belongs to each, and what the loss counts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from vla_rl.datasets.samples import SampleBatch
from vla_rl.episode import ACTION_DIM
from vla_rl.policies.base import Batch, LossSums
from vla_rl.policies.module import PolicyModule

MicroBatch = tuple[Batch, list[int]]
"""Model inputs and the noise seeds of the rows, draw after draw."""


def training_batch(policy: PolicyModule, samples: SampleBatch, rows: slice) -> Batch:
    """Some rows of samples as a policy takes them, with their weights in the loss where they are not all 1."""
    batch = policy.preprocess(samples.observations[rows], samples.actions_BCA[rows], samples.action_mask_BC[rows])
    weight_B = samples.weight_B[rows]
    return batch if (weight_B == 1).all() else replace(batch, weight_B=torch.from_numpy(weight_B).to(batch.state_BS.device))


def noise_seeds(seed: int, stream: str, places: Sequence[int]) -> list[int]:
    """A 63-bit seed for each place of a global batch, from (seed, stream, place) and nothing else."""
    digests = (hashlib.sha256(f"sft:{seed}:{stream}:{place}".encode()).digest() for place in places)
    return [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]


def noise_draws(seed: int, stream: str, places: Sequence[int], draws: int) -> list[list[int]]:
    """`noise_seeds` of `draws` streams, the first of which is `stream` itself."""
    return [noise_seeds(seed, stream if draw == 0 else f"{stream} draw {draw}", places) for draw in range(draws)]


def supervised_loss(policy: PolicyModule, micro_batch: MicroBatch) -> LossSums:
    """The policy's loss of a micro-batch."""
    return policy.sft_loss(*micro_batch)


def target_count(micro_batch: MicroBatch) -> float:
    """What `sft_loss` will count: the weighted numbers of all real actions (the engine compares the two)."""
    mask_BC, weight_B = micro_batch[0].action_mask_BC, micro_batch[0].weight_B
    assert mask_BC is not None, "training batches have actions"
    counts_B = mask_BC.sum(1) if weight_B is None else mask_BC.sum(1) * weight_B
    return float(counts_B.sum()) * ACTION_DIM
