"""pi0 and pi0.5 as a `Policy`: the network with its processor, its flow and its loss.

Shape legend: B batch; C actions per chunk; A action dimensions of the model; D = 7 real action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.episode import ACTION_DIM, Observation
from vla_rl.policies.augment import random_shift
from vla_rl.policies.base import Batch, LossSums, PolicyOutput, PolicySpec, ScoredTransitions, TransitionBatch
from vla_rl.policies.critic import Critic
from vla_rl.policies.flow import Flow, TimeDirection, row_noise
from vla_rl.policies.flow_stochastic import Chain, Exploration, chain_log_prob, sample_chain, stochastic_draws
from vla_rl.policies.noise_head import NoiseHead
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.gemma import Layer
from vla_rl.policies.pi0.model import Pi0Model, Prefix
from vla_rl.policies.processor import Processor, ProcessorConfig
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import PromptTokenizer

PI0_FLOW = Flow(TimeDirection.NOISE_AT_ONE)
"""t = 1 noise, t = 0 actions; share of noise 0.999 Beta(1.5, 1) + 0.001 (openpi)."""
ACTION_PARTS = {"translation": slice(0, 3), "rotation": slice(3, 6), "gripper": slice(6, 7)}
"""Parts of the loss that are reported apart."""


class Pi0Policy(nn.Module):
    """See `policies/base.py` for the contract. Everything random comes from `noise_seeds`, row by row."""

    def __init__(self, config: Pi0Config, spec: PolicySpec, processor: Processor) -> None:
        super().__init__()
        self.config, self.spec, self.processor = config, spec, processor
        self.model = Pi0Model(config, len(spec.views))
        self.critic = self._make_critic()
        self.noise_head = NoiseHead(config.noise_head, config.expert.width, config.model_action_dim) if config.noise_head else None
        for parameter in self.unread_parameters():
            parameter.requires_grad_(False)

    def preprocess(
        self,
        observations: Sequence[Observation],
        actions_BCA: np.ndarray | None = None,
        action_mask_BC: np.ndarray | None = None,
    ) -> Batch:
        """See `Policy.preprocess`; the batch lies on the policy's device."""
        return self.processor.preprocess(observations, actions_BCA, action_mask_BC).to(self.device)

    def postprocess(self, actions_BCA: Tensor) -> np.ndarray:
        """See `Policy.postprocess`."""
        return self.processor.postprocess(actions_BCA)

    @torch.no_grad()
    def act(self, batch: Batch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """See `Policy.act`: noise from the seeds, then `denoise_steps` steps over one prefix."""
        noise = self._noise(batch, noise_seeds).noise_BCA
        prefix = self.encode(batch)
        if exploration is not None:
            chain = self._explore(prefix, batch, noise, noise_seeds, exploration)
            value_B = None if self.critic is None else self._value(self.critic, prefix, batch)
            return PolicyOutput(chain.actions_BCA, chain.x_t_BKCA, chain.x_next_BKCA, chain.denoise_index_BK, chain.log_prob_BC, value_B)
        actions = PI0_FLOW.euler(
            lambda x_BCA, time_B: self.model.velocity(prefix, batch.state_BS, x_BCA, time_B), noise, self.config.denoise_steps
        )
        return PolicyOutput(actions)

    def sft_loss(self, batch: Batch, noise_seeds: Sequence[int]) -> LossSums:
        """Squared error of the velocity over real dimensions of real actions, as sums.

        count = sum over rows of weight * real actions * 7; metrics hold the parts of the loss, on the same count.
        Training (`self.training`) shifts the images; evaluation does not. Raises ValueError without actions in the batch.
        """
        if batch.actions_BCA is None or batch.action_mask_BC is None:
            raise ValueError("sft_loss needs a batch with actions; give `preprocess` the actions")
        numbers = self._noise(batch, noise_seeds)
        time_B = PI0_FLOW.sample_time(numbers.uniform_B)
        x_BCA = PI0_FLOW.path(batch.actions_BCA, numbers.noise_BCA, time_B)
        pixels = self.config.shift_pixels if self.training else 0
        images = random_shift(batch.images_BVCHW, numbers.shift_BK, pixels)
        prefix = self.model.encode_prefix(images, batch.tokens_BL, batch.token_mask_BL)
        velocity_BCA = self.model.velocity(prefix, batch.state_BS, x_BCA, time_B)
        error_BCD = (velocity_BCA - PI0_FLOW.target(batch.actions_BCA, numbers.noise_BCA))[..., :ACTION_DIM].square()
        return _loss_sums(error_BCD, batch.action_mask_BC, batch.weight_B)

    def log_prob(self, batch: Batch, record: TransitionBatch, exploration: Exploration) -> ScoredTransitions:
        """See `Policy.log_prob`. One velocity per recorded transition, over one prefix."""
        prefix = self.encode(batch)
        velocities: list[Tensor] = []

        def velocity(x_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            velocity_BCA, raw_BCA = self._spread_velocity(prefix, batch, x_BCA, time_B)
            velocities.append(velocity_BCA)
            return velocity_BCA, raw_BCA

        log_prob_BC, entropy_BC = chain_log_prob(
            PI0_FLOW,
            velocity,
            record.x_t_BKCA,
            record.x_next_BKCA,
            record.denoise_index_BK,
            self.config.denoise_steps,
            exploration,
            ACTION_DIM,
        )
        value_B = None if self.critic is None else self._value(self.critic, prefix, batch)
        return ScoredTransitions(log_prob_BC, entropy_BC, torch.stack(velocities, 1), value_B)

    def value(self, batch: Batch) -> Tensor:
        """See `Policy.value`."""
        if self.critic is None:
            raise ValueError("value needs a policy with a critic; `policies/extend.py` adds one")
        return self._value(self.critic, self.encode(batch), batch)

    def encode(self, batch: Batch) -> Prefix:
        """Images and prompt, once per chunk."""
        return self.model.encode_prefix(batch.images_BVCHW, batch.tokens_BL, batch.token_mask_BL)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.action_out_proj.weight.device

    def blocks(self) -> list[nn.Module]:
        """The layers to shard and to checkpoint one by one, in the order in which they run."""
        return [*self.model.vision.layers, *self.model.language.layers, *self.model.expert.layers]

    def parameter_names(self, selection: Literal["all", "expert"]) -> list[str]:
        """Names of the parameters that train under a selection: everything, or all but vision and language.

        Raises ValueError for another selection.
        """
        if selection not in ("all", "expert"):
            raise ValueError(f"trainable parameters {selection!r} are not one of 'all', 'expert'")
        frozen = ("model.vision.", "model.projector.", "model.language.") if selection == "expert" else ()
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad and not name.startswith(frozen)]

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """What the published weights contain but no output depends on: the language model's last layer after its keys and
        values, its final norm, and the expert's vocabulary head. They never train."""
        language = self.model.language
        last = cast(Layer, language.layers[-1])
        unread = [last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm, language.norm]
        if self.config.carry_output_head:
            unread.append(self.model.expert.lm_head)
        for module in unread:
            yield from module.parameters()

    def _explore(self, prefix: Prefix, batch: Batch, noise_BCA: Tensor, noise_seeds: Sequence[int], exploration: Exploration) -> Chain:
        """Denoise with stochastic steps, whose numbers come from another stream of the same seeds."""
        shape = (self.config.chunk_length, self.config.model_action_dim)
        draws = stochastic_draws(noise_seeds, self.config.denoise_steps, shape, noise_BCA.device)
        return sample_chain(
            PI0_FLOW,
            lambda x_BCA, time_B: self._spread_velocity(prefix, batch, x_BCA, time_B),
            noise_BCA,
            draws,
            exploration,
            ACTION_DIM,
        )

    def _spread_velocity(self, prefix: Prefix, batch: Batch, x_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity, and the noise head's raw output where there is one, float32[B, C, A] each."""
        tokens_BCM = self.model.suffix(prefix, batch.state_BS, x_BCA, time_B)[:, -x_BCA.shape[1] :]
        return self.model.project(tokens_BCM), None if self.noise_head is None else self.noise_head(tokens_BCM)

    def _make_critic(self) -> Critic | None:
        config = self.config
        if config.critic is None:
            return None
        width = config.language.width if config.critic.reads == "prefix" else config.expert.width
        return Critic(config.critic, width, config.model_state_dim)

    def _value(self, critic: Critic, prefix: Prefix, batch: Batch) -> Tensor:
        """float32[B]; one computation for rollout and trainer, whatever was sampled. See `CriticConfig.reads`."""
        if critic.config.reads == "prefix":
            return critic(prefix.tokens_BPM, prefix.mask_BP, batch.state_BS)
        x_BCA = batch.state_BS.new_zeros(len(batch), self.config.chunk_length, self.config.model_action_dim)
        first_B = batch.state_BS.new_full((len(batch),), PI0_FLOW.grid(1)[0])
        tokens_BNM = self.model.suffix(prefix, batch.state_BS, x_BCA, first_B)
        return critic(tokens_BNM, tokens_BNM.new_ones(tokens_BNM.shape[:2], dtype=torch.bool), batch.state_BS)

    def _noise(self, batch: Batch, noise_seeds: Sequence[int]):
        if len(noise_seeds) != len(batch):
            raise ValueError(f"{len(noise_seeds)} noise seeds for a batch of {len(batch)} rows; give one per row")
        shape = (self.config.chunk_length, self.config.model_action_dim)
        return row_noise(noise_seeds, shape, 2 * len(self.spec.views), batch.state_BS.device)


def _loss_sums(error_BCD: Tensor, action_mask_BC: Tensor, weight_B: Tensor | None) -> LossSums:
    weight_BC = action_mask_BC.to(error_BCD.dtype)
    if weight_B is not None:
        weight_BC = weight_BC * weight_B[:, None]
    weighted_BCD = error_BCD * weight_BC[..., None]
    parts = {f"loss_{name}": weighted_BCD.detach()[..., dims].sum() for name, dims in ACTION_PARTS.items()}
    return LossSums(weighted_BCD.sum(), weight_BC.detach().sum() * error_BCD.shape[-1], parts)


def build_pi0(config: Pi0Config, statistics: Statistics, spec: PolicySpec, tokenizer: PromptTokenizer) -> Pi0Policy:
    """A randomly initialised policy. Raises ConfigError when the spec, the tokenizer and the config contradict each other."""
    for name, wanted, given in (
        ("chunk_length", config.chunk_length, spec.chunk_length),
        ("executed_horizon", config.executed_horizon, spec.executed_horizon),
    ):
        if wanted != given:
            raise ConfigError(f"{name} is {given} in the policy's spec and {wanted} in its config; make them equal")
    if tokenizer.size > config.vocabulary:
        raise ConfigError(
            f"vocabulary is {config.vocabulary}, the tokenizer in {tokenizer.folder} has {tokenizer.size} tokens; raise vocabulary"
        )
    processor_config = ProcessorConfig(
        views=spec.views,
        image_size=config.vision.image_size,
        pad_images=config.pad_images,
        normalization=config.normalization,
        state_in_prompt=config.family == "pi05",
        model_state_dim=config.model_state_dim,
        model_action_dim=config.model_action_dim,
        chunk_length=config.chunk_length,
    )
    return Pi0Policy(config, spec, Processor(processor_config, statistics, tokenizer))
