"""The one engine that trains: FSDP2 over the ranks of a `World`, whatever the loss.

    engine = Engine(policy, config, total_updates=2000)
    result = engine.forward_backward(micro_batches, loss_fn, normalizer)
    step = engine.optim_step()

Loss functions return sums; the divisor is the sum of `normalizer` over all micro-batches of all ranks, known before the first
backward pass, so the gradient does not depend on how a global batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from vla_rl.engine.average import WeightAverage
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.schedule import learning_rate
from vla_rl.engine.selection import plain_weights, select_trainable
from vla_rl.engine.sharding import ENTRY_POINTS, compute_context, free_gathered, shard
from vla_rl.engine.tensors import local_tensor
from vla_rl.engine.world import World, open_world
from vla_rl.errors import UserError
from vla_rl.policies.base import LossSums
from vla_rl.telemetry.pulse import mark_progress

COUNT_TOLERANCE = 1e-5
"""Relative difference allowed between a loss's count (float32) and the normalizer's (float64)."""
MAX_SKIPPED_IN_A_ROW = 20
"""Updates without a finite gradient after which training stands still for good."""


class EngineError(RuntimeError):
    """The engine was called in a way that would train on something else than what was asked."""


class DivergedError(UserError):
    """Training that no update helps any more."""


@dataclass(frozen=True)
class LossResult:
    """What `forward_backward` did, over all micro-batches and ranks."""

    loss: float
    """Sum of the loss over the global count."""
    count: float
    """The global divisor."""
    metrics: dict[str, float]
    """Further sums over the same count."""


@dataclass(frozen=True)
class StepResult:
    """What `optim_step` did."""

    version: int
    """Version of the weights now; grows by one with every step that was not skipped."""
    learning_rate: float
    """Learning rate of this update."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """The norm was not finite: weights, moments and version stay as they were."""


class Engine:
    """Trains one policy over the ranks of a world; see the module's docstring."""

    def __init__(
        self,
        policy: nn.Module,
        config: EngineConfig,
        total_updates: int,
        world: World | None = None,
        groups: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """Select what learns, move to the device, shard, and make the optimizer.

        `groups` are prefixes of parameter names whose learning rate `optim_step` can scale apart; `seed` is of the adapters' first weights.
        Every rank passes a policy with equal weights; rank 0's are what counts (they are broadcast).
        Raises EngineConfigError where the policy cannot do what the config asks.
        """
        self.config = config
        self.total_updates = total_updates
        self.world = world or open_world(config.device)
        select_trainable(policy, config, seed)
        policy.to(self.world.device)
        _broadcast(policy, self.world)
        shard(policy, config, self.world)
        self.policy = policy
        self.optimizer, self._group_names = _optimizer(policy, config, groups)
        self.average = WeightAverage(self.trainable(), config.ema_decay) if config.ema_decay is not None else None
        self.updates = 0
        self.version = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._local_count = 0.0

    def trainable(self) -> dict[str, nn.Parameter]:
        """The (sharded) parameters that learn, by name."""
        return {name: parameter for name, parameter in self.policy.named_parameters() if parameter.requires_grad}

    def forward_backward[M](
        self, micro_batches: Sequence[M], loss_fn: Callable[[Any, M], LossSums], normalizer: Callable[[M], float]
    ) -> LossResult:
        """Accumulate the gradient of (sum of all `loss_sum`) / (sum of all `normalizer`), over micro-batches and ranks.

        `loss_fn(policy, micro_batch)` enters the policy through its entry points; `normalizer(micro_batch)` says, without
        a forward pass, the count that the loss will report. Raises EngineError where the two disagree, where ranks bring
        different numbers of micro-batches (their collectives would wait for each other for ever), and for a count of 0.
        """
        divisor = self._global_count([float(normalizer(micro_batch)) for micro_batch in micro_batches])
        self.policy.train()
        sums: list[LossSums] = []
        for index, micro_batch in enumerate(micro_batches):
            self._sync_gradients(index == len(micro_batches) - 1)
            with compute_context(self.config, self.world):
                result = loss_fn(self.policy, micro_batch)
            (result.loss_sum / divisor).backward()
            mark_progress()
            sums.append(LossSums(result.loss_sum.detach(), result.count.detach(), result.metrics))
        return self._reduce(sums, divisor)

    def optim_step(self, factors: Mapping[str, float] | None = None) -> StepResult:
        """Clip by the global norm, update the weights and the average, clear the gradient.

        `factors` scales the learning rate of a group, by the prefix that the engine was made with, or of all other parameters (`""`);
        0 holds them still: no weight decay, and their gradient is dropped before it enters the norm or a moment, so that the first update
        in which they move is Adam's first of them.
        A norm that is not finite skips the update: counted in `skipped`, reported, and the version stays. Raises DivergedError after
        `MAX_SKIPPED_IN_A_ROW` of them.
        """
        rate = learning_rate(self.config, self.updates, self.total_updates)
        for name, group in zip(self._group_names, self.optimizer.param_groups, strict=True):
            factor = (factors or {}).get(name, 1.0)
            group["lr"] = rate * factor
            if not factor:
                _drop_gradients(group["params"])
        norm = self._clip()
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.version += 1
            if self.average is not None:
                self.average.update(self.trainable(), self.version)
            self._skipped_in_a_row = 0
        else:
            self._count_skip()
        self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(self.version, rate, norm, skipped=not finite)

    def take_gradient(self) -> dict[str, Tensor]:
        """This rank's shard of the accumulated gradient by parameter name, which is cleared in place of an update."""
        gradients = {name: p.grad for name, p in self.trainable().items() if p.grad is not None}
        taken = {name: local_tensor(gradient).clone() for name, gradient in gradients.items()}
        self.optimizer.zero_grad(set_to_none=True)
        return taken

    def infer[R](self, fn: Callable[[Any], R]) -> R:
        """`fn(policy)` in evaluation mode without gradients; every rank must enter the policy equally often."""
        self.policy.eval()
        try:
            with torch.no_grad(), compute_context(self.config, self.world):
                return fn(self.policy)
        finally:
            free_gathered(self.policy)

    def named_weights(self, trainable_only: bool = False, averaged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the plain policy's names (adapters merged); a collective: every rank walks all of it.

        Tensors may share memory with the weights: copy what must outlive the next update.
        `trainable_only` leaves out what training cannot change; `averaged` gives the moving average in place of the weights.
        """
        if averaged and self.average is None:
            raise EngineError("averaged weights were asked for and engine.ema_decay is none; set it, or ask for the weights themselves")
        return plain_weights(self.policy, trainable_only, self.average.values if averaged and self.average else {})

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the policy has its averaged weights, where an average is kept; for evaluation."""
        if self.average is None:
            yield
            return
        with self.average.swapped_into(self.trainable()):
            yield

    def _global_count(self, counts: Sequence[float]) -> float:
        """The one all-reduce before the backward passes: the divisor, and whether the ranks bring equally many micro-batches."""
        ours = [0.0] * self.world.size
        ours[self.world.rank] = float(len(counts))
        total, *lengths = self.world.sum([sum(counts), *ours])
        if len(set(lengths)) > 1:
            raise EngineError(f"ranks bring {[int(n) for n in lengths]} micro-batches; every rank must bring the same number")
        if not total > 0:
            raise EngineError(f"the global count is {total}; a batch must have at least one sample with weight above 0")
        self._local_count = sum(counts)
        return total

    def _reduce(self, sums: Sequence[LossSums], divisor: float) -> LossResult:
        names = sorted(sums[0].metrics)
        rows = torch.stack([torch.stack([s.loss_sum, s.count.to(s.loss_sum), *(s.metrics[n].to(s.loss_sum) for n in names)]) for s in sums])
        local = rows.double().sum(0).tolist()
        if abs(local[1] - self._local_count) > COUNT_TOLERANCE * max(abs(self._local_count), 1.0):
            raise EngineError(
                f"the loss counted {local[1]:g} and the normalizer {self._local_count:g}: the gradient would be scaled by their ratio; "
                "make both the sum of the same weights"
            )
        loss_sum, _, *metrics = self.world.sum(local)
        return LossResult(loss_sum / divisor, divisor, {name: value / divisor for name, value in zip(names, metrics)})

    def _count_skip(self) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise DivergedError(
                f"the gradient norm was not finite in {self._skipped_in_a_row} updates in a row up to update {self.updates + 1}; start "
                "again in a new run_dir with a lower engine.lr (initial_policy goes on from an earlier checkpoint)"
            )

    def _sync_gradients(self, sync: bool) -> None:
        """Reduce over ranks in the last micro-batch only; before that, sums stay on the rank."""
        self.policy.set_requires_gradient_sync(sync)  # pyright: ignore[reportCallIssue]
        self.policy.set_is_last_backward(sync)  # pyright: ignore[reportCallIssue]

    def _clip(self) -> float:
        """Scale the gradient to the largest allowed norm; returns the norm before.

        Works on local shards: one norm and one all-reduce, where DTensor arithmetic would dispatch per parameter.
        """
        learning = self.trainable().values()
        if not all(isinstance(parameter, DTensor) for parameter in learning):
            raise EngineError(
                "weights are still gathered, so the backward pass went past FSDP; enter the policy through one of "
                f"{', '.join(ENTRY_POINTS)}, whose output is a tensor or a registered container"
            )
        gradients = [local_tensor(parameter.grad) for parameter in learning if parameter.grad is not None]
        if not gradients:
            raise EngineError(
                "no parameter has a gradient; call forward_backward before optim_step, with a loss that depends on the weights"
            )
        square = get_total_norm(gradients).float().square().to(self.world.device)
        dist.all_reduce(square)
        norm = float(square.sqrt())
        if self.config.grad_clip_norm < norm < float("inf"):
            for gradient in gradients:
                gradient.mul_(self.config.grad_clip_norm / norm)
        return norm


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _broadcast(policy: nn.Module, world: World) -> None:
    """Give every rank rank 0's weights, so that shards of one model are sharded."""
    if world.size == 1:
        return
    with torch.no_grad():
        for tensor in [*policy.parameters(), *policy.buffers()]:
            dist.broadcast(tensor, src=0)


def _optimizer(policy: nn.Module, config: EngineConfig, prefixes: Sequence[str]) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW (Loshchilov and Hutter 2019), and the prefix of each of its groups; the fused kernel takes a third of the time on a CPU."""
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            groups.setdefault((prefix, parameter.ndim >= 2), []).append(parameter)
    settings = [{"params": p, "weight_decay": config.weight_decay if decays else 0.0} for (_, decays), p in groups.items()]
    return torch.optim.AdamW(settings, lr=config.lr, betas=config.betas, eps=config.eps, fused=True), [prefix for prefix, _ in groups]
