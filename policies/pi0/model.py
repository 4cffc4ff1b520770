"""The network of pi0 and pi0.5: images and prompt -> prefix; prefix, state, noisy actions and time -> velocity.

Shape legend: B batch; V views; L prompt tokens; P prefix tokens (images, then prompt); N suffix tokens (pi0: state, then
actions; pi0.5: actions); C actions per chunk; A, S padded action and state dimensions; M width of the expert.

The prefix attends to itself only, in both directions, so its keys and values do not depend on the actions: they are
computed once per chunk and serve every denoise step, in training as in sampling. The suffix attends to the prefix and,
block by block, to itself: the state does not see the actions; the actions see everything (openpi `pi0.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.policies.base import Batch
from vla_rl.policies.blocks.gemma import KeyValue, Transformer, rotary_angles
from vla_rl.policies.blocks.vision import VisionTower
from vla_rl.policies.pi0.config import Pi0Config

MASKED = -2.3819763e38
"""openpi's additive mask: finite, so that a fully masked row would stay finite too."""

_SILU_GAIN = 1.7
"""1 / sqrt(E[silu(z)^2]) for a standard normal z: keeps unit variance through the activation."""


@dataclass(frozen=True)
class Prefix:
    """What the action expert reads of images and prompt."""

    key_values: list[KeyValue]
    """Keys and values float32[B, G, P, D] of each layer."""
    mask_BP: Tensor
    """bool[B, P]: real tokens (images always, prompt without padding)."""
    suffix_rotary: Tensor
    """Rotary angles of the suffix, whose positions follow the prefix's real tokens."""
    suffix_mask: Tensor
    """Additive mask float32[B, 1, N, P + N]: what each suffix token may attend to."""
    tokens_BPM: Tensor
    """float32[B, P, M]: the tokens as they enter the language model's last layer, of which only keys and values are read; for a critic."""


class Pi0Model(nn.Module):
    """pi0 or pi0.5, by `config.family`, for `views` views."""

    def __init__(self, config: Pi0Config, views: int) -> None:
        super().__init__()
        self.config = config
        self.prefix_width, self.suffix_width = config.language.width, config.expert.width
        width = config.expert.width
        self.vision = VisionTower(config.vision, views)
        self.projector = nn.Linear(config.vision.width, config.language.width)
        self.language = Transformer(config.language, vocabulary=config.vocabulary)
        self.expert = Transformer(config.expert, adaptive=config.family == "pi05")
        if config.carry_output_head:
            self.expert.lm_head = nn.Linear(width, config.vocabulary, bias=False)
        self.action_in_proj = nn.Linear(config.model_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.model_action_dim)
        if config.family == "pi0":
            self.state_proj = nn.Linear(config.model_state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        else:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        self._initialize_suffix()

    def _initialize_suffix(self) -> None:
        """Suffix tokens of about unit variance, so that x_t is not drowned by what the layers add; a velocity of zero."""
        for name, module in self.named_children():
            if isinstance(module, nn.Linear) and name != "projector":
                gain = _SILU_GAIN if name.endswith("mlp_out") else 1.0
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        nn.init.zeros_(self.action_out_proj.weight)
        nn.init.zeros_(self.action_out_proj.bias)

    def encode(self, batch: Batch) -> Prefix:
        """The prefix of a batch, see `FlowNetwork.encode`."""
        return self.encode_prefix(batch.images_BVCHW, batch.tokens_BL, batch.token_mask_BL)

    def encode_prefix(self, images_BVCHW: Tensor, tokens_BL: Tensor, token_mask_BL: Tensor) -> Prefix:
        """Run vision tower and language model over images and prompt; once per chunk."""
        images = self.projector(self.vision(images_BVCHW))
        x_BPM = torch.cat((images, self.language.embed(tokens_BL).to(images.dtype)), 1)
        mask_BP = torch.cat((token_mask_BL.new_ones(images.shape[:2]), token_mask_BL), 1)
        rotary = rotary_angles(mask_BP.cumsum(1) - 1, self.config.language.head_width).to(x_BPM.dtype)
        additive = _additive(mask_BP[:, None, None, :], x_BPM.dtype)
        key_values: list[KeyValue] = []
        last = len(self.language.layers) - 1
        for index, layer in enumerate(self.language.layers):
            x_BPM, key_value = layer(x_BPM, rotary, additive, only_key_value=index == last)
            key_values.append(key_value)
        return Prefix(key_values, mask_BP, *self._suffix_geometry(mask_BP, x_BPM.dtype), x_BPM)

    def velocity(self, prefix: Prefix, state_BS: Tensor, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """dx/dt at `x_BCA` and flow time `time_B` (1 noise, 0 actions), float32[B, C, A]."""
        return self.project(self.suffix(prefix, state_BS, x_BCA, time_B)[:, -x_BCA.shape[1] :])

    def project(self, tokens_BCM: Tensor) -> Tensor:
        """The velocity float32[B, C, A] from the expert's tokens of the actions."""
        return self.action_out_proj(tokens_BCM).float()

    def suffix(self, prefix: Prefix, state_BS: Tensor, x_BCA: Tensor, time_B: Tensor) -> Tensor:
        """The expert's normed tokens [B, N, M]: the state's (pi0 only), then one per action."""
        x_BNM, condition_BM = self._embed_suffix(state_BS, x_BCA, time_B)
        for layer, past in zip(self.expert.layers, prefix.key_values):
            x_BNM, _ = layer(x_BNM, prefix.suffix_rotary, prefix.suffix_mask, past, condition_BM)
        return self.expert.norm(x_BNM, condition_BM)[0]

    def _embed_suffix(self, state_BS: Tensor, x_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Suffix tokens, and the condition of the adaptive norms (pi0.5)."""
        config = self.config
        actions = self.action_in_proj(x_BCA)
        time_BM = time_embedding(time_B, config.expert.width, config.time_min_period, config.time_max_period)
        if config.family == "pi05":
            return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time_BM))))
        joined = torch.cat((actions, time_BM[:, None].expand_as(actions).to(actions.dtype)), -1)
        actions = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(joined)))
        return torch.cat((self.state_proj(state_BS)[:, None], actions), 1), None

    def _suffix_geometry(self, prefix_mask_BP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary angles and additive mask of the suffix; they depend on the prefix alone, so every denoise step shares them."""
        pi0 = self.config.family == "pi0"
        batch, suffix = len(prefix_mask_BP), self.config.chunk_length + pi0
        positions_BN = prefix_mask_BP.sum(1, keepdim=True) + torch.arange(suffix, device=prefix_mask_BP.device)
        own_NN = prefix_mask_BP.new_ones(suffix, suffix)
        if pi0:
            own_NN[0, 1:] = False
        seen = torch.cat((prefix_mask_BP[:, None].expand(batch, suffix, -1), own_NN.expand(batch, -1, -1)), 2)[:, None]
        return rotary_angles(positions_BN, self.config.expert.head_width).to(dtype), _additive(seen, dtype)


def time_embedding(time_B: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """float32[B, M]: sines and cosines of time with periods spaced geometrically (openpi `posemb_sincos`).

    The angles are computed in float64: the shortest period turns a float32 rounding of t into a visible phase.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time_B.device)
    periods = min_period * (max_period / min_period) ** fraction
    angles = time_B[:, None].double() * (2.0 * math.pi / periods)
    return torch.cat((angles.sin(), angles.cos()), 1).float()


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, max(MASKED, torch.finfo(dtype).min))
