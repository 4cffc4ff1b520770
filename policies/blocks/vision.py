"""Vision towers: SigLIP's as published, and strided convolutions for small data.

Shape legend: B batch; V views; N tokens per view; M width; H, W pixels. Images are float32[B, V, 3, H, W] in [-1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.policies.blocks.config import VisionConfig

NORM_EPS = 1e-6


class PatchEmbeddings(nn.Module):
    """Non-overlapping patches, projected, plus a learned position for each; shared by the views (SigLIP)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(config.tokens, config.width)
        nn.init.normal_(self.position_embedding.weight, std=config.width**-0.5)

    def forward(self, images_BVCHW: Tensor) -> Tensor:
        """Tokens float32[B * V, N, M]."""
        patches = self.patch_embedding(images_BVCHW.flatten(0, 1))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class ConvEmbeddings(nn.Module):
    """A stack of 3x3 convolutions with stride 2 per view, and a learned position for each view and cell.

    With a few hundred demonstrations a plain patch projection learns neither edges nor sub-cell positions;
    overlapping strided convolutions do, and cost less than the attention they feed.
    """

    def __init__(self, config: VisionConfig, views: int) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(_conv_stack(config) for _ in range(views))
        self.cell_projections = nn.ModuleList(nn.Linear(config.conv_channels[-1], config.width) for _ in range(views))
        summarized, summary = config.conv_channels[-1] * config.cells, config.summary_tokens * config.width
        self.summaries = nn.ModuleList(nn.Linear(summarized, summary) for _ in range(views if summary else 0))
        self.position_embedding = nn.Parameter(torch.randn(views, config.tokens, config.width) * config.width**-0.5)

    def forward(self, images_BVCHW: Tensor) -> Tensor:
        """Tokens float32[B * V, N, M]."""
        views = [self._view(view, images_BVCHW[:, view]) for view in range(images_BVCHW.shape[1])]
        return (torch.stack(views, 1) + self.position_embedding).flatten(0, 1)

    def _view(self, view: int, images_BCHW: Tensor) -> Tensor:
        """Tokens float32[B, N, M] of one view: its cells, then its summaries."""
        features = self.stacks[view](images_BCHW.contiguous(memory_format=torch.channels_last))
        cells_BNC = features.permute(0, 2, 3, 1).flatten(1, 2)
        tokens = self.cell_projections[view](cells_BNC)
        if not self.summaries:
            return tokens
        summaries = self.summaries[view](cells_BNC.flatten(1)).unflatten(1, (-1, tokens.shape[-1]))
        return torch.cat((tokens, summaries), 1)


class VisionAttention(nn.Module):
    """Bidirectional multi-head attention within one view."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B * V, N, M] -> the same shape."""
        queries, keys, values = (self._split(projection(x_BNM)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class VisionMLP(nn.Module):
    """Two linear layers around the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B * V, N, M] -> the same shape."""
        return self.fc2(F.gelu(self.fc1(x_BNM), approximate="tanh"))


class VisionLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.width, NORM_EPS)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.width, NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """float32[B * V, N, M] -> the same shape."""
        x_BNM = x_BNM + self.self_attn(self.layer_norm1(x_BNM))
        return x_BNM + self.mlp(self.layer_norm2(x_BNM))


class VisionTower(nn.Module):
    """Embeddings, transformer layers, final norm."""

    def __init__(self, config: VisionConfig, views: int) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(config) if config.stem == "patch" else ConvEmbeddings(config, views)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.depth))
        self.post_layernorm = nn.LayerNorm(config.width, NORM_EPS)

    def forward(self, images_BVCHW: Tensor) -> Tensor:
        """Tokens float32[B, V * N, M], view after view."""
        views = images_BVCHW.shape[1]
        x = self.embeddings(images_BVCHW)
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x).unflatten(0, (-1, views)).flatten(1, 2)


def _conv_stack(config: VisionConfig) -> nn.Sequential:
    modules: list[nn.Module] = []
    channels = 3
    for following in config.conv_channels:
        modules += [_he(nn.Conv2d(channels, following, 3, stride=2, padding=1)), nn.ReLU()]
        channels = following
    return nn.Sequential(*modules)


def _he(convolution: nn.Conv2d) -> nn.Conv2d:
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return convolution
