"""The shipped tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from vla_rl.policies.build_tokenizer import build, libero_prompts, save
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.processor import prompt_with_state
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE, PromptTokenizer, TokenizerError


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(SHIPPED_TOKENIZER, 64)


def test_every_libero_prompt_fits_the_presets_and_is_whole_words(tokenizer: PromptTokenizer) -> None:
    prompts = libero_prompts()
    assert len(prompts) >= 130
    length = PI0_PRESETS["tiny"].prompt_tokens
    counts = tokenizer([f"{prompt}\n" for prompt in prompts])[1].sum(1)
    assert counts.max() <= length
    words = [len(re.findall(r"\w+|[^\w\s]", prompt)) for prompt in prompts]
    assert counts.tolist() == [count + 2 for count in words], "one token for each word, <bos> and the newline"
    assert tokenizer.size <= PI0_PRESETS["tiny"].vocabulary


def test_prompts_with_state_fit_and_each_bin_is_one_token(tokenizer: PromptTokenizer) -> None:
    longest = max(libero_prompts(), key=len)
    text = prompt_with_state(longest, np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 0.99, 1.0, 2.0]))
    tokens = PromptTokenizer(SHIPPED_TOKENIZER, PI0_PRESETS["tiny_pi05"].prompt_tokens)([text])[1]
    assert tokens.sum() > 8
    lengths = {len(tokenizer.tokenizer.encode(f"state {number}").ids) for number in range(256)}
    assert lengths == {3}


@pytest.mark.parametrize("text", ["Zwölf xylophones\n", "箱を開ける", "🤖 7/3", ""])
def test_unseen_text_is_kept_byte_for_byte(tokenizer: PromptTokenizer, text: str) -> None:
    ids = tokenizer.tokenizer.encode(text).ids
    assert tokenizer.tokenizer.decode(ids).strip() == text.lower().strip()


def test_padding_mask_and_begin_token(tokenizer: PromptTokenizer) -> None:
    tokens, mask = tokenizer(["pick up the milk\n", "open the drawer and close it\n"])
    assert tokens.shape == mask.shape == (2, 64)
    assert tokens[:, 0].tolist() == [2, 2]
    assert (tokens[~mask] == 0).all()
    assert (mask.int().diff(dim=1) <= 0).all(), "real tokens come first"


def test_transformers_reads_the_same_tokens_offline(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = AutoTokenizer.from_pretrained(str(SHIPPED_TOKENIZER))
    for prompt in ["pick up the milk\n", "Zwölf 17 xylophones"]:
        tokens, mask = tokenizer([prompt])
        encoded = theirs(prompt, padding="max_length", max_length=64)
        assert tokens[0].tolist() == encoded["input_ids"]
        assert mask[0].int().tolist() == encoded["attention_mask"]


def test_building_again_gives_the_shipped_file(tmp_path: Path) -> None:
    save(build(libero_prompts(), 1024), tmp_path)
    assert (tmp_path / TOKENIZER_FILE).read_bytes() == (SHIPPED_TOKENIZER / TOKENIZER_FILE).read_bytes()


def test_a_prompt_that_is_too_long_is_refused_not_cut() -> None:
    with pytest.raises(TokenizerError, match=r"needs 7 tokens and there are prompt_tokens=4.*'pick up the milk and\\n'"):
        PromptTokenizer(SHIPPED_TOKENIZER, 4)(["pick up the milk and\n"])


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=TOKENIZER_FILE):
        PromptTokenizer(tmp_path, 4)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}'])
def test_a_damaged_tokenizer_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER_FILE).write_text(text)
    with pytest.raises(TokenizerError, match=rf"{TOKENIZER_FILE} is no tokenizer .*damaged or truncated"):
        PromptTokenizer(tmp_path, length=8)
