"""A policy whose actions are tokens: what it writes, how likely that was, and its supervised loss.

Shape legend: B batch;  C actions per chunk;  D = 7 real action dimensions;  P prefix positions;  R reasoning tokens;
              N action tokens;  T = R + N tokens of a record;  W tokens that are allowed at a position;  M model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.episode import ACTION_DIM, STATE_DIM, Observation
from vla_rl.policies.augment import random_shift
from vla_rl.policies.base import Batch, LossSums, PolicyOutput, PolicySpec, ScoredTransitions, TokenBatch
from vla_rl.policies.critic import Critic
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.module import PolicyModule, make_processor
from vla_rl.policies.processor import Processor, prompt_line
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import PromptTokenizer
from vla_rl.policies.tokens.action_tokens import ActionTokenizer, BinTokenizer, OpenVlaTokenizer
from vla_rl.policies.tokens.attention import SequenceLayout
from vla_rl.policies.tokens.backbone import make_backbone
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.decoding import CachedSequence, choose, read_whole, row_uniforms, token_log_prob
from vla_rl.policies.tokens.fast import FastTokenizer
from vla_rl.policies.tokens.loss import token_loss_sums
from vla_rl.policies.tokens.published import openvla_name, openvla_prompt, own_name
from vla_rl.policies.tokens.reasoning import ReasoningWriter, well_formed
from vla_rl.policies.tokens.vocabulary import Vocabulary
from vla_rl.policies.tokens.written import RolloutEngine, Written, after, write_with

_END = 0
"""The end mark among the action choices, where the number of tokens varies: `Vocabulary.end_act` lies before the action tokens."""


@dataclass(frozen=True)
class Reading:
    """Hidden states of a whole sequence, by segment; each predicts the token of its own place in `Written`."""

    prefix_BPM: Tensor
    text_BRM: Tensor
    actions_BNM: Tensor


class TokenPolicy(PolicyModule):
    """See `policies/base.py` for the contract. Everything random comes from `noise_seeds`, row by row."""

    config: TokenConfig

    def __init__(self, config: TokenConfig, spec: PolicySpec, processor: Processor, actions: ActionTokenizer) -> None:
        super().__init__(config, spec, processor)
        self.actions = actions
        self.vocabulary = _vocabulary(config, actions.size)
        self.model = make_backbone(config, self.vocabulary, len(spec.views), actions.length)
        self.critic = None if config.critic is None else Critic(config.critic, config.language.width, STATE_DIM)
        self.engine: RolloutEngine | None = None
        """Writes the tokens of rollouts in place of this process, where there is one; only in autoregressive decoding."""
        self._writer = ReasoningWriter(processor.tokenizer, config.reasoning_tokens, self.vocabulary) if config.reasoning_tokens else None
        self.freeze_unread()

    def preprocess(
        self,
        observations: Sequence[Observation],
        actions_BCA: np.ndarray | None = None,
        action_mask_BC: np.ndarray | None = None,
    ) -> Batch:
        """See `Policy.preprocess`; with actions, also the reasoning they stand for."""
        batch = super().preprocess(observations, actions_BCA, action_mask_BC)
        if actions_BCA is None or self._writer is None:
            return batch
        mask_BC = np.ones(actions_BCA.shape[:2], bool) if action_mask_BC is None else action_mask_BC
        text_BR, text_mask_BR = self._writer(actions_BCA, mask_BC)
        return replace(batch, reasoning_BR=text_BR.to(self.device), reasoning_mask_BR=text_mask_BR.to(self.device))

    @torch.no_grad()
    def act(self, batch: Batch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """See `Policy.act`: the likeliest tokens, or with `exploration` a sample at its temperatures."""
        if len(noise_seeds) != len(batch):
            raise ValueError(f"{len(noise_seeds)} noise seeds for a batch of {len(batch)} rows; give one per row")
        uniform_BT = None if exploration is None else row_uniforms(noise_seeds, self.text_length + self.actions.length, self.device)
        x_BPM, valid_BP = self.model.embed_prefix(batch, batch.images_BVCHW)
        if self.engine is not None:
            return self._act_with(self.engine, x_BPM, valid_BP, batch, noise_seeds, exploration)
        if self.config.decoding == "parallel" and self._writer is None:
            written, reading = self._write_at_once(x_BPM, valid_BP, uniform_BT, exploration)
        else:
            written, reading = self.write(x_BPM, valid_BP, uniform_BT, exploration), None
        output = PolicyOutput(self._decode(written))
        if exploration is None:
            return output
        if reading is None:
            reading = self.read(x_BPM, valid_BP, written)
        scored = self._score(reading, written, valid_BP, batch, exploration)
        return self._recorded(output, written, scored.log_prob_BC, scored.value_B)

    def log_prob(self, batch: Batch, record: TokenBatch, exploration: Exploration) -> ScoredTransitions:
        """See `Policy.log_prob`: one forward pass over prefix and recorded tokens."""
        length = self.text_length
        text_BR, actions_BN = record.tokens_BT[:, :length], record.tokens_BT[:, length:]
        written = Written(text_BR, record.mask_BT[:, :length], actions_BN, record.mask_BT[:, length:])
        x_BPM, valid_BP = self.model.embed_prefix(batch, batch.images_BVCHW)
        return self._score(self.read(x_BPM, valid_BP, written), written, valid_BP, batch, exploration)

    def value(self, batch: Batch) -> Tensor:
        """See `Policy.value`."""
        if self.critic is None:
            raise ValueError("value needs a policy with a critic; `policies/extend.py` adds one")
        return self._prefix_value(self.critic, *self.model.embed_prefix(batch, batch.images_BVCHW), batch)

    def sft_loss(self, batch: Batch, noise_seeds: Sequence[int]) -> LossSums:
        """Cross-entropy of the demonstrated tokens, as sums; see `token_loss_sums`.

        Training (`self.training`) shifts the images; evaluation does not. Raises ValueError without actions in the batch.
        """
        if batch.actions_BCA is None or batch.action_mask_BC is None:
            raise ValueError("sft_loss needs a batch with actions; give `preprocess` the actions")
        if len(noise_seeds) != len(batch):
            raise ValueError(
                f"{len(noise_seeds)} noise seeds for a batch of {len(batch)} rows; token policies denoise nothing: give one per row"
            )
        images = batch.images_BVCHW
        if self.training:
            images = random_shift(images, row_uniforms(noise_seeds, 2 * len(self.spec.views), self.device), self.config.shift_pixels)
        written = self._demonstrated(batch)
        x_BPM, valid_BP = self.model.embed_prefix(batch, images)
        reading = self.read(x_BPM, valid_BP, written)
        return token_loss_sums(
            self.text_logits(reading),
            self.action_logits(reading),
            written.text_BR,
            written.text_mask_BR,
            written.actions_BN,
            written.action_mask_BN,
            batch.action_mask_BC,
            batch.weight_B,
            self.config.reasoning_loss,
            self.actions.fixed_length,
        )

    def blocks(self) -> list[nn.Module]:
        """See `PolicyModule.blocks`."""
        return [*self.model.vision.layers, *self.model.language.model.layers]

    def backbone_prefixes(self) -> tuple[str, ...]:
        """A token policy has no expert beside its language model. Raises ConfigError."""
        raise ConfigError("engine.trainable is 'expert' and the policy is a token policy, which has no action expert; allowed: all, lora")

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """The network's."""
        yield from self.model.unread_parameters()

    def published_name(self, name: str) -> str:
        """See `PolicyModule.published_name`: OpenVLA's, for its network."""
        return name if self.config.prismatic is None else openvla_name(name)

    def own_name(self, name: str, others: frozenset[str]) -> str | None:
        """See `PolicyModule.own_name`."""
        return name if self.config.prismatic is None else own_name(name)

    def _demonstrated(self, batch: Batch) -> Written:
        """The tokens of demonstrated actions and of the reasoning they stand for."""
        assert batch.actions_BCA is not None
        tokens_BN, mask_BN = self.actions.encode(batch.actions_BCA[..., :ACTION_DIM])
        if not self.actions.fixed_length:
            tokens_BN, mask_BN = _closed(tokens_BN, mask_BN)
        if self._writer is None:
            return Written(tokens_BN.new_zeros(len(batch), 0), mask_BN.new_zeros(len(batch), 0), tokens_BN, mask_BN)
        if batch.reasoning_BR is None or batch.reasoning_mask_BR is None:
            raise ValueError("the policy reasons, and the batch has no reasoning; make it with this policy's `preprocess`")
        return Written(batch.reasoning_BR, batch.reasoning_mask_BR, tokens_BN, mask_BN)

    @property
    def text_length(self) -> int:
        """R of what is written: all of the reasoning, or only its end mark where it is skipped."""
        return 1 if self.config.skip_reasoning else self.config.reasoning_tokens

    def _layout(self, prefix: int, actions: int, text: int | None = None) -> SequenceLayout:
        length = self.text_length if text is None else text
        return SequenceLayout(
            prefix=prefix,
            reasoning=length + 1 if length else 0,
            actions=actions,
            bidirectional_prefix=self.config.prefix_attention == "bidirectional",
            parallel_actions=self.config.decoding == "parallel",
            unordered=self.model.unordered,
        )

    def read(self, x_BPM: Tensor, valid_BP: Tensor, written: Written) -> Reading:
        """One forward pass over the whole sequence, with the written tokens as inputs."""
        rows, prefix, text = len(x_BPM), x_BPM.shape[1], written.text_BR.shape[1]
        inputs, valid = [x_BPM], [valid_BP]
        if text:
            inputs.append(self.model.embed(after(self.vocabulary.think, written.text_BR)))
            valid.append(after(True, written.text_mask_BR))
        if self.config.decoding == "parallel":
            inputs.append(self.model.placeholders(rows))
            valid.append(valid_BP.new_ones(inputs[-1].shape[:2]))
        else:
            ids_BN = written.actions_BN[:, :-1] + self.action_choices.start
            inputs.append(self.model.embed(after(self.vocabulary.act, ids_BN)))
            valid.append(after(True, written.action_mask_BN[:, :-1]))
        layout = self._layout(prefix, inputs[-1].shape[1], text)
        hidden_BSM = read_whole(self.model.language, layout, torch.cat(inputs, 1), torch.cat(valid, 1))
        first = layout.length - layout.actions + self.model.action_offset
        return Reading(hidden_BSM[:, :prefix], hidden_BSM[:, prefix : prefix + text], hidden_BSM[:, first : first + self.actions.length])

    def _act_with(
        self,
        engine: RolloutEngine,
        x_BPM: Tensor,
        valid_BP: Tensor,
        batch: Batch,
        noise_seeds: Sequence[int],
        exploration: Exploration | None,
    ) -> PolicyOutput:
        """As `act`, with tokens and log-probabilities of another engine."""
        written, text_log_prob_BR, log_prob_BN = write_with(engine, self, x_BPM, valid_BP, noise_seeds, exploration)
        output = PolicyOutput(self._decode(written))
        if exploration is None:
            return output
        log_prob_BC = self._per_action(log_prob_BN, written.action_mask_BN)
        if self._counts_reasoning:
            log_prob_BC = log_prob_BC + _first_action(text_log_prob_BR.sum(1), log_prob_BC.shape[1])
        value_B = None if self.critic is None else self._prefix_value(self.critic, x_BPM, valid_BP, batch)
        return self._recorded(output, written, log_prob_BC, value_B)

    def _recorded(self, output: PolicyOutput, written: Written, log_prob_BC: Tensor, value_B: Tensor | None) -> PolicyOutput:
        """The output with what a learner needs."""
        return replace(
            output,
            tokens_BT=torch.cat((written.text_BR, written.actions_BN), 1),
            token_mask_BT=torch.cat((written.text_mask_BR, written.action_mask_BN), 1),
            well_formed_B=None if self._writer is None else well_formed(written.text_BR, written.text_mask_BR, self.vocabulary),
            log_prob_BC=log_prob_BC,
            value_B=value_B,
        )

    def _prefix_value(self, critic: Critic, x_BPM: Tensor, valid_BP: Tensor, batch: Batch) -> Tensor:
        """The critic's value float32[B] from the prefix alone, unless it sees what follows."""
        if self.model.unordered:
            return critic(self.read(x_BPM, valid_BP, self._unwritten(valid_BP)).prefix_BPM, valid_BP, batch.state_BS)
        layout = replace(self._layout(x_BPM.shape[1], 0), reasoning=0)
        return critic(read_whole(self.model.language, layout, x_BPM, valid_BP), valid_BP, batch.state_BS)

    def _write_at_once(
        self, x_BPM: Tensor, valid_BP: Tensor, uniform_BN: Tensor | None, exploration: Exploration | None
    ) -> tuple[Written, Reading]:
        """Parallel decoding without reasoning: placeholders need no tokens, so one forward pass both writes and scores."""
        blank = self._unwritten(valid_BP)
        reading = self.read(x_BPM, valid_BP, blank)
        tokens_BN = choose(self.action_logits(reading), 1.0 if exploration is None else exploration.temperature, uniform_BN)
        return replace(blank, actions_BN=tokens_BN), reading

    def _unwritten(self, valid_BP: Tensor) -> Written:
        """What parallel decoding without reasoning reads: placeholders, whatever the tokens."""
        nothing, mask_BN = valid_BP[:, :0], valid_BP.new_ones(len(valid_BP), self.actions.length)
        return Written(nothing.long(), nothing, mask_BN.long(), mask_BN)

    def write(self, x_BPM: Tensor, valid_BP: Tensor, uniform_BT: Tensor | None, exploration: Exploration | None) -> Written:
        """Token after token over cached keys and values; parallel actions at once after the reasoning."""
        vocabulary, length = self.vocabulary, self.text_length
        sequence = CachedSequence(self.model.language, self._layout(x_BPM.shape[1], self.actions.length))
        sequence.read(x_BPM, valid_BP)
        text_BR, text_mask_BR = self._write_reasoning(sequence, len(x_BPM), uniform_BT, exploration)
        temperature = 1.0 if exploration is None else exploration.temperature
        uniform_BN = None if uniform_BT is None else uniform_BT[:, length:]
        choices = self.action_choices
        if self.config.decoding == "parallel":
            mask_BN = valid_BP.new_ones(len(x_BPM), self.actions.length)
            hidden_BNM = sequence.read(self.model.placeholders(len(x_BPM)), mask_BN)
            actions_BN = choose(self.model.logits(hidden_BNM, choices.start, len(choices)), temperature, uniform_BN)
            return Written(text_BR, text_mask_BR, actions_BN, mask_BN)
        end = None if self.actions.fixed_length else vocabulary.end_act
        ids_BN, mask_BN = self._write_segment(
            sequence, len(x_BPM), vocabulary.act, self.actions.length, choices, end, temperature, uniform_BN
        )
        return Written(text_BR, text_mask_BR, torch.where(mask_BN, ids_BN - choices.start, 0), mask_BN)

    def _write_reasoning(
        self, sequence: CachedSequence, rows: int, uniform_BT: Tensor | None, exploration: Exploration | None
    ) -> tuple[Tensor, Tensor]:
        """int64[B, R] and bool[B, R], read by `sequence` to the last token; empty without reasoning."""
        vocabulary, length = self.vocabulary, self.text_length
        device = self.device
        if self.config.skip_reasoning:
            text_BR = torch.full((rows, 1), vocabulary.end_think, device=device)
            sequence.read(self.model.embed(after(vocabulary.think, text_BR)), torch.ones(rows, 2, dtype=torch.bool, device=device))
            return text_BR, torch.ones_like(text_BR, dtype=torch.bool)
        if not length:
            nothing = torch.zeros(rows, 0, dtype=torch.int64, device=device)
            return nothing, nothing.bool()
        text_BR, mask_BR = self._write_segment(
            sequence,
            rows,
            vocabulary.think,
            length,
            vocabulary.reasoning_choices,
            vocabulary.end_think,
            1.0 if exploration is None else exploration.reasoning_temperature,
            None if uniform_BT is None else uniform_BT[:, :length],
        )
        sequence.read(self.model.embed(text_BR[:, -1:]), mask_BR[:, -1:])
        return text_BR, mask_BR

    def _write_segment(
        self,
        sequence: CachedSequence,
        rows: int,
        opening: int,
        length: int,
        choices: range,
        end: int | None,
        temperature: float,
        uniform_BN: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`length` tokens of the vocabulary and which of them are real; the last one is not read. A row is over after its `end`."""
        device = self.device
        ids_B1 = torch.full((rows, 1), opening, device=device)
        valid_B1 = open_B1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        ids: list[Tensor] = []
        masks: list[Tensor] = []
        for index in range(length):
            hidden_B1M = sequence.read(self.model.embed(ids_B1), valid_B1)
            logits_B1W = self.model.logits(hidden_B1M, choices.start, len(choices))
            uniform_B1 = None if uniform_BN is None else uniform_BN[:, index : index + 1]
            chosen_B1 = choose(logits_B1W, temperature, uniform_B1) + choices.start
            ids_B1, valid_B1 = torch.where(open_B1, chosen_B1, 0), open_B1
            ids.append(ids_B1)
            masks.append(valid_B1)
            if end is not None:
                open_B1 = open_B1 & (chosen_B1 != end)
        return torch.cat(ids, 1), torch.cat(masks, 1)

    @property
    def _counts_reasoning(self) -> bool:
        """Whether the reasoning was chosen, and so is part of the chunk's likelihood."""
        return self._writer is not None and not self.config.skip_reasoning

    @property
    def action_choices(self) -> range:
        """What may stand at an action position: ids of the vocabulary."""
        return self.vocabulary.action_choices(self.actions.fixed_length)

    def text_logits(self, reading: Reading) -> Tensor:
        choices = self.vocabulary.reasoning_choices
        return self.model.logits(reading.text_BRM, choices.start, len(choices))

    def action_logits(self, reading: Reading) -> Tensor:
        return self.model.logits(reading.actions_BNM, self.action_choices.start, len(self.action_choices))

    def _score(self, reading: Reading, written: Written, valid_BP: Tensor, batch: Batch, exploration: Exploration) -> ScoredTransitions:
        """Log-probability and entropy per action, and the critic's value.

        Where tokens belong to no single action (reasoning, compressed actions) they count with the chunk's first action, which is
        executed whenever the chunk was.
        """
        if exploration.method != "tokens":
            raise ConfigError(
                f"exploration.method is {exploration.method!r} and the policy writes tokens; set exploration.method to 'tokens'"
            )
        logits_BNW = self.action_logits(reading)
        log_prob_BN, entropy_BN = token_log_prob(logits_BNW, written.actions_BN, exploration.temperature)
        log_prob_BC, entropy_BC = (self._per_action(value, written.action_mask_BN) for value in (log_prob_BN, entropy_BN))
        if self._counts_reasoning:
            text = token_log_prob(self.text_logits(reading), written.text_BR, exploration.reasoning_temperature)
            log_prob_BC, entropy_BC = (
                total + _first_action(torch.where(written.text_mask_BR, value, 0.0).sum(1), total.shape[1])
                for total, value in zip((log_prob_BC, entropy_BC), text)
            )
        value_B = None if self.critic is None else self.critic(reading.prefix_BPM, valid_BP, batch.state_BS)
        return ScoredTransitions(log_prob_BC, entropy_BC, log_prob_BC.new_zeros(len(batch), 0, *log_prob_BC.shape[1:], 0), value_B)

    def _per_action(self, value_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """float32[B, C] from a number per token: the sum of each action's own tokens, or all with the first action."""
        value_BN = torch.where(mask_BN, value_BN, 0.0)
        if self.actions.fixed_length:
            return value_BN.unflatten(1, (-1, ACTION_DIM)).sum(-1)
        return _first_action(value_BN.sum(1), self.config.chunk_length)

    def _decode(self, written: Written) -> Tensor:
        """float32[B, C, D] of the action tokens, the end mark left out."""
        if self.actions.fixed_length:
            return self.actions.decode(written.actions_BN, written.action_mask_BN)
        real_BN = written.action_mask_BN & (written.actions_BN != _END)
        return self.actions.decode((written.actions_BN - 1).clamp(min=0), real_BN)


def _closed(tokens_BN: Tensor, mask_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Action choices where their number varies: the end mark is choice 0 and follows the last real token. The last column must be free."""
    ends_B1 = mask_BN.sum(1, keepdim=True)
    closed_BN = torch.where(mask_BN, tokens_BN + 1, 0).scatter(1, ends_B1, _END)
    return closed_BN, mask_BN.scatter(1, ends_B1, True)


def _first_action(value_B: Tensor, chunk_length: int) -> Tensor:
    """float32[B, C]: the value at the first action, 0 elsewhere."""
    return nn.functional.pad(value_B[:, None], (0, chunk_length - 1))


def build_tokens(config: TokenConfig, statistics: Statistics, spec: PolicySpec, tokenizer: PromptTokenizer) -> TokenPolicy:
    """A randomly initialised policy. Raises ConfigError when the spec, the tokenizer and the config contradict each other."""
    write_prompt, crop = (prompt_line, 1.0) if config.prismatic is None else (openvla_prompt, config.prismatic.crop)
    processor = make_processor(config, spec, statistics, tokenizer, config.image_size, write_prompt, crop=crop)
    return TokenPolicy(config, spec, processor, _action_tokenizer(config, tokenizer.folder))


def _vocabulary(config: TokenConfig, actions: int) -> Vocabulary:
    """Action tokens after the text; OpenVLA's in place of its rarest words."""
    if config.prismatic is None:
        return Vocabulary(config.vocabulary, actions)
    spare = config.prismatic.spare_rows
    return Vocabulary(config.vocabulary - actions - spare, actions, marks=0, spare=spare)


def _action_tokenizer(config: TokenConfig, folder: Path) -> ActionTokenizer:
    """Bins need nothing; a trained tokenizer lies beside the prompts' one, and travels with the checkpoint."""
    if config.action_tokens.kind == "bins":
        return BinTokenizer(config.action_tokens.bins, config.chunk_length)
    if config.action_tokens.kind == "openvla":
        return OpenVlaTokenizer(config.action_tokens.bins, config.chunk_length)
    return FastTokenizer.load(folder, config.action_tokens, config.chunk_length)
