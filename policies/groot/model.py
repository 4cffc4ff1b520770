"""The network of a GR00T-style policy: a backbone and an action head.

Shape legend: B batch; C actions per chunk; A, S padded action and state dimensions; N suffix tokens; M width.
"""

from __future__ import annotations

from torch import Tensor, nn

from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import ConvBackboneConfig, EagleBackboneConfig, GrootConfig
from vla_rl.policies.groot.conv import ConvBackbone
from vla_rl.policies.groot.eagle import EagleBackbone
from vla_rl.policies.groot.head import ActionHead, GrootPrefix
from vla_rl.policies.groot.qwen import QwenBackbone

_POSITION_STD = 0.5
"""Of the first positions of actions: about the spread of the action tokens they are added to."""


class GrootModel(nn.Module):
    """A `FlowNetwork` (see `policies/flow_policy.py`) for `views` views."""

    def __init__(self, config: GrootConfig, views: int, image_token_id: int | None) -> None:
        """`image_token_id` is the tokenizer's number of the image token, for backbones that take images from the prompt."""
        super().__init__()
        self.prefix_width, self.suffix_width = config.backbone.width, config.head.hidden_width
        self.backbone = _make_backbone(config, views, image_token_id)
        self.action_head = ActionHead(config.head, config.backbone.width, config.model_state_dim, config.model_action_dim)
        self._initialize(config)

    def encode(self, batch: Batch) -> GrootPrefix:
        """Backbone, self-attention over its features, and the state's token; once per chunk."""
        return self.action_head.encode(self.backbone(batch), batch.state_BS, batch.state_mask_B)

    def suffix(self, prefix: GrootPrefix, state_BS: Tensor, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """[B, 1 + C, M]: the transformer's tokens of state and actions; the state is in the prefix already."""
        return self.action_head.suffix(prefix, x_BCA, time_B)

    def project(self, tokens_BCM: Tensor) -> Tensor:
        """See `FlowNetwork.project`."""
        return self.action_head.project(tokens_BCM)

    def _initialize(self, config: GrootConfig) -> None:
        """Unit-variance maps and residual branches shrunk by their number (as GPT-2), adaptive norms that begin as plain ones, and a
        velocity of zero: the published 0.02 everywhere drowns x_t in a small network, and published weights replace it anyway."""
        head = self.action_head
        for stack in (head.model.transformer_blocks, head.vl_self_attention.transformer_blocks):
            for name, module in stack.named_modules():
                if isinstance(module, nn.Linear):
                    shrink = (2 * len(stack)) ** -0.5 if name.endswith(("to_out.0", "net.2")) else 1.0
                    spread = 0.0 if name.endswith("norm1.linear") else shrink * module.in_features**-0.5
                    nn.init.normal_(module.weight, std=spread)
                    nn.init.zeros_(module.bias)
        nn.init.normal_(head.position_embedding.weight, std=_POSITION_STD)
        nn.init.zeros_(head.action_decoder.layer2.W)


def _make_backbone(config: GrootConfig, views: int, image_token_id: int | None) -> ConvBackbone | EagleBackbone | QwenBackbone:
    if isinstance(config.backbone, ConvBackboneConfig):
        return ConvBackbone(config.backbone, views)
    assert image_token_id is not None, "the builder looks it up for backbones that need it"
    if isinstance(config.backbone, EagleBackboneConfig):
        return EagleBackbone(config.backbone, image_token_id)
    return QwenBackbone(config.backbone, image_token_id)
