"""A flow-matching policy around any network: sampling, the supervised loss, log-probabilities and values (pi0, pi0.5, GR00T).

Shape legend: B batch; C actions per chunk; A action dimensions of the model; D = 7 real action dimensions; K recorded
denoise steps; P prefix tokens; N suffix tokens, the last C of which are the actions'; M width of the tokens at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.episode import ACTION_DIM
from vla_rl.policies.augment import random_shift
from vla_rl.policies.base import Batch, LossSums, PolicyOutput, PolicySpec, ScoredTransitions, TransitionBatch
from vla_rl.policies.critic import Critic
from vla_rl.policies.flow import Flow, RowNoise, row_noise
from vla_rl.policies.flow_matching import matching_chain, matching_log_prob
from vla_rl.policies.flow_stochastic import Chain, Exploration, chain_log_prob, sample_chain, stochastic_draws
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.noise_head import NoiseHead
from vla_rl.policies.processor import Processor

ACTION_PARTS = {"translation": slice(0, 3), "rotation": slice(3, 6), "gripper": slice(6, 7)}
"""Parts of the loss that are reported apart."""


class FlowPrefix(Protocol):
    """What a network makes of a batch once per chunk, before any denoise step. It holds what the steps read; a critic reads these."""

    @property
    def tokens_BPM(self) -> Tensor:
        """Tokens of images and prompt."""
        ...

    @property
    def mask_BP(self) -> Tensor:
        """bool[B, P]: real tokens."""
        ...


class FlowNetwork(Protocol):
    """A network behind `FlowPolicy`: prefix once, suffix at every denoise step. Implementations are `nn.Module`s."""

    prefix_width: int
    """Width of the prefix's tokens."""
    suffix_width: int
    """Width of the suffix's tokens."""

    def encode(self, batch: Batch) -> Any:
        """The `FlowPrefix` of images, prompt and whatever else does not change while actions are denoised."""
        ...

    def suffix(self, prefix: Any, state_BS: Tensor, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """Tokens [B, N, M] of noisy actions (the last C of them) at flow time `time_B`."""
        ...

    def project(self, tokens_BCM: Tensor) -> Tensor:
        """The velocity float32[B, C, A] from the tokens of the actions."""
        ...


class FlowPolicy(PolicyModule):
    """See `policies/base.py` for the contract. Everything random comes from `noise_seeds`, row by row."""

    flow: Flow
    """The family's direction of time and distribution of training times."""
    model: FlowNetwork  # pyright: ignore[reportIncompatibleUnannotatedOverride] -- also an nn.Module, which protocols cannot say

    def __init__(self, config: Any, spec: PolicySpec, processor: Processor, model: Any) -> None:
        super().__init__(config, spec, processor)
        self.model = model
        self.critic = self._make_critic()
        self.noise_head = NoiseHead(config.noise_head, model.suffix_width, config.model_action_dim) if config.noise_head else None
        self.freeze_unread()

    @torch.no_grad()
    def act(self, batch: Batch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """See `Policy.act`: noise from the seeds, then `denoise_steps` steps over one prefix."""
        noise = self._noise(batch, noise_seeds).noise_BCA
        prefix = self.encode(batch)
        if exploration is not None:
            chain = self._explore(prefix, batch, noise, noise_seeds, exploration)
            if exploration.likelihood == "matching":
                field = partial(self.velocity, prefix, batch)
                chain = matching_chain(self.flow, field, chain.actions_BCA, noise_seeds, exploration.matching_draws, self.live_dims)
            value_B = None if self.critic is None else self._value(self.critic, prefix, batch)
            return PolicyOutput(chain.actions_BCA, chain.x_t_BKCA, chain.x_next_BKCA, chain.denoise_index_BK, chain.log_prob_BC, value_B)
        return PolicyOutput(
            self.flow.euler(lambda x_BCA, time_B: self.velocity(prefix, batch, x_BCA, time_B), noise, self.config.denoise_steps)
        )

    def sft_loss(self, batch: Batch, noise_seeds: Sequence[int]) -> LossSums:
        """Squared error of the velocity over real dimensions of real actions, as sums; the mean over a row's K draws of noise and time.

        All draws share one prefix: only the suffix pays for them. Draw k of row b has seed `noise_seeds[k B + b]`, and its time lies in
        the k-th of K equal parts of the distribution. count = sum over rows of weight * real actions * 7; metrics hold the parts of the
        loss, on the same count. Training (`self.training`) augments its inputs; evaluation does not. Raises ValueError without actions.
        """
        if batch.actions_BCA is None or batch.action_mask_BC is None:
            raise ValueError("sft_loss needs a batch with actions; give `preprocess` the actions")
        draws = _draws_per_row(len(batch), noise_seeds)
        numbers_K = [self._noise(batch, noise_seeds[k * len(batch) : (k + 1) * len(batch)]) for k in range(draws)]
        seen = self.augment(batch, numbers_K[0].shift_BK) if self.training else batch
        prefix = self.encode(seen)
        errors_K: list[Tensor] = []
        for k, numbers in enumerate(numbers_K):
            time_B = self.flow.sample_time((numbers.uniform_B + k) / draws)
            x_BCA = self.flow.path(batch.actions_BCA, numbers.noise_BCA, time_B)
            velocity_BCA = self.velocity(prefix, seen, x_BCA, time_B)
            errors_K.append((velocity_BCA - self.flow.target(batch.actions_BCA, numbers.noise_BCA))[..., :ACTION_DIM].square())
        return _loss_sums(torch.stack(errors_K).mean(0), batch.action_mask_BC, batch.weight_B)

    def log_prob(self, batch: Batch, record: TransitionBatch, exploration: Exploration) -> ScoredTransitions:
        """See `Policy.log_prob`. One velocity per recorded transition, or per draw of the flow-matching loss, over one prefix."""
        prefix = self.encode(batch)
        velocities: list[Tensor] = []

        def velocity(x_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            velocity_BCA, raw_BCA = self._spread_velocity(prefix, batch, x_BCA, time_B)
            velocities.append(velocity_BCA)
            return velocity_BCA, raw_BCA

        if exploration.likelihood == "matching":
            draws = (record.x_next_BKCA, record.x_t_BKCA, record.denoise_index_BK)
            log_prob_BC = matching_log_prob(
                self.flow, lambda x_BCA, time_B: velocity(x_BCA, time_B)[0], *draws, exploration.matching_draws, self.live_dims
            )
            entropy_BC = torch.zeros_like(log_prob_BC)
        else:
            log_prob_BC, entropy_BC = chain_log_prob(
                self.flow,
                velocity,
                record.x_t_BKCA,
                record.x_next_BKCA,
                record.denoise_index_BK,
                self.config.denoise_steps,
                exploration,
                self.live_dims,
            )
        value_B = None if self.critic is None else self._value(self.critic, prefix, batch)
        return ScoredTransitions(log_prob_BC, entropy_BC, torch.stack(velocities, 1), value_B)

    def value(self, batch: Batch) -> Tensor:
        """See `Policy.value`."""
        if self.critic is None:
            raise ValueError("value needs a policy with a critic; `policies/extend.py` adds one")
        return self._value(self.critic, self.encode(batch), batch)

    def encode(self, batch: Batch) -> Any:
        """The prefix of images and prompt, once per chunk."""
        return self.model.encode(batch)

    def velocity(self, prefix: Any, batch: Batch, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """dx/dt float32[B, C, A] at `x_BCA` and flow time `time_B`."""
        return self.model.project(self._action_tokens(prefix, batch, x_BCA, time_B))

    @property
    def live_dims(self) -> list[int]:
        """The action dimensions that count in likelihoods: all 7, without those that the statistics hold constant.

        `postprocess` gives such a dimension its constant whatever the network says, so no executed action depends on it. In a likelihood it
        would be noise alone: on Reach, where rotation and gripper do nothing, 4 of 7 terms of every gradient; on LIBERO, where an object is
        grasped without turning the hand, 3 of 7.
        """
        reaches_robot = (self.processor.action.inverse_scale > 0).nonzero()[:, 0].tolist()
        return reaches_robot or list(range(ACTION_DIM))

    def augment(self, batch: Batch, uniform_BK: Tensor) -> Batch:
        """The batch as training sees it: images shifted by up to `config.shift_pixels`. `uniform_BK` is what `augment_numbers` counts."""
        shift_BK = uniform_BK[:, : 2 * len(self.spec.views)]
        return replace(batch, images_BVCHW=random_shift(batch.images_BVCHW, shift_BK, self.config.shift_pixels))

    def augment_numbers(self) -> int:
        """How many uniform numbers per row `augment` takes."""
        return 2 * len(self.spec.views)

    def _action_tokens(self, prefix: Any, batch: Batch, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        return self.model.suffix(prefix, batch.state_BS, x_BCA, time_B)[:, -x_BCA.shape[1] :]

    def _explore(self, prefix: Any, batch: Batch, noise_BCA: Tensor, noise_seeds: Sequence[int], exploration: Exploration) -> Chain:
        """Denoise with stochastic steps, whose numbers come from another stream of the same seeds."""
        shape = (self.config.chunk_length, self.config.model_action_dim)
        draws = stochastic_draws(noise_seeds, self.config.denoise_steps, shape, noise_BCA.device)
        return sample_chain(
            self.flow,
            lambda x_BCA, time_B: self._spread_velocity(prefix, batch, x_BCA, time_B),
            noise_BCA,
            draws,
            exploration,
            self.live_dims,
        )

    def _spread_velocity(self, prefix: Any, batch: Batch, x_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity, and the noise head's raw output where there is one, float32[B, C, A] each."""
        tokens_BCM = self._action_tokens(prefix, batch, x_BCA, time_B)
        return self.model.project(tokens_BCM), None if self.noise_head is None else self.noise_head(tokens_BCM)

    def _make_critic(self) -> Critic | None:
        config = self.config
        if config.critic is None:
            return None
        width = self.model.prefix_width if config.critic.reads == "prefix" else self.model.suffix_width
        return Critic(config.critic, width, config.model_state_dim)

    def _value(self, critic: Critic, prefix: FlowPrefix, batch: Batch) -> Tensor:
        """float32[B]; one computation for rollout and trainer, whatever was sampled. See `CriticConfig.reads`."""
        if critic.config.reads == "prefix":
            return critic(prefix.tokens_BPM, prefix.mask_BP, batch.state_BS)
        x_BCA = batch.state_BS.new_zeros(len(batch), self.config.chunk_length, self.config.model_action_dim)
        first_B = batch.state_BS.new_full((len(batch),), self.flow.grid(1)[0])
        tokens_BNM = self.model.suffix(prefix, batch.state_BS, x_BCA, first_B)
        return critic(tokens_BNM, tokens_BNM.new_ones(tokens_BNM.shape[:2], dtype=torch.bool), batch.state_BS)

    def _noise(self, batch: Batch, noise_seeds: Sequence[int]) -> RowNoise:
        if len(noise_seeds) != len(batch):
            raise ValueError(f"{len(noise_seeds)} noise seeds for a batch of {len(batch)} rows; give one per row")
        shape = (self.config.chunk_length, self.config.model_action_dim)
        return row_noise(noise_seeds, shape, self.augment_numbers(), batch.state_BS.device)


def _draws_per_row(rows: int, noise_seeds: Sequence[int]) -> int:
    draws, rest = divmod(len(noise_seeds), rows)
    if rest or not draws:
        raise ValueError(f"{len(noise_seeds)} noise seeds for a batch of {rows} rows; give one per row, or the same number for each")
    return draws


def _loss_sums(error_BCD: Tensor, action_mask_BC: Tensor, weight_B: Tensor | None) -> LossSums:
    weight_BC = action_mask_BC.to(error_BCD.dtype)
    if weight_B is not None:
        weight_BC = weight_BC * weight_B[:, None]
    weighted_BCD = error_BCD * weight_BC[..., None]
    parts = {f"loss_{name}": weighted_BCD.detach()[..., dims].sum() for name, dims in ACTION_PARTS.items()}
    return LossSums(weighted_BCD.sum(), weight_BC.detach().sum() * error_BCD.shape[-1], parts)
