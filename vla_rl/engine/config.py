"""What the engine can be told: optimizer, schedule, precision, memory, and which parameters learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_rl.errors import UserError

Schedule = Literal["constant", "warmup_cosine", "one_cycle"]
Precision = Literal["fp32", "bf16"]
Trainable = Literal["all", "expert", "lora"]


class EngineConfigError(UserError):
    """A value of `EngineConfig` outside what it allows."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (peft); used when `trainable` is `lora`."""

    rank: int = 16
    """Rank of each update; at least 1."""
    alpha: float = 16.0
    """Scale: the update is multiplied by alpha / rank; above 0."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the linear layers that get an adapter; each must match at least one layer."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        _require(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        _require(len(self.target_modules) > 0, "lora.target_modules", self.target_modules, "at least one name")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the FSDP2 engine; the same for every phase that trains."""

    lr: float = 1e-3
    """Peak learning rate of AdamW; above 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment; each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment; above 0."""
    weight_decay: float = 1e-4
    """Decoupled weight decay; at least 0. Applied to tensors with two or more dimensions only (no biases, no norms)."""
    schedule: Schedule = "one_cycle"
    """Learning rate over the updates: `constant` after the warm-up, `warmup_cosine`, or `one_cycle` (cosine up, cosine down)."""
    warmup_fraction: float = 0.1
    """Part of all updates in which the learning rate rises; in [0, 1)."""
    final_lr_fraction: float = 0.01
    """Learning rate of the last update over the peak, for `warmup_cosine` and `one_cycle`; in [0, 1]."""
    grad_clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. Above 0."""
    precision: Precision = "fp32"
    """`bf16` gathers weights and multiplies matrices in bfloat16; master weights, gradient sums and optimizer stay float32."""
    activation_checkpointing: bool = False
    """Recompute the policy's blocks in the backward pass instead of keeping their activations."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory; they travel to the device block by block."""
    ema_decay: float | None = None
    """Decay per update of an exponential moving average of the weights, in (0, 1), at most (1 + n) / (10 + n) in update n; none keeps no
    average. Where there is one, it is what evaluation and the saved policy use."""
    trainable: Trainable = "all"
    """`all` parameters; `expert` only (the policy's action expert and its projections); or `lora` adapters. A critic and a noise head learn
    in any case."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters, when `trainable` is `lora`."""
    shard_by: Literal["blocks", "root"] = "blocks"
    """`blocks` shards each of the policy's blocks alone, so that one is gathered at a time; `root` gathers everything at once,
    which is faster for small policies."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a GPU."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "above 0")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers in [0, 1)")
        _require(self.eps > 0, "eps", self.eps, "above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        _require(0 <= self.warmup_fraction < 1, "warmup_fraction", self.warmup_fraction, "in [0, 1)")
        _require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", self.final_lr_fraction, "in [0, 1]")
        _require(self.grad_clip_norm > 0, "grad_clip_norm", self.grad_clip_norm, "above 0; a very large number clips nothing")
        _require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", self.ema_decay, "none, or in (0, 1)")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise EngineConfigError(f"engine.{name} is {value!r}; allowed: {allowed}. Set engine.{name} in the recipe.")
