"""GR00T's action head: features of images and prompt, the state and noisy actions to a velocity.

Shape legend: B batch; P feature tokens; C actions per chunk; A, S padded action and state dimensions; M width at hand;
N = 1 + C tokens of the diffusion transformer: the state's, then the actions'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.policies.groot.config import ActionHeadConfig
from vla_rl.policies.groot.dit import DiffusionTransformer, KeyValue, SelfAttentionStack
from vla_rl.policies.groot.embodiment import ActionEncoder, EmbodimentMLP
from vla_rl.policies.groot.features import Features


@dataclass(frozen=True)
class GrootPrefix:
    """What the diffusion transformer reads of an observation; computed once per chunk."""

    tokens_BPM: Tensor
    """float32[B, P, M]: the features after self-attention; a critic reads them."""
    mask_BP: Tensor
    """bool[B, P]: real tokens."""
    state_B1M: Tensor
    """float32[B, 1, M]: the state's token."""
    key_values: list[KeyValue]
    """Keys and values of the features, for each block that attends to them."""
    masks: list[Tensor]
    """bool[B, 1, 1, P]: which features each of these blocks sees."""


class ActionHead(nn.Module):
    """Everything behind the backbone; parameter names are the published ones."""

    def __init__(self, config: ActionHeadConfig, feature_width: int, state_dims: int, action_dims: int) -> None:
        super().__init__()
        self.config = config
        hidden, width, count, own = config.hidden_width, config.dit.width, config.embodiments, config.embodiment
        self.model = DiffusionTransformer(config.dit, feature_width, hidden, config.text_every)
        self.state_encoder = EmbodimentMLP(count, state_dims, hidden, width, own)
        self.action_encoder = ActionEncoder(count, action_dims, width, own)
        self.action_decoder = EmbodimentMLP(count, hidden, hidden, action_dims, own)
        self.vlln = nn.LayerNorm(feature_width)
        self.vl_self_attention = SelfAttentionStack(config.vl_attention)
        self.position_embedding = nn.Embedding(config.positions, width)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if config.mask_token else None

    def encode(self, features: Features, state_BS: Tensor, state_mask_B: Tensor | None) -> GrootPrefix:
        """The prefix; rows outside `state_mask_B` get zeros or the mask token for their state, as GR00T's state dropout gives."""
        tokens_BPM = self.vl_self_attention(self.vlln(features.tokens_BPM), features.mask_BP)
        state_B1M = self.state_encoder(state_BS[:, None])
        if state_mask_B is not None:
            seen_B11 = state_mask_B[:, None, None].to(state_B1M.dtype)
            state_B1M = state_B1M * seen_B11
            if self.mask_token is not None:
                state_B1M = state_B1M + self.mask_token * (1.0 - seen_B11)
        masks = self.model.masks(features.mask_BP, features.image_mask_BP)
        return GrootPrefix(tokens_BPM, features.mask_BP, state_B1M, self.model.key_values(tokens_BPM), masks)

    def suffix(self, prefix: GrootPrefix, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """[B, N, M]: the transformer's tokens at flow time `time_B` (0 noise, 1 actions)."""
        bucket_B = self.bucket(time_B)
        positions = torch.arange(x_BCA.shape[1], device=x_BCA.device)
        actions_BCM = self.action_encoder(x_BCA, bucket_B) + self.position_embedding(positions)
        return self.model(torch.cat((prefix.state_B1M, actions_BCM), 1), bucket_B, prefix.key_values, prefix.masks)

    def bucket(self, time_B: Tensor) -> Tensor:
        """int64[B]: the number of the time step that flow time `time_B` falls into."""
        return (time_B * self.config.time_buckets).long()

    def project(self, tokens_BCM: Tensor) -> Tensor:
        """The velocity float32[B, C, A] from the tokens of the actions."""
        return self.action_decoder(tokens_BCM).float()
