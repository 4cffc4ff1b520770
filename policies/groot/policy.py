"""GR00T-style policies: their network behind `FlowPolicy`, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.policies.base import Batch, PolicySpec
from vla_rl.policies.flow import Flow, TimeDirection
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.groot.config import ConvBackboneConfig, EagleBackboneConfig, GrootConfig
from vla_rl.policies.groot.model import GrootModel
from vla_rl.policies.groot.published import own_name, to_published
from vla_rl.policies.module import make_processor
from vla_rl.policies.processor import Processor
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import PromptTokenizer

GROOT_FLOW = Flow(TimeDirection.NOISE_AT_ZERO)
"""t = 0 noise, t = 1 actions; t = 0.999 (1 - Beta(1.5, 1)) (Isaac-GR00T `gr00t_n1d7.py`), which is 1 - (0.999 Beta + 0.001)."""


class GrootPolicy(FlowPolicy):
    """See `policies/base.py` for the contract."""

    config: GrootConfig
    model: GrootModel
    flow = GROOT_FLOW

    def __init__(self, config: GrootConfig, spec: PolicySpec, processor: Processor, image_token_id: int | None) -> None:
        super().__init__(config, spec, processor, GrootModel(config, len(spec.views), image_token_id))

    def augment(self, batch: Batch, uniform_BK: Tensor) -> Batch:
        """Shifted images, and a share of the rows without their state."""
        shifted = super().augment(batch, uniform_BK)
        return replace(shifted, state_mask_B=uniform_BK[:, -1] >= self.config.state_dropout) if self.config.state_dropout else shifted

    def augment_numbers(self) -> int:
        """One more than the shifts need, for the state."""
        return super().augment_numbers() + 1

    def blocks(self) -> list[nn.Module]:
        """See `PolicyModule.blocks`."""
        head = self.model.action_head
        return [*self.model.backbone.layers(), *head.vl_self_attention.transformer_blocks, *head.model.transformer_blocks]

    def backbone_prefixes(self) -> tuple[str, ...]:
        """See `PolicyModule.backbone_prefixes`."""
        return ("model.backbone.",)

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """The backbone's."""
        yield from self.model.backbone.unread_parameters()

    def published_name(self, name: str) -> str:
        """See `PolicyModule.published_name`."""
        return to_published(name)

    def own_name(self, name: str, others: frozenset[str]) -> str | None:
        """See `PolicyModule.own_name`."""
        return own_name(name)

    def lerobot_fields(self) -> dict[str, Any]:
        """What `GrootConfig` of LeRobot has beside the common fields."""
        config = self.config
        return {
            "max_state_dim": config.model_state_dim,
            "max_action_dim": config.model_action_dim,
            "num_inference_timesteps": config.denoise_steps,
        }


def build_groot(config: GrootConfig, statistics: Statistics, spec: PolicySpec, tokenizer: PromptTokenizer) -> GrootPolicy:
    """A randomly initialised policy. Raises ConfigError when the spec, the tokenizer and the config contradict each other."""
    writer = _prompt_writer(config, len(spec.views))
    more = {"crop": config.crop, "clip": config.clip_outliers}
    processor = make_processor(config, spec, statistics, tokenizer, config.backbone.image_size, writer, **more)
    return GrootPolicy(config, spec, processor, _image_token_id(config, tokenizer))


def formal(prompt: str) -> str:
    """The task in lower case, without punctuation (Isaac-GR00T's `formalize_language`)."""
    return "".join(letter for letter in prompt.lower() if letter.isalnum() or letter.isspace() or letter == "_")


def chat_prompt(prompt: str, views: int, image_tokens: int, image_token: str) -> str:
    """Qwen3-VL's chat form of one user turn that shows the views and then says the task (N1.7 asks for no answer)."""
    image = f"<|vision_start|>{image_token * image_tokens}<|vision_end|>"
    return f"<|im_start|>user\n{image * views}{formal(prompt)}<|im_end|>\n"


def eagle_prompt(prompt: str, views: int, backbone: EagleBackboneConfig) -> str:
    """Eagle's chat form of one user turn that says the task and then shows the views (N1.6's `_apply_vlm_processing` and Eagle's
    `replace_media_placeholder`). Raises jinja2.TemplateError for a template that cannot be read."""
    content: list[dict[str, str]] = [{"type": "text", "text": formal(prompt)}, *({"type": "image"} for _ in range(views))]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers renders chat templates
    template = environment.from_string(backbone.chat_template)
    text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=False)
    for view in range(1, views + 1):
        image = f"<image {view}><img>{backbone.image_token * backbone.vision.tokens}</img>"
        text = text.replace(f"<image-{view}>", image)
    return text


def _prompt_writer(config: GrootConfig, views: int) -> Callable[[str, np.ndarray], str]:
    backbone = config.backbone
    if isinstance(backbone, ConvBackboneConfig):
        return lambda prompt, state_S: formal(prompt)
    if isinstance(backbone, EagleBackboneConfig):
        return lambda prompt, state_S: eagle_prompt(prompt, views, backbone)
    return lambda prompt, state_S: chat_prompt(prompt, views, backbone.vision.tokens, backbone.image_token)


def _image_token_id(config: GrootConfig, tokenizer: PromptTokenizer) -> int | None:
    if isinstance(config.backbone, ConvBackboneConfig):
        return None
    found = tokenizer.tokenizer.token_to_id(config.backbone.image_token)
    if found is None:
        raise ConfigError(
            f"backbone.image_token is {config.backbone.image_token!r}, which the tokenizer in {tokenizer.folder} does not have; "
            "give `tokenizer` the folder of the backbone's own tokenizer"
        )
    return found
