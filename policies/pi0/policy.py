"""pi0 and pi0.5: their network behind `FlowPolicy`, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from vla_rl.policies.base import PolicySpec
from vla_rl.policies.blocks.gemma import Layer
from vla_rl.policies.flow import Flow, TimeDirection
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.module import make_processor
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.model import Pi0Model
from vla_rl.policies.pi0.published import own_name, published_weights, to_published
from vla_rl.policies.processor import Processor, prompt_line, prompt_with_state
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import PromptTokenizer

PI0_FLOW = Flow(TimeDirection.NOISE_AT_ONE)
"""t = 1 noise, t = 0 actions; share of noise 0.999 Beta(1.5, 1) + 0.001 (openpi)."""


class Pi0Policy(FlowPolicy):
    """See `policies/base.py` for the contract."""

    config: Pi0Config
    model: Pi0Model
    flow = PI0_FLOW

    def __init__(self, config: Pi0Config, spec: PolicySpec, processor: Processor) -> None:
        super().__init__(config, spec, processor, Pi0Model(config, len(spec.views)))

    def blocks(self) -> list[nn.Module]:
        """See `PolicyModule.blocks`."""
        return [*self.model.vision.layers, *self.model.language.layers, *self.model.expert.layers]

    def backbone_prefixes(self) -> tuple[str, ...]:
        """See `PolicyModule.backbone_prefixes`."""
        return ("model.vision.", "model.projector.", "model.language.")

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

    def published_name(self, name: str) -> str:
        """See `PolicyModule.published_name`."""
        return to_published(name)

    def published_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `PolicyModule.published_weights`."""
        return published_weights(weights)

    def own_name(self, name: str, others: frozenset[str]) -> str | None:
        """See `PolicyModule.own_name`."""
        return own_name(name, others)

    def lerobot_fields(self) -> dict[str, Any]:
        """What `PI0Config` and `PI05Config` have beside the common fields."""
        config = self.config
        return {
            "max_state_dim": config.model_state_dim,
            "max_action_dim": config.model_action_dim,
            "num_inference_steps": config.denoise_steps,
            "min_period": config.time_min_period,
            "max_period": config.time_max_period,
            "image_resolution": [config.vision.image_size] * 2,
            "tokenizer_max_length": config.prompt_tokens,
        }

    def lerobot_steps(self, normalize: dict[str, Any], tokenize: dict[str, Any], device: dict[str, Any]) -> list[dict[str, Any]]:
        """pi0.5 writes the normalised state into the prompt, so it normalises first; pi0 ends the prompt with a line break."""
        if self.config.family == "pi05" and self.config.state_in_prompt:
            return [normalize, {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}}, tokenize, device]
        return [{"registry_name": "pi0_new_line_processor", "config": {}}, tokenize, device, normalize]


def build_pi0(config: Pi0Config, statistics: Statistics, spec: PolicySpec, tokenizer: PromptTokenizer) -> Pi0Policy:
    """A randomly initialised policy. Raises ConfigError when the spec, the tokenizer and the config contradict each other."""
    write_prompt = prompt_with_state if config.family == "pi05" and config.state_in_prompt else prompt_line
    return Pi0Policy(config, spec, make_processor(config, spec, statistics, tokenizer, config.vision.image_size, write_prompt))
