"""The policy contract: every family (pi0, GR00T, tokens) is an `nn.Module` with these methods.

Shape legend (used by all files of `policies/`):
    B  batch;  V  views;  H, W  pixels;  C  actions per chunk;  A  action dimensions the model works in
    (padded);  S  state dimensions;  L  prompt tokens;  P  prefix tokens;  K  denoise steps kept;  M  model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.conventions import Conventions
from vla_rl.episode import VIEWS, Bool, Float32, Observation
from vla_rl.policies.flow_stochastic import Exploration


@dataclass(frozen=True)
class PolicySpec:
    """What a policy expects and gives; saved with the weights and compared with the env's spec."""

    chunk_length: int
    """C: actions it predicts."""
    executed_horizon: int
    """How many of them are executed before it looks again; at most `chunk_length`."""
    views: tuple[str, ...] = VIEWS
    """Views it looks at, in the order in which it reads them."""
    resolution: int = 128
    """Pixels at which its observations were rendered in training (it resizes to its own input size itself)."""
    conventions: Conventions = field(default_factory=Conventions)
    """Orientation, rotation form, gripper sign, control rate."""

    def __post_init__(self) -> None:
        if not 1 <= self.executed_horizon <= self.chunk_length:
            raise ValueError(f"executed_horizon is {self.executed_horizon}, it must be 1 to chunk_length, which is {self.chunk_length}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and the wire."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"views": list(self.views), "conventions": self.conventions.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PolicySpec:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for values that make no spec."""
        numbers = {name: int(values[name]) for name in ("chunk_length", "executed_horizon", "resolution")}
        return cls(**numbers, views=tuple(values["views"]), conventions=Conventions.from_dict(values["conventions"]))


@dataclass
class Batch:
    """The only input of a policy: what `preprocess` makes of observations. Tensors of one device."""

    images_BVCHW: Tensor
    """float32[B, V, 3, H, W] in [-1, 1]. (The C of this name is the colour channel, 3.)"""
    state_BS: Tensor
    """float32[B, S], normalised."""
    tokens_BL: Tensor
    """int64[B, L], padded prompt (with the discretised state, for families that write it there)."""
    token_mask_BL: Tensor
    """bool[B, L]: real tokens."""
    actions_BCA: Tensor | None = None
    """float32[B, C, A], normalised and padded targets; only in training."""
    action_mask_BC: Tensor | None = None
    """bool[B, C]: real (not padded) actions; only in training."""
    state_mask_B: Tensor | None = None
    """bool[B]: rows whose state the policy sees, where training hides some; None means all."""
    weight_B: Tensor | None = None
    """float32[B]: weight of each sample in the loss; None means 1."""
    reasoning_BR: Tensor | None = None
    """int64[B, R]: the text that token policies write before the actions; only in training."""
    reasoning_mask_BR: Tensor | None = None
    """bool[B, R]: real tokens of it."""

    def __len__(self) -> int:
        return len(self.state_BS)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    def select(self, index: Tensor | slice) -> Batch:
        """The rows `index` of every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value[index] for name, value in values.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class LossSums:
    """A loss as sums, so that the divisor can be global over micro-batches and ranks."""

    loss_sum: Tensor
    """Scalar with gradient: the sum of the weighted element losses."""
    count: Tensor
    """Scalar without gradient: the sum of the weights; loss = sum / count."""
    metrics: dict[str, Tensor]
    """Further sums (no gradient), each to be divided by the same count."""


@dataclass
class PolicyOutput:
    """What `act` answers for a batch."""

    actions_BCA: Tensor
    """float32[B, C, A], normalised model space, unclipped; `postprocess` turns them into env actions."""
    x_t_BKCA: Tensor | None = None
    """The stochastic denoise transitions, for learners; None when sampled deterministically."""
    x_next_BKCA: Tensor | None = None
    denoise_index_BK: Tensor | None = None
    log_prob_BC: Tensor | None = None
    """float32[B, C], summed over the real action dimensions."""
    value_B: Tensor | None = None
    """float32[B]: the critic's estimate, when exploring with a policy that has one."""
    tokens_BT: Tensor | None = None
    """int64[B, T]: what a token policy wrote while exploring, reasoning first; see `TokenBatch`."""
    token_mask_BT: Tensor | None = None
    """bool[B, T]: real tokens."""
    well_formed_B: Tensor | None = None
    """bool[B]: the reasoning has the right form, for token policies that reason."""


@dataclass
class TransitionBatch:
    """Recorded denoise transitions of a batch (`FlowRecord`s as tensors of one device)."""

    x_t_BKCA: Tensor
    """float32[B, K, C, A]: where each began."""
    x_next_BKCA: Tensor
    """float32[B, K, C, A]: where it went."""
    denoise_index_BK: Tensor
    """int64[B, K]: which denoise steps these are."""

    @property
    def kept_steps(self) -> int:
        """K: the factors of each action's likelihood."""
        return self.x_t_BKCA.shape[1]

    def to(self, device: torch.device | str) -> TransitionBatch:
        """The same record on another device."""
        return TransitionBatch(self.x_t_BKCA.to(device), self.x_next_BKCA.to(device), self.denoise_index_BK.to(device))

    def select(self, index: Tensor | slice) -> TransitionBatch:
        """The rows `index`."""
        return TransitionBatch(self.x_t_BKCA[index], self.x_next_BKCA[index], self.denoise_index_BK[index])


@dataclass
class TokenBatch:
    """Recorded tokens of a batch (`TokenRecord`s as tensors of one device): what a token policy wrote."""

    tokens_BT: Tensor
    """int64[B, T]: the reasoning's tokens, then the actions', each padded to its length."""
    mask_BT: Tensor
    """bool[B, T]: real tokens."""

    kept_steps = 1
    """As `TransitionBatch.kept_steps`: a chunk of tokens has one likelihood per action."""

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same record on another device."""
        return TokenBatch(self.tokens_BT.to(device), self.mask_BT.to(device))

    def select(self, index: Tensor | slice) -> TokenBatch:
        """The rows `index`."""
        return TokenBatch(self.tokens_BT[index], self.mask_BT[index])


RecordBatch = TransitionBatch | TokenBatch
"""What a policy of some family recorded; each family scores its own kind."""


@dataclass
class ScoredTransitions:
    """What `log_prob` answers for recorded transitions or tokens, with gradient."""

    log_prob_BC: Tensor
    """float32[B, C], summed over the real action dimensions and the recorded steps."""
    entropy_BC: Tensor
    """float32[B, C], summed likewise; constant for Flow-SDE."""
    velocity_BKCA: Tensor
    """float32[B, K, C, A]: the velocity at each x_t; K is 0 for token policies, which have none."""
    value_B: Tensor | None = None
    """float32[B]: the critic's estimate; None without one."""


class Policy(Protocol):
    """What the rest of the system calls. Implementations are `nn.Module`s; see `policies/pi0/policy.py`."""

    spec: PolicySpec

    def preprocess(
        self,
        observations: Sequence[Observation],
        actions_BCA: Float32 | None = None,
        action_mask_BC: Bool | None = None,
    ) -> Batch:
        """The only way in: resize, normalise, tokenize. `actions_BCA` (env units, 7 dims) only in training.

        Raises ProcessorError naming the feature and dimension for a missing view, a wrong shape, a wrong dtype,
        and for observations that carry privileged information.
        """
        ...

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """The only way out: float32[B, C, 7] in environment units, clipped to [-1, 1]."""
        ...

    def act(self, batch: Batch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """Sample a chunk per row; row b's noise comes from `noise_seeds[b]` alone, whatever the batch.

        Without `exploration` the sampler is deterministic given the noise, as evaluation wants it; with it, the output also holds the
        stochastic transitions, their log-probabilities and the critic's value.
        """
        ...

    def log_prob(self, batch: Batch, record: Any, exploration: Exploration) -> ScoredTransitions:
        """Log-probability of the family's kind of record, entropy and value, with gradient; `exploration` is the rollout's."""
        ...

    def value(self, batch: Batch) -> Tensor:
        """The critic's estimate float32[B]: the same computation as in `act` and `log_prob`. Raises ValueError without a critic."""
        ...

    def sft_loss(self, batch: Batch, noise_seeds: Sequence[int]) -> LossSums:
        """The supervised loss; row b's noise and time come from `noise_seeds[b]` alone. Policies that denoise take K seeds per row,
        `noise_seeds[k B + b]`, and give the mean over the draws."""
        ...
