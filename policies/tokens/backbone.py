"""The networks of token policies: a vision tower, projections, and a causal language model of transformers.

Shape legend: B batch;  V views;  L prompt tokens;  P prefix positions (images, prompt, state);  M model width;
              T tokens read after the prefix;  N action positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vla_rl.episode import STATE_DIM
from vla_rl.policies.base import Batch
from vla_rl.policies.blocks.vision import VisionTower
from vla_rl.policies.tokens.config import LanguageConfig, PrismaticConfig, TokenConfig
from vla_rl.policies.tokens.fused_vision import FusedProjector, FusedTower
from vla_rl.policies.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel  # slow to import; every command imports this file

_POSITIONS = 8192
"""Longest sequence that transformers and vLLM prepare for."""
STOP_TOKEN = 2
"""Llama's end of text, which follows the actions in OpenVLA-OFT's sequence."""
_OUTPUT_STD = 0.1
"""Of a fresh language head, in units of the inverse root of the width: nearly uniform tokens."""


class Backbone(nn.Module, ABC):
    """What a token policy needs of a network: embeddings of what it sees, a language model, and scores of tokens."""

    vision: VisionTower | FusedTower
    language: PreTrainedModel
    action_offset = 0
    """Where a token is read: at its own placeholder (0), or one position before (-1)."""
    unordered = False
    """See `SequenceLayout.unordered`."""

    @abstractmethod
    def embed_prefix(self, batch: Batch, images_BVCHW: Tensor) -> tuple[Tensor, Tensor]:
        """float32[B, P, M] and bool[B, P]: what the policy sees, and which positions are real; the last one always is."""

    @abstractmethod
    def placeholders(self, rows: int) -> Tensor:
        """float32[B, T, M]: what follows the prefix in parallel decoding, the same for every row; N action positions come first."""

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """float32[B, T, M]: the language model's embeddings."""
        return self.language.get_input_embeddings()(tokens_BT)

    def logits(self, hidden_BTM: Tensor, first: int, size: int) -> Tensor:
        """float32[B, T, size]: scores of the vocabulary's rows from `first` on; the others are not computed."""
        head: nn.Linear = self.language.get_submodule("lm_head")  # pyright: ignore[reportAssignmentType]
        return (hidden_BTM @ head.weight[first : first + size].mT).float()

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """See `PolicyModule.unread_parameters`."""
        yield from ()


class TokenBackbone(Backbone):
    """Images, prompt and state by a vision tower of ours and linear maps; learned placeholders."""

    def __init__(self, config: TokenConfig, vocabulary: Vocabulary, views: int, placeholders: int) -> None:
        super().__init__()
        width = config.language.width
        self.vision = VisionTower(config.vision, views)
        self.projector = nn.Linear(config.vision.width, width)
        self.state_proj = nn.Linear(STATE_DIM, width)
        self.language = build_language(config.language, vocabulary)
        self.placeholder_NM = nn.Parameter(torch.randn(placeholders, width)) if placeholders else None

    def embed_prefix(self, batch: Batch, images_BVCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Images, prompt (padded in its middle), state."""
        images = self.projector(self.vision(images_BVCHW))
        state = self.state_proj(batch.state_BS)[:, None]
        x_BPM = torch.cat((images, self.embed(batch.tokens_BL).to(images.dtype), state), 1)
        seen = batch.token_mask_BL.new_ones(len(batch), 1)
        return x_BPM, torch.cat((seen.expand(-1, images.shape[1]), batch.token_mask_BL, seen), 1)

    def placeholders(self, rows: int) -> Tensor:
        """Learned."""
        assert self.placeholder_NM is not None, "made for parallel decoding"
        return self.placeholder_NM.expand(rows, -1, -1)


class PrismaticBackbone(Backbone):
    """OpenVLA-OFT's sequence: start token, images, prompt, zeros at the action positions, stop token. It sees no state.

    Numbers are read where OpenVLA's training put them: token n at the position before it, as a language model predicts.
    Padding lies before the prompt's last token, where nobody sees it, so that the last position is the prompt's in every row.
    """

    vision: FusedTower  # pyright: ignore[reportIncompatibleVariableOverride] -- set once
    action_offset = -1
    unordered = True

    def __init__(self, config: TokenConfig, prismatic: PrismaticConfig, vocabulary: Vocabulary, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.vision = FusedTower(prismatic)
        self.projector = FusedProjector(self.vision.width, config.language.width)
        self.language = build_language(config.language, vocabulary)

    def embed_prefix(self, batch: Batch, images_BVCHW: Tensor) -> tuple[Tensor, Tensor]:
        """The first token, images, the prompt but its last token (padded), its last token."""
        images = self.projector(self.vision(images_BVCHW))
        last_B1 = batch.token_mask_BL.sum(1, keepdim=True) - 1
        words = self.embed(torch.cat((batch.tokens_BL, batch.tokens_BL.gather(1, last_B1)), 1)).to(images.dtype)
        x_BPM = torch.cat((words[:, :1], images, words[:, 1:]), 1)
        seen = batch.token_mask_BL.new_ones(len(batch), 1)
        middle = batch.token_mask_BL.scatter(1, last_B1, False)[:, 1:]
        return x_BPM, torch.cat((seen, seen.expand(-1, images.shape[1]), middle, seen), 1)

    def placeholders(self, rows: int) -> Tensor:
        """Zeros, and the stop token."""
        stop_1M = self.embed(torch.tensor([STOP_TOKEN], device=self.projector.fc1.weight.device))
        return torch.cat((stop_1M.new_zeros(self.actions, stop_1M.shape[1]), stop_1M)).expand(rows, -1, -1)

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """What of the vision transformers lies behind the layer that is read."""
        yield from self.vision.unread_parameters()


def make_backbone(config: TokenConfig, vocabulary: Vocabulary, views: int, actions: int) -> Backbone:
    """The network of a config, whose chunks have at most `actions` tokens."""
    if config.prismatic is not None:
        return PrismaticBackbone(config, config.prismatic, vocabulary, actions)
    return TokenBackbone(config, vocabulary, views, actions if config.decoding == "parallel" else 0)


def build_language(config: LanguageConfig, vocabulary: Vocabulary) -> PreTrainedModel:
    """A randomly initialised causal language model; embeddings and head are not tied."""
    small = torch.get_default_device().type == "meta"
    with torch.device("cpu"):  # constants that no checkpoint holds must exist also where a policy is built on the meta device
        sizes = (replace(config, mlp_width=1), Vocabulary(1, 1)) if small else (config, vocabulary)  # and cost no embeddings there
        constants = dict(_build(*sizes, layers=1).named_buffers())
    model = _build(config, vocabulary, config.depth)
    for name, buffer in list(model.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        assert buffer.shape == constants[name].shape
        model.get_submodule(owner).register_buffer(attribute, constants[name], persistent=False)
    _initialize(model, config)
    return model


def language_config(config: LanguageConfig, vocabulary: Vocabulary, layers: int) -> PreTrainedConfig:
    """transformers' config of the language model; with it and the weights any engine can run the model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        config.architecture,
        vocab_size=vocabulary.size,
        hidden_size=config.width,
        num_hidden_layers=layers,
        intermediate_size=config.mlp_width,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=vocabulary.end_act if vocabulary.marks else None,
        attn_implementation="sdpa",
        dtype="float32",
    )


def _build(config: LanguageConfig, vocabulary: Vocabulary, layers: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(language_config(config, vocabulary, layers))


def _initialize(model: PreTrainedModel, config: LanguageConfig) -> None:
    """Unit-variance maps and embeddings, residual branches shrunk by the number of layers (GPT-2), a head that starts nearly uniform.

    transformers' own 0.02 is made for widths of thousands: in a narrow model the tokens would drown beside the images.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shrink = (2 * config.depth) ** -0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
            shrink = _OUTPUT_STD if name.endswith("lm_head") else shrink
            nn.init.normal_(module.weight, std=shrink * module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0 / getattr(module, "scalar_embed_scale", 1.0))
