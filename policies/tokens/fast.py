"""FAST: a chunk of actions as few tokens (Pertsch et al. 2025, "FAST: Efficient Action Tokenization").

    actions -> cosine transform over time -> times `scale`, rounded -> one symbol per coefficient, low frequencies first
            -> byte-pair encoding, learned from demonstrations

The last two steps lose nothing. What is lost is the rounding, and coefficients beyond `largest_coefficient`.

Shape legend: B batch;  C actions per chunk (and frequencies);  D = 7 real action dimensions;  N tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from vla_rl.episode import ACTION_DIM
from vla_rl.policies.tokenizer import TokenizerError, read_tokenizer
from vla_rl.policies.tokens.config import ActionTokensConfig

ACTION_TOKENIZER_FILE = "action_tokenizer.json"
_FIRST_SYMBOL = 0x4E00
"""Code point of the smallest coefficient: a block of 20,000 letters that nothing splits or normalises."""


class FastTokenizer:
    """See the module's docstring, and `ActionTokenizer` for the contract."""

    fixed_length = False

    def __init__(self, pairs: Tokenizer, config: ActionTokensConfig, chunk_length: int) -> None:
        """`pairs` is the byte-pair encoding over the symbols. Raises TokenizerError where it has more tokens than the config."""
        if pairs.get_vocab_size() > config.vocabulary:
            raise TokenizerError(
                f"the action tokenizer has {pairs.get_vocab_size()} tokens and action_tokens.vocabulary is {config.vocabulary}; raise it"
            )
        self.pairs, self.config, self.chunk_length = pairs, config, chunk_length
        self.size, self.length = config.vocabulary, config.longest
        self._cosines_CC = cosine_matrix(chunk_length)

    @classmethod
    def load(cls, folder: Path, config: ActionTokensConfig, chunk_length: int) -> FastTokenizer:
        """The tokenizer in a folder. Raises TokenizerError where there is none, and for one whose alphabet lacks coefficients."""
        path = folder / ACTION_TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist, and action_tokens.kind is 'fast'; `vla-rl sft` trains one on its demonstrations and keeps it in "
                "RUN_DIR/tokenizer and in every checkpoint: name such a folder in policy.tokenizer"
            )
        pairs = read_tokenizer(path)
        known = [pairs.token_to_id(symbol) is not None for symbol in _alphabet(config)]
        if not all(known):  # the encoding would leave the others out, without a word
            raise TokenizerError(
                f"{path} was trained with other coefficients: it knows {sum(known)} of {len(known)} that "
                f"action_tokens.largest_coefficient {config.largest_coefficient} has; set it to the value that it was trained with"
            )
        return cls(pairs, config, chunk_length)

    def coefficients(self, actions_BCD: Tensor) -> Tensor:
        """int64[B, C, D]: rounded cosine coefficients, lowest frequency first."""
        spectrum_BCD = self._cosines_CC.to(actions_BCD.device) @ actions_BCD.double()
        largest = self.config.largest_coefficient
        return (spectrum_BCD * self.config.scale).round().clamp(-largest, largest).long()

    def actions(self, coefficients_BCD: Tensor) -> Tensor:
        """float32[B, C, D]: the inverse transform of coefficients."""
        return (self._cosines_CC.to(coefficients_BCD.device).mT @ coefficients_BCD.double() / self.config.scale).float()

    def encode(self, actions_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """See `ActionTokenizer.encode`. Raises TokenizerError for a chunk that needs more than `longest` - 1 tokens."""
        rows = [self.pairs.encode(_text(row, self.config)).ids for row in self.coefficients(actions_BCD).cpu()]
        longest = max(len(row) for row in rows)
        if longest >= self.length:
            raise TokenizerError(
                f"a chunk needs {longest} action tokens and its end, and action_tokens.longest is {self.length}; raise it to at least "
                f"{longest + 1}, lower action_tokens.scale, or train the tokenizer with a larger vocabulary"
            )
        tokens_BN = torch.zeros(len(rows), self.length, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens_BN[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask_BN = torch.arange(self.length) < torch.tensor([len(row) for row in rows])[:, None]
        return tokens_BN.to(actions_BCD.device), mask_BN.to(actions_BCD.device)

    def decode(self, tokens_BN: Tensor, mask_BN: Tensor) -> Tensor:
        """See `ActionTokenizer.decode`. Missing coefficients are 0 and surplus ones are left out: a policy may write anything."""
        rows = [self._symbols(row[mask].tolist()) for row, mask in zip(tokens_BN.cpu(), mask_BN.cpu())]
        return self.actions(torch.stack([torch.tensor(row).unflatten(0, (-1, ACTION_DIM)) for row in rows])).to(tokens_BN.device)

    def _symbols(self, tokens: list[int]) -> list[int]:
        """C * D coefficients that the tokens spell, cut or filled up with zeros."""
        text = "".join(self.pairs.id_to_token(token) or "" for token in tokens)
        numbers = [ord(symbol) - _FIRST_SYMBOL - self.config.largest_coefficient for symbol in text]
        wanted = self.chunk_length * ACTION_DIM
        return (numbers + [0] * wanted)[:wanted]


def train_fast(chunks: Iterable[Tensor], config: ActionTokensConfig, chunk_length: int) -> FastTokenizer:
    """Learn the byte-pair encoding from chunks float32[B, C, D] of normalised actions; the same chunks give the same tokenizer."""
    untrained = FastTokenizer(Tokenizer(BPE()), config, chunk_length)
    trainer = BpeTrainer(
        vocab_size=config.vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=_alphabet(config),
    )
    pairs = Tokenizer(BPE())
    pairs.train_from_iterator(_texts(untrained, chunks), trainer)
    return FastTokenizer(pairs, config, chunk_length)


def cosine_matrix(length: int) -> Tensor:
    """float64[C, C]: the orthonormal type-II discrete cosine transform; row k is frequency k, its transpose is the inverse.

    M[k, n] = sqrt(2 / C) cos(pi (n + 1/2) k / C), row 0 divided by sqrt(2) (Ahmed, Natarajan and Rao 1974).
    """
    frequency_C1 = torch.arange(length, dtype=torch.float64)[:, None]
    time_C = torch.arange(length, dtype=torch.float64) + 0.5
    matrix_CC = math.sqrt(2.0 / length) * torch.cos(math.pi * frequency_C1 * time_C / length)
    matrix_CC[0] /= math.sqrt(2.0)
    return matrix_CC


def _alphabet(config: ActionTokensConfig) -> list[str]:
    """One symbol per coefficient, smallest first."""
    return [chr(_FIRST_SYMBOL + index) for index in range(2 * config.largest_coefficient + 1)]


def _texts(tokenizer: FastTokenizer, chunks: Iterable[Tensor]) -> Iterator[str]:
    for actions_BCD in chunks:
        for row in tokenizer.coefficients(actions_BCD):
            yield _text(row, tokenizer.config)


def _text(coefficients_CD: Tensor, config: ActionTokensConfig) -> str:
    """One symbol per coefficient, all dimensions of the lowest frequency first."""
    return "".join(chr(_FIRST_SYMBOL + config.largest_coefficient + number) for number in coefficients_CD.flatten().tolist())
