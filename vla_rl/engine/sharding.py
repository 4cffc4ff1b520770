"""Wrap a policy for FSDP2: block by block, with its entry points, precision, offloading and recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils import _pytree

from vla_rl.engine.config import EngineConfig, EngineConfigError
from vla_rl.engine.world import World
from vla_rl.policies.base import LossSums, PolicyOutput, ScoredTransitions

for _container in (LossSums, PolicyOutput, ScoredTransitions):
    _pytree.register_dataclass(_container)
"""FSDP finds the tensors of an output through pytrees, and hooks the backward pass there; an unregistered dataclass would be a leaf."""

ENTRY_POINTS = ("act", "sft_loss", "log_prob", "value")
"""Methods through which a policy is entered; each gathers the sharded weights first, as `forward` does."""


@runtime_checkable
class HasBlocks(Protocol):
    """A policy that can be gathered and recomputed piece by piece."""

    def blocks(self) -> Sequence[nn.Module]:
        """Repeated modules (transformer layers), each entered through its `forward` only."""
        ...


def shard(policy: nn.Module, config: EngineConfig, world: World) -> FSDPModule:
    """Shard `policy` in place over the ranks of `world` and return it.

    A policy without `blocks()` is sharded as one piece. Raises EngineConfigError where recomputation is asked of such a policy.
    """
    blocks = list(policy.blocks()) if isinstance(policy, HasBlocks) else []
    if config.activation_checkpointing:
        _recompute(blocks, policy)
    arguments = {"mesh": world.mesh, "mp_policy": _precision(config), "offload_policy": _offload(config, world)}
    if config.shard_by == "blocks":
        for block in blocks:
            fully_shard(block, **arguments)
    fully_shard(policy, **arguments)
    assert isinstance(policy, FSDPModule)
    for module in policy.modules():
        if isinstance(module, FSDPModule) and world.size > 1:
            module.set_gradient_divide_factor(1.0)  # the engine's divisor is global already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging or scaled sums
    for name in ENTRY_POINTS:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    return policy


def compute_context(config: EngineConfig, world: World) -> contextlib.AbstractContextManager[object]:
    """Under `bf16`, autocast: weights arrive in bfloat16 and float32 inputs meet them there, while losses stay float32."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(world.device.type, dtype=torch.bfloat16)


def free_gathered(policy: nn.Module) -> None:
    """Drop gathered weights that a forward pass without a backward pass left behind."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _recompute(blocks: Sequence[nn.Module], policy: nn.Module) -> None:
    if not blocks:
        raise EngineConfigError(
            f"engine.activation_checkpointing is on and {type(policy).__name__} names no blocks to recompute (blocks()); set it to false"
        )
    for block in blocks:
        checkpoint(block)


def _precision(config: EngineConfig) -> MixedPrecisionPolicy:
    """Inputs are not cast: noise, time and targets stay float32, and autocast brings them to the weights where they meet."""
    low = torch.bfloat16 if config.precision == "bf16" else None
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _offload(config: EngineConfig, world: World) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
