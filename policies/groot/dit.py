"""The attention blocks of GR00T's action head: self-attention over features, and a diffusion transformer with adaptive norms.

Shape legend: B batch; N tokens of this call; P tokens of the vision-language features; T tokens attended to; M width;
H heads; D head width; E width of the condition.
Formulas: adaptive layer norm `norm(x) (1 + scale) + shift` with scale and shift from the embedded time (Peebles & Xie 2023),
blocks and parameter names as in Isaac-GR00T `modules/dit.py`, which builds on diffusers' `Attention` and `FeedForward`.
The published blocks also drop a share of what attention and MLP give while they train; ours do not, because rollout and
trainer must see the same policy, and every random number comes from the seed of its row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.policies.groot.config import AttentionStackConfig
from vla_rl.policies.groot.embodiment import bucket_sines

TIME_WIDTH = 256
"""Sines and cosines of a time bucket."""
_NORM_EPS = 1e-5
_OUTPUT_NORM_EPS = 1e-6
KeyValue = tuple[Tensor, Tensor]
"""Keys and values float32[B, H, T, D] of one block."""


class AdaptiveNorm(nn.Module):
    """A layer norm whose scale and shift come from a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x_BNM: Tensor, condition_BE: Tensor) -> Tensor:
        """float32[B, N, M]."""
        scale, shift = self.linear(F.silu(condition_BE))[:, None].chunk(2, -1)
        return F.layer_norm(x_BNM, x_BNM.shape[-1:], eps=_NORM_EPS) * (1.0 + scale) + shift


class Attention(nn.Module):
    """Multi-head attention whose keys and values can be computed apart."""

    def __init__(self, width: int, context_width: int, config: AttentionStackConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.to_q = nn.Linear(width, config.width)
        self.to_k = nn.Linear(context_width, config.width)
        self.to_v = nn.Linear(context_width, config.width)
        self.to_out = nn.ModuleList([nn.Linear(config.width, width)])

    def key_value(self, context_BTM: Tensor) -> KeyValue:
        """Keys and values of the tokens that are attended to."""
        return self._split(self.to_k(context_BTM)), self._split(self.to_v(context_BTM))

    def attend(self, x_BNM: Tensor, key_value: KeyValue, mask_B11T: Tensor | None) -> Tensor:
        """float32[B, N, M]: these tokens' view of `key_value`, where the mask holds."""
        mixed_BHND = F.scaled_dot_product_attention(self._split(self.to_q(x_BNM)), *key_value, attn_mask=mask_B11T)
        return self.to_out[0](mixed_BHND.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Projection(nn.Module):
    """A linear map followed by the tanh form of GELU; a module of its own for the sake of the published names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """float32[..., inputs] -> float32[..., outputs]."""
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([Projection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B, N, M] -> float32[B, N, M]."""
        return self.net[2](self.net[0](x_BNM))


class Block(nn.Module):
    """One pre-norm block. All of its work happens in `forward`, so that FSDP and checkpointing can wrap it."""

    def __init__(self, config: AttentionStackConfig, context_width: int | None = None, adaptive: bool = True) -> None:
        """`context_width` is the width of the features it attends to; None makes it attend to its own tokens."""
        super().__init__()
        width = config.width
        self.adaptive, self.crosses = adaptive, context_width is not None
        self.norm1 = AdaptiveNorm(width) if adaptive else nn.LayerNorm(width, _NORM_EPS)
        self.attn1 = Attention(width, context_width or width, config)
        self.norm3 = nn.LayerNorm(width, _NORM_EPS, elementwise_affine=not adaptive)
        self.ff = FeedForward(width)

    def forward(
        self,
        x_BNM: Tensor,
        mask_B11T: Tensor | None = None,
        condition_BE: Tensor | None = None,
        key_value: KeyValue | None = None,
        only_key_value: bool = False,
    ) -> tuple[Tensor, KeyValue]:
        """New tokens, and the keys and values they attended to.

        With `only_key_value`, `x_BNM` are features to be attended to later: they come back unchanged with their keys and values.
        """
        if only_key_value:
            return x_BNM, self.attn1.key_value(x_BNM)
        normed = self.norm1(x_BNM, condition_BE) if self.adaptive else self.norm1(x_BNM)
        seen = self.attn1.key_value(normed) if key_value is None else key_value
        x_BNM = x_BNM + self.attn1.attend(normed, seen, mask_B11T)
        return x_BNM + self.ff(self.norm3(x_BNM)), seen


class SelfAttentionStack(nn.Module):
    """Blocks in which every real token of the features sees every other."""

    def __init__(self, config: AttentionStackConfig) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Block(config, adaptive=False) for _ in range(config.depth))

    def forward(self, x_BPM: Tensor, mask_BP: Tensor) -> Tensor:
        """float32[B, P, M]; what padding holds is not read."""
        for block in self.transformer_blocks:
            x_BPM, _ = block(x_BPM, mask_BP[:, None, None])
        return x_BPM


class TimestepEncoder(nn.Module):
    """The bucket of flow time as the condition of the adaptive norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.ModuleDict({"linear_1": nn.Linear(TIME_WIDTH, width), "linear_2": nn.Linear(width, width)})

    def forward(self, bucket_B: Tensor) -> Tensor:
        """float32[B, E]. Cosines first, the last frequency 1 / 10,000 exactly: diffusers' `Timesteps` as Isaac-GR00T sets it."""
        half = TIME_WIDTH // 2
        exponents_H = -math.log(10_000.0) * torch.arange(half, dtype=torch.float32, device=bucket_B.device) / (half - 1)
        sines, cosines = bucket_sines(bucket_B, exponents_H).chunk(2, 1)
        first, second = self.timestep_embedder["linear_1"], self.timestep_embedder["linear_2"]
        return second(F.silu(first(torch.cat((cosines, sines), 1))))


class DiffusionTransformer(nn.Module):
    """Even blocks attend to the features, odd ones to the stack's own tokens; text and images may take turns."""

    def __init__(self, config: AttentionStackConfig, context_width: int, output_width: int, text_every: int) -> None:
        super().__init__()
        width, self.text_every = config.width, text_every
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(Block(config, context_width if index % 2 == 0 else None) for index in range(config.depth))
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, output_width)

    def key_values(self, features_BPM: Tensor) -> list[KeyValue]:
        """Keys and values of the features for each block that attends to them: they do not depend on flow time."""
        return [block(features_BPM, only_key_value=True)[1] for block in self.transformer_blocks[::2]]

    def masks(self, mask_BP: Tensor, image_mask_BP: Tensor) -> list[Tensor]:
        """bool[B, 1, 1, P] for each block that attends to the features: which of them it sees."""
        images, text = mask_BP & image_mask_BP, mask_BP & ~image_mask_BP
        turns = [text if self.text_every and cross % self.text_every == 0 else images for cross in range(len(self.transformer_blocks[::2]))]
        return [(seen if self.text_every else mask_BP)[:, None, None] for seen in turns]

    def forward(self, x_BNM: Tensor, bucket_B: Tensor, key_values: list[KeyValue], masks: list[Tensor]) -> Tensor:
        """float32[B, N, output_width]: tokens of state and actions, after all blocks."""
        condition_BE = self.timestep_encoder(bucket_B)
        for index, block in enumerate(self.transformer_blocks):
            if index % 2:
                x_BNM, _ = block(x_BNM, None, condition_BE)
            else:
                x_BNM, _ = block(x_BNM, masks[index // 2], condition_BE, key_values[index // 2])
        shift, scale = self.proj_out_1(F.silu(condition_BE))[:, None].chunk(2, -1)
        normed = F.layer_norm(x_BNM, x_BNM.shape[-1:], eps=_OUTPUT_NORM_EPS)
        return self.proj_out_2(normed * (1.0 + scale) + shift)
