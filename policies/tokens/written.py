"""What a token policy wrote after a prefix, and writing it with another engine.

Shape legend: B batch;  P prefix positions;  M model width;  R reasoning tokens;  N action tokens;  S positions of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.tokens.action_tokens import ActionTokenizer
from vla_rl.policies.tokens.backbone import Backbone
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.vllm_engine import Completion
from vla_rl.policies.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ACTION_STREAM = 0x1E3779B97F4A7C15
"""Separates the seeds of the actions from those of the reasoning."""


@dataclass(frozen=True)
class Written:
    """What was written after a prefix. Reasoning is in the vocabulary's ids; action tokens count from 0."""

    text_BR: Tensor
    """int64[B, R]; R is 0 without reasoning."""
    text_mask_BR: Tensor
    """bool[B, R]: real tokens, the end mark included."""
    actions_BN: Tensor
    """int64[B, N], relative to the first action choice."""
    action_mask_BN: Tensor
    """bool[B, N]: real tokens, the end mark included."""


class RolloutEngine(Protocol):
    """What writes tokens in a policy's place: `VllmEngine`, `SglangEngine`."""

    version: int
    """Of the weights it answers with; -1 before the first."""
    starts: int
    """Processes or servers that it has had."""

    def load(self, language: PreTrainedModel, version: int) -> None:
        """Take over the weights of `version`. Raises ValueError unless it is newer than the last."""
        ...

    def write(
        self, prompts: Sequence[Tensor], choices: range, end: int | None, length: int, temperature: float | None, seeds: Sequence[int]
    ) -> Completion:
        """Continue prompts float32[S, M] by `length` tokens of `choices`, or until `end`; without a temperature the likeliest ones."""
        ...

    def close(self) -> None:
        """Give back what it holds; nothing is written after."""
        ...


class Writer(Protocol):
    """What is needed of a token policy to write in its place."""

    config: TokenConfig
    vocabulary: Vocabulary
    actions: ActionTokenizer
    model: Backbone

    @property
    def text_length(self) -> int:
        """R: most tokens of the reasoning, its end included."""
        ...

    @property
    def action_choices(self) -> range:
        """What may stand at an action position."""
        ...


def write_with(
    engine: RolloutEngine,
    policy: Writer,
    x_BPM: Tensor,
    valid_BP: Tensor,
    noise_seeds: Sequence[int],
    exploration: Exploration | None,
) -> tuple[Written, Tensor, Tensor]:
    """What `engine` writes after the prefixes, and the log-probabilities float32[B, R] and float32[B, N] it wrote with.

    The prompts are the prefixes without their padding, which takes no position.
    """
    vocabulary, embed = policy.vocabulary, policy.model.embed
    prompts = [x_PM[valid_P] for x_PM, valid_P in zip(x_BPM, valid_BP)]
    rows, length = len(prompts), policy.text_length
    text_BR = torch.full((rows, length), vocabulary.end_think, device=x_BPM.device)
    text_mask_BR, text_log_prob_BR = torch.ones_like(text_BR, dtype=torch.bool), torch.zeros(rows, length, device=x_BPM.device)
    if length:
        prompts = _continued(prompts, embed(text_BR.new_full((rows, 1), vocabulary.think)), text_mask_BR[:, :1])
        if not policy.config.skip_reasoning:
            temperature = None if exploration is None else exploration.reasoning_temperature
            text = engine.write(prompts, vocabulary.reasoning_choices, vocabulary.end_think, length, temperature, noise_seeds)
            text_BR, text_mask_BR, text_log_prob_BR = (t.to(x_BPM.device) for t in (text.ids_BN, text.mask_BN, text.log_prob_BN))
        prompts = _continued(prompts, embed(text_BR), text_mask_BR)
    opening = torch.full((rows, 1), vocabulary.act, device=x_BPM.device)
    prompts = _continued(prompts, embed(opening), torch.ones_like(opening, dtype=torch.bool))
    choices = policy.action_choices
    end = None if policy.actions.fixed_length else vocabulary.end_act
    temperature = None if exploration is None else exploration.temperature
    seeds = [int(seed) + _ACTION_STREAM for seed in noise_seeds]
    actions = engine.write(prompts, choices, end, policy.actions.length, temperature, seeds)
    ids_BN, mask_BN, log_prob_BN = (t.to(x_BPM.device) for t in (actions.ids_BN, actions.mask_BN, actions.log_prob_BN))
    written = Written(text_BR, text_mask_BR, torch.where(mask_BN, ids_BN - choices.start, 0), mask_BN)
    return written, text_log_prob_BR, log_prob_BN


def after(first: int | bool, tokens_BT: Tensor) -> Tensor:
    """[B, 1 + T]: a column of `first` before the tokens."""
    return torch.cat((tokens_BT.new_full((len(tokens_BT), 1), first), tokens_BT), 1)


def _continued(prompts: Sequence[Tensor], x_BTM: Tensor, mask_BT: Tensor) -> list[Tensor]:
    """Each prompt with its row's real embeddings behind it."""
    return [torch.cat((prompt, x_TM[mask_T])) for prompt, x_TM, mask_T in zip(prompts, x_BTM, mask_BT)]
