"""Prompt tokenization. The shipped tokenizer needs no network and no published weights; any `tokenizer.json` works.

Shape legend: B prompts; L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.errors import UserError

SHIPPED_TOKENIZER = Path(__file__).parent / "libero_tokenizer"
"""Byte-level BPE trained on the instructions of LIBERO and LIBERO-PRO, see `build_tokenizer.py`."""
TOKENIZER_FILE = "tokenizer.json"


class TokenizerError(UserError):
    """A tokenizer that cannot be read, or a prompt that does not fit."""


def read_tokenizer(path: Path) -> Tokenizer:
    """A file of the `tokenizers` library. Raises TokenizerError for one that it cannot read."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{path} is no tokenizer ({error}); the file is damaged or truncated, restore it") from error


class PromptTokenizer:
    """Turns prompts into padded token rows; remembers the prompts it has seen, because tasks repeat them."""

    def __init__(self, folder: str | Path, length: int, setting: str = "prompt_tokens", kept: int = 0) -> None:
        """`folder` holds `tokenizer.json`; every row gets `length` tokens. Raises TokenizerError.

        Errors name `setting`, the field of a config that says `length`, together with `kept` more tokens that the caller needs itself.
        """
        self.folder, self.length = Path(folder), length
        self._setting, self._text, self._kept = setting, setting.removesuffix("_tokens"), kept
        path = self.folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist; a tokenizer folder holds {TOKENIZER_FILE}")
        self.tokenizer = read_tokenizer(path)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self._rows: dict[str, list[int]] = {}

    @property
    def size(self) -> int:
        """Number of token ids; the embedding needs at least as many rows."""
        return self.tokenizer.get_vocab_size()

    def __call__(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """int64[B, L] token ids padded on the right with 0, and bool[B, L] marking real tokens."""
        rows = [self._row(prompt) for prompt in prompts]
        tokens = np.zeros((len(rows), self.length), np.int64)
        mask = np.zeros((len(rows), self.length), bool)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
            mask[index, : len(row)] = True
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def _row(self, prompt: str) -> list[int]:
        if prompt not in self._rows:
            row = self.tokenizer.encode(prompt).ids
            if len(row) > self.length:
                needed, given = len(row) + self._kept, self.length + self._kept
                raise TokenizerError(
                    f"the {self._text} needs {needed} tokens and there are {self._setting}={given}; raise {self._setting} to at least "
                    f"{needed}, or shorten the {self._text}: {prompt!r}"
                )
            if len(self._rows) >= _REMEMBERED:
                self._rows.clear()
            self._rows[prompt] = row
        return self._rows[prompt]


_REMEMBERED = 10_000
"""Prompts with a discretised state (pi0.5) hardly repeat; the memory of them stays bounded."""
