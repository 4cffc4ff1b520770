"""How much memory a training step needs, without allocating it: tensor bytes of one rank, from the config alone.

The policy is built of fake tensors (shapes and devices, no storage) and its forward pass runs on them, so that any size can be asked
about on any machine. Activations are what autograd keeps for the backward pass, counted once per storage.
Temporary buffers, gathered copies of sharded weights and the allocator's own waste come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.selection import select_trainable
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.base import Batch
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.module import FamilyConfig, PolicyModule
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

Pass = Callable[[PolicyModule, Batch], Tensor]
"""A forward pass that ends in a scalar; `sft_pass` is supervised fine-tuning's."""
PROMPT = "pick up the milk and place it in the basket"
"""Prompts are padded, so that any will do."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank; shards are as even as FSDP makes them."""

    parameters: int
    """Master weights, float32, this rank's share."""
    gradients: int
    """Of what learns, float32, this rank's share."""
    moments: int
    """Adam's two moments of what learns, float32, this rank's share."""
    average: int
    """The moving average of what learns, if one is kept, this rank's share."""
    activations: int
    """What the forward pass of one micro-batch keeps for its backward pass, the batch itself included."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def to_dict(self) -> dict[str, int]:
        """Plain values for JSON, with the total."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


def estimate_memory(
    config: FamilyConfig,
    engine: EngineConfig,
    micro_batch_size: int,
    ranks: int = 1,
    views: tuple[str, ...] = VIEWS,
    forward: Pass | None = None,
) -> MemoryEstimate:
    """The memory of one rank that trains a policy of `config` in micro-batches of `micro_batch_size` samples.

    `forward` is the pass to count activations of, by default supervised fine-tuning's. Nothing of the policy's size is allocated.
    Raises what building such a policy raises.
    """
    policy, batch = _meta_policy(config, views)
    select_trainable(policy, engine)
    learning = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in policy.parameters())
    share = 4 * -(-learning // ranks)
    return MemoryEstimate(
        parameters=4 * -(-everything // ranks),
        gradients=share,
        moments=2 * share,
        average=share if engine.ema_decay is not None else 0,
        activations=activation_bytes(policy, batch, engine, micro_batch_size, forward or sft_pass),
    )


def sft_pass(policy: PolicyModule, batch: Batch) -> Tensor:
    """The supervised loss of a batch."""
    return policy.sft_loss(batch, range(len(batch))).loss_sum


def activation_bytes(policy: PolicyModule, batch: Batch, engine: EngineConfig, rows: int, forward: Pass) -> int:
    """Bytes that autograd keeps after `forward` over `rows` copies of the one-row `batch`; makes the policy's tensors fake.

    With `engine.activation_checkpointing`: the blocks' inputs, everything outside of blocks, and the largest block's own, because one
    block at a time is computed again.
    """
    low = torch.bfloat16 if engine.precision == "bf16" else torch.float32
    policy.to(low).train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy.to_empty(device="cpu")
        repeated = _fake(batch, mode).select(torch.zeros(rows, dtype=torch.int64))
        kept = _Kept(policy, blocks=policy.blocks() if engine.activation_checkpointing else [])
        autocast = torch.autocast("cpu", dtype=low) if engine.precision == "bf16" else nullcontext()
        with autocast, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            loss = forward(policy, repeated)
        del loss
    return kept.outside() + kept.largest_block()


class _Kept:
    """Storages that autograd keeps, once each, without the weights; those inside recomputed blocks apart, by block."""

    def __init__(self, policy: PolicyModule, blocks: list[nn.Module]) -> None:
        self._own = {_storage(parameter) for parameter in policy.parameters()}
        self._outside: dict[int, Tensor] = {}
        self._inside: list[dict[int, Tensor]] = []
        self._current = self._outside
        for block in blocks:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave)

    def pack(self, tensor: Tensor) -> Tensor:
        """For `saved_tensors_hooks`."""
        if _storage(tensor) not in self._own:
            self._current.setdefault(_storage(tensor), tensor)
        return tensor

    def outside(self) -> int:
        """Bytes kept until the backward pass."""
        return _bytes(self._outside)

    def largest_block(self) -> int:
        """Bytes of the block that keeps most while it is computed again, beyond what is kept anyway."""
        return max((_bytes(inside, without=self._outside) for inside in self._inside), default=0)

    def _enter(self, block: nn.Module, arguments: Any, named: Any) -> None:
        for tensor in _pytree.tree_leaves((arguments, named)):
            if isinstance(tensor, Tensor):
                self.pack(tensor)
        self._current = {}
        self._inside.append(self._current)

    def _leave(self, block: nn.Module, arguments: Any, output: Any) -> None:
        self._current = self._outside


def _bytes(tensors: dict[int, Tensor], without: Mapping[int, Tensor] | None = None) -> int:
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in tensors.items() if storage not in (without or {}))


def _meta_policy(config: FamilyConfig, views: tuple[str, ...]) -> tuple[PolicyModule, Batch]:
    """A policy without storage, and a one-row batch for it."""
    statistics = Statistics({STATE: _unit(STATE_DIM), ACTION: _unit(ACTION_DIM)})
    resolution = 64
    with torch.device("meta"):
        policy = make_policy(config, statistics, policy_spec(config, resolution, views=views))
    blank = np.zeros((resolution, resolution, 3), np.uint8)
    observation = Observation(dict.fromkeys(views, blank), np.zeros(STATE_DIM, np.float32), PROMPT)
    actions_BCA = np.zeros((1, config.chunk_length, ACTION_DIM), np.float32)
    return policy, policy.processor.preprocess([observation], actions_BCA)


def _unit(dims: int) -> FeatureStats:
    return FeatureStats((-1.0,) * dims, (1.0,) * dims, (0.0,) * dims, (1.0,) * dims, (-1.0,) * dims, (1.0,) * dims, 1)


def _fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    tensors: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: mode.from_tensor(value) for name, value in tensors.items() if isinstance(value, Tensor)})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
