"""Which tensors travel, where each lies in a flat block of bytes, and whether both sides mean the same ones.

What can change travels: parameters that learn and buffers. What is frozen does not; its digest is part of the layout, so that
a worker that starts from another backbone is found at connect. Weights that are tied appear once, under their first name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from vla_rl.engine.engine import Engine
from vla_rl.sim.shared_memory import aligned
from vla_rl.weights.digest import tensor_digest
from vla_rl.weights.errors import LayoutMismatch, WeightSyncError


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as both sides know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen_digest: str = ""
    """sha256 (hex) of a tensor that never travels; empty for one that does."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" + (f" frozen, sha256 {self.frozen_digest[:12]}" if self.frozen_digest else "")


@dataclass(frozen=True)
class WeightLayout:
    """The tensors that travel, in the order in which they are pushed, and those that stay."""

    synced: tuple[TensorEntry, ...]
    frozen: tuple[TensorEntry, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each synced tensor starts."""
        ends = [0]
        for entry in self.synced:
            ends.append(ends[-1] + aligned(entry.nbytes))
        return tuple(ends[:-1])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the flat block."""
        return sum(aligned(entry.nbytes) for entry in self.synced)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over names, shapes, dtypes and their order, and over the frozen tensors' digests."""
        lines = [f"{entry.name}: {entry.dtype} {list(entry.shape)} {entry.frozen_digest}" for entry in (*self.synced, *self.frozen)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def require_equal(self, other: WeightLayout, ours: str, theirs: str) -> None:
        """Raise LayoutMismatch, listing every difference, unless the hashes agree. `ours` and `theirs` name the two sides."""
        if self.hash == other.hash:
            return
        found = _differences(self, other, ours, theirs)
        listed = "\n  ".join(found)
        raise LayoutMismatch(
            f"the weights of {ours} and {theirs} differ in {len(found)} places; start both from the same policy and recipe:\n  {listed}"
        )

    def matched(self, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorEntry, int, Tensor]]:
        """(entry, its offset, tensor) for weights that arrive in the order of the layout.

        Raises LayoutMismatch at the first that is not the one expected, and where there are too few.
        """
        expected = iter(zip(self.synced, self.offsets))
        for name, tensor in named_weights:
            entry, offset = next(expected, (None, 0))
            if entry is None or (name, tuple(tensor.shape)) != (entry.name, entry.shape):
                wanted = "nothing more" if entry is None else f"{entry.name} {list(entry.shape)}"
                raise LayoutMismatch(f"the layout expects {wanted}, pushed was {name} {list(tensor.shape)}; push synced_weights(engine)")
            yield entry, offset, tensor
        missing = [entry.name for entry, _ in expected]
        if missing:
            raise LayoutMismatch(f"{len(missing)} tensors of the layout were not pushed: {', '.join(missing)}; push synced_weights(engine)")


def synced_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """What travels from the engine: full tensors of the parameters that learn, and buffers. A collective: every rank walks all of it."""
    yield from engine.named_weights(trainable_only=True)
    yield from _saved_buffers(engine.policy)


def engine_layout(engine: Engine, dtype: torch.dtype | None = None) -> WeightLayout:
    """The layout of what `synced_weights(engine)` gives. A collective: every rank walks all weights once.

    Floating-point weights travel as `dtype` where it is given, which is then what the workers' policies must hold.
    """
    synced = tuple(_entry(name, tensor, dtype) for name, tensor in synced_weights(engine))
    moving = {entry.name for entry in synced}
    frozen = tuple(_frozen_entry(name, tensor, dtype) for name, tensor in engine.named_weights() if name not in moving)
    return WeightLayout(synced, frozen)


def policy_layout(policy: nn.Module, like: WeightLayout) -> WeightLayout:
    """The layout of a plain policy whose tensors travel where those of `like` do, in the same order where it has them."""
    held = held_weights(policy)
    moving = [entry.name for entry in like.synced if entry.name in held]
    staying = [entry.name for entry in like.frozen if entry.name in held]
    known = {*moving, *staying}
    moving += [name for name in held if name not in known]
    return WeightLayout(tuple(_entry(name, held[name], None) for name in moving), tuple(_frozen_entry(n, held[n], None) for n in staying))


def held_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of a plain policy, without gradient, sharing its memory; tied weights once, by their first name."""
    parameters = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    return parameters | dict(_saved_buffers(policy))


def require_contiguous(policy: nn.Module) -> None:
    """Raise WeightSyncError for weights that do not lie in memory in the order of their indices."""
    strided = [name for name, tensor in held_weights(policy).items() if not tensor.is_contiguous()]
    if strided:
        raise WeightSyncError(f"these weights are not contiguous in memory: {', '.join(strided)}; store them with .contiguous()")


def _saved_buffers(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint would hold; the others are made from the configuration and never change."""
    saved = policy.state_dict().keys()
    for name, buffer in policy.named_buffers():
        if name in saved:
            yield name, buffer.detach()


def _entry(name: str, tensor: Tensor, dtype: torch.dtype | None) -> TensorEntry:
    cast = dtype is not None and tensor.is_floating_point()
    return TensorEntry(name, tuple(tensor.shape), dtype if cast and dtype is not None else tensor.dtype)


def _frozen_entry(name: str, tensor: Tensor, dtype: torch.dtype | None) -> TensorEntry:
    entry = _entry(name, tensor, dtype)
    return TensorEntry(name, entry.shape, entry.dtype, tensor_digest(tensor.to(entry.dtype)).hex())


def _differences(a: WeightLayout, b: WeightLayout, ours: str, theirs: str) -> list[str]:
    left, right = ({entry.name: entry for entry in (*side.synced, *side.frozen)} for side in (a, b))
    found = [f"{name}: {entry} in {ours}, missing in {theirs}" for name, entry in left.items() if name not in right]
    found += [f"{name}: {entry} in {theirs}, missing in {ours}" for name, entry in right.items() if name not in left]
    both = [name for name in left if name in right]
    found += [f"{name}: {left[name]} in {ours}, {right[name]} in {theirs}" for name in both if left[name] != right[name]]
    return found or ["the same tensors, in another order"]
