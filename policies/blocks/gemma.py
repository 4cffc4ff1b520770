"""Gemma-style transformer layers with optional adaptive norms, as the language model and the action expert use them.

Shape legend: B batch; N tokens of this call; T tokens attended to (cached ones first); M width; H query heads;
G key/value heads; D head width; E width of the condition.
Formulas: RMS norm with gain 1 + weight, rotary positions with base 10,000 on the halves of each head, gated GELU MLP
(Gemma, 2024); adaptive norms (scale, shift, gate from a condition) as in pi0.5's action expert (openpi `gemma.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.policies.blocks.config import TransformerConfig

NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0
KeyValue = tuple[Tensor, Tensor]
"""Keys and values float32[B, G, T, D] of one layer."""


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), or with a condition: x / rms(x) * (1 + scale) + shift, and a gate for the residual."""

    def __init__(self, width: int, condition_width: int | None = None) -> None:
        super().__init__()
        if condition_width is None:
            self.weight = nn.Parameter(torch.zeros(width))
        else:
            self.dense = nn.Linear(condition_width, 3 * width)
            nn.init.zeros_(self.dense.weight)
            nn.init.zeros_(self.dense.bias)
        self.adaptive = condition_width is not None

    def forward(self, x_BNM: Tensor, condition_BE: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the normed tokens and, when adaptive, the gate float32[B, 1, M]."""
        if not self.adaptive:
            return F.rms_norm(x_BNM, x_BNM.shape[-1:], 1.0 + self.weight, NORM_EPS), None
        scale, shift, gate = self.dense(condition_BE)[:, None].chunk(3, dim=-1)
        return F.rms_norm(x_BNM, x_BNM.shape[-1:], None, NORM_EPS) * (1.0 + scale) + shift, gate


class Attention(nn.Module):
    """Grouped-query attention whose keys and values are returned, so that another stream can attend to them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, queries, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.width, bias=False)

    def key_value(self, x_BNM: Tensor, rotary: Tensor) -> KeyValue:
        """Rotated keys and values of these tokens, float32[B, G, N, D]."""
        return rotate(self._split(self.k_proj(x_BNM)), rotary), self._split(self.v_proj(x_BNM))

    def attend(self, x_BNM: Tensor, rotary: Tensor, key_value: KeyValue, mask_BHNT: Tensor) -> Tensor:
        """float32[B, N, M]: these tokens' view of `key_value`; the mask is additive and broadcast over heads."""
        queries_BHND = rotate(self._split(self.q_proj(x_BNM)), rotary)
        grouped = self.config.kv_heads != self.config.heads
        mixed_BHND = F.scaled_dot_product_attention(queries_BHND, *key_value, attn_mask=mask_BHNT, enable_gqa=grouped)
        return self.o_proj(mixed_BHND.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)


class GatedMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), with the tanh form of GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B, N, M] -> float32[B, N, M]."""
        return self.down_proj(F.gelu(self.gate_proj(x_BNM), approximate="tanh") * self.up_proj(x_BNM))


class Layer(nn.Module):
    """One pre-norm layer. All of its work happens in `forward`, so that FSDP and checkpointing can wrap it."""

    def __init__(self, config: TransformerConfig, adaptive: bool) -> None:
        super().__init__()
        condition_width = config.width if adaptive else None
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.width, condition_width)
        self.post_attention_layernorm = RMSNorm(config.width, condition_width)

    def forward(
        self,
        x_BNM: Tensor,
        rotary: Tensor,
        mask_BHNT: Tensor,
        past: KeyValue | None = None,
        condition_BE: Tensor | None = None,
        only_key_value: bool = False,
    ) -> tuple[Tensor, KeyValue]:
        """New tokens, and this layer's keys and values of the tokens given (without `past`).

        `past` holds keys and values to attend to before these tokens'. With `only_key_value` the tokens come back
        unchanged: nobody reads them after the last layer of the prefix, whose keys and values are its only output.
        """
        normed, gate = self.input_layernorm(x_BNM, condition_BE)
        key_value = self.self_attn.key_value(normed, rotary)
        if only_key_value:
            return x_BNM, key_value
        seen = key_value if past is None else (torch.cat((past[0], key_value[0]), 2), torch.cat((past[1], key_value[1]), 2))
        x_BNM = _residual(x_BNM, self.self_attn.attend(normed, rotary, seen, mask_BHNT), gate)
        normed, gate = self.post_attention_layernorm(x_BNM, condition_BE)
        return _residual(x_BNM, self.mlp(normed), gate), key_value


class Transformer(nn.Module):
    """A stack of layers with a final norm; with a vocabulary it also embeds tokens."""

    def __init__(self, config: TransformerConfig, adaptive: bool = False, vocabulary: int | None = None) -> None:
        super().__init__()
        self.config = config
        if vocabulary is not None:
            self.embed_tokens = nn.Embedding(vocabulary, config.width)
            nn.init.normal_(self.embed_tokens.weight, std=config.width**-0.5)
        self.layers = nn.ModuleList(Layer(config, adaptive) for _ in range(config.depth))
        self.norm = RMSNorm(config.width, config.width if adaptive else None)
        self._initialize()

    def _initialize(self) -> None:
        """Unit-variance maps, and residual branches shrunk so that the sum over all layers has unit variance too (GPT-2)."""
        for name, module in self.layers.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(".dense"):
                shrink = (2 * self.config.depth) ** -0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
                nn.init.normal_(module.weight, std=shrink * module.in_features**-0.5)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """float32[B, L, M]: Gemma scales its embeddings by the square root of the width."""
        return self.embed_tokens(tokens_BL) * self.config.width**0.5


def rotary_angles(positions_BN: Tensor, head_width: int) -> Tensor:
    """float32[2, B, 1, N, D / 2]: cosines and sines of the rotary angles."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions_BN.device) / head_width
    angles = positions_BN[:, None, :, None].float() / ROTARY_BASE**exponents
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHND: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the two halves of each head by its position's angles."""
    first, second = x_BHND.chunk(2, dim=-1)
    cosines, sines = rotary
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return x + update if gate is None else x + update * gate
