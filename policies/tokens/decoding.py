"""Reading and writing tokens: the cached sequence of rollouts, the choice of a token, and the density of a choice.

Shape legend: B batch;  S positions of the whole sequence;  T positions read or written now;  M model width;
              N tokens;  W different tokens that are allowed at a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vla_rl.policies.tokens.attention import SequenceLayout, positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CachedSequence:
    """What was read so far, as keys and values; each position goes through the layers once."""

    def __init__(self, language: PreTrainedModel, layout: SequenceLayout) -> None:
        from transformers import DynamicCache

        self._language, self._layout = language, layout
        self._cache = DynamicCache(config=language.config)
        self.valid_BS: Tensor | None = None
        """bool[B, S so far]: real positions."""

    def read(self, x_BTM: Tensor, valid_BT: Tensor) -> Tensor:
        """Hidden states float32[B, T, M] of the next positions of the layout; padding is read, and seen by nobody."""
        known = 0 if self.valid_BS is None else self.valid_BS.shape[1]
        self.valid_BS = valid_BT if self.valid_BS is None else torch.cat((self.valid_BS, valid_BT), 1)
        output = self._language.model(
            inputs_embeds=x_BTM,
            attention_mask=self._layout.mask(self.valid_BS, slice(known, known + x_BTM.shape[1])),
            position_ids=positions(self.valid_BS)[:, known:],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state


def read_whole(language: PreTrainedModel, layout: SequenceLayout, x_BSM: Tensor, valid_BS: Tensor) -> Tensor:
    """Hidden states float32[B, S, M] of a whole sequence in one forward pass, as training needs them."""
    output = language.model(
        inputs_embeds=x_BSM,
        attention_mask=layout.mask(valid_BS, slice(0, layout.length)),
        position_ids=positions(valid_BS),
        use_cache=False,
    )
    return output.last_hidden_state


def row_uniforms(seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """float32[B, count] in [0, 1): each row from its own seed, whatever the batch and the device."""
    uniform = torch.empty(len(seeds), count)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        generator.manual_seed(int(seed))
        torch.rand(count, generator=generator, out=uniform[row])
    return uniform.to(device)


def choose(logits_BNW: Tensor, temperature: float, uniform_BN: Tensor | None) -> Tensor:
    """int64[B, N]: the likeliest token, or with `uniform_BN` in [0, 1) a sample of softmax(logits / temperature).

    Sampling inverts the distribution function: one number per token decides, so a row's tokens depend on its own numbers alone.
    """
    if uniform_BN is None:
        return logits_BNW.argmax(-1)
    cumulative = (logits_BNW.double() / temperature).softmax(-1).cumsum(-1)
    below = cumulative <= uniform_BN.double()[..., None] * cumulative[..., -1:]
    return below.sum(-1).clamp(max=logits_BNW.shape[-1] - 1)


def token_log_prob(logits_BNW: Tensor, tokens_BN: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) float32[B, N] of tokens under softmax(logits / temperature)."""
    log_prob_BNW = (logits_BNW / temperature).log_softmax(-1)
    entropy_BN = -(log_prob_BNW.exp() * log_prob_BNW).sum(-1)
    return log_prob_BNW.gather(-1, tokens_BN[..., None])[..., 0], entropy_BN
