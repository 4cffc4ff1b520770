"""How much device memory a trainer rank will need, from a policy on the meta device: nothing is allocated, every shape is real.

Counted: shards of weights, gradients and moments (float32, `sharding.py`), the weights that are gathered at one time, and what a forward
pass keeps for its backward pass, attention as fused kernels keep it. Not counted: the allocator's slack, temporary buffers inside kernels,
NCCL's own memory. `tests/engine/test_estimate.py` holds the counts within 10 % of the profiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.sharding import HasBlocks

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank."""

    weights: int
    """Its shard of all parameters, float32."""
    gradients: int
    """Its shard of those that learn."""
    moments: int
    """Two of each that learns, and the average where one is kept."""
    gathered: int
    """The largest block and the next one, or everything, in the precision of the forward pass."""
    activations: int
    """What a micro-batch's forward pass keeps for the backward pass."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.gathered + self.activations


def rank_memory(policy: nn.Module, config: EngineConfig, ranks: int, forward: Callable[[], Tensor]) -> RankMemory:
    """For a policy on the meta device whose trainable parameters are selected; `forward` runs one micro-batch to its loss."""
    low = 2 if config.precision == "bf16" else FLOAT32
    learning = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    every = sum(parameter.numel() for parameter in policy.parameters())
    blocks = list(policy.blocks()) if isinstance(policy, HasBlocks) else []
    kept = _kept_elements(policy, blocks, forward, config.activation_checkpointing)
    on_device = 0 if config.cpu_offload else FLOAT32
    return RankMemory(
        weights=on_device * every // ranks,
        gradients=on_device * learning // ranks,
        moments=on_device * learning * (2 if config.ema_decay is None else 3) // ranks,
        gathered=low * _gathered_elements(policy, blocks if config.shard_by == "blocks" else []),
        activations=low * kept,
    )


def _gathered_elements(policy: nn.Module, blocks: list[nn.Module]) -> int:
    """Without blocks everything at once; else what belongs to no block (it stays gathered), and the two largest blocks."""
    sizes = sorted((sum(p.numel() for p in block.parameters()) for block in blocks), reverse=True)
    return sum(p.numel() for p in policy.parameters()) - sum(sizes) + sum(sizes[:2])


def _kept_elements(policy: nn.Module, blocks: list[nn.Module], forward: Callable[[], Tensor], recompute: bool) -> int:
    """Elements that autograd keeps, parameters left out; with recomputation only blocks' inputs, and the inside of the largest block."""
    parameters = {_storage(parameter) for parameter in policy.parameters()}
    inside: dict[nn.Module | None, int] = {None: 0}
    inputs = 0
    current: list[nn.Module | None] = [None]
    seen: set[int] = set(parameters)

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in seen:
            seen.add(_storage(tensor))
            alive.append(tensor)  # so that no later tensor gets the same storage
            inside[current[-1]] = inside.get(current[-1], 0) + tensor.untyped_storage().nbytes() // FLOAT32
        return tensor

    def enter(block: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        nonlocal inputs
        inputs += sum(value.numel() for value in (*arguments, *named.values()) if isinstance(value, Tensor) and value.is_floating_point())
        current.append(block)

    def leave(block: nn.Module, arguments: object, output: object) -> None:
        current.pop()

    alive: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _FusedAttention():
        forward()
    for hook in hooks:
        hook.remove()
    outside = inside.pop(None)
    return outside + inputs + max(inside.values(), default=0) if recompute and blocks else outside + sum(inside.values())


class _FusedAttention(TorchFunctionMode):
    """Attention on the meta device as fused kernels do it: without the matrix of weights that the meta device's own form keeps."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace `scaled_dot_product_attention`, pass everything else on."""
        if function is not F.scaled_dot_product_attention:
            return function(*arguments, **(named or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), arguments)) | dict(named or {})
        return _KeptByAttention.apply(given["query"], given["key"], given["value"], given.get("attn_mask"))


class _KeptByAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the mask, the output, and one number per query and head (FlashAttention, Dao et al. 2022)."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """A result of the right shape."""
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        context.save_for_backward(query, key, value, mask, result, query.new_empty(query.shape[:-1]))
        return result

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        """An estimate never goes backward."""
        raise RuntimeError("the memory estimate counts a forward pass only")


def _storage(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor; views share it."""
    return tensor.untyped_storage()._cdata
