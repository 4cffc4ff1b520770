"""Actions as tokens: bins and FAST, there and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dct

from vla_rl.config import ConfigError
from vla_rl.episode import ACTION_DIM
from vla_rl.policies.tokenizer import TokenizerError
from vla_rl.policies.tokens.action_tokens import BinTokenizer
from vla_rl.policies.tokens.config import ActionTokensConfig
from vla_rl.policies.tokens.fast import ACTION_TOKENIZER_FILE, FastTokenizer, cosine_matrix, train_fast

CHUNK = 4
FAST = ActionTokensConfig(kind="fast", scale=10.0, largest_coefficient=25, vocabulary=96, longest=30)


def smooth_chunks(count: int, seed: int = 0) -> torch.Tensor:
    """float32[count, C, D] in [-1, 1]: constant motions with a little noise, as demonstrations have them."""
    generator = np.random.default_rng(seed)
    motion = generator.choice([-1.0, 0.0, 0.5, 1.0], size=(count, 1, ACTION_DIM))
    chunks = motion + 0.05 * generator.normal(size=(count, CHUNK, ACTION_DIM))
    return torch.from_numpy(np.clip(chunks, -1, 1)).float()


@pytest.fixture(scope="module")
def fast() -> FastTokenizer:
    return train_fast([smooth_chunks(300)], FAST, CHUNK)


@pytest.mark.parametrize("bins", [2, 3, 7, 255, 256, 1000])
def test_every_bin_comes_back_as_itself(bins: int) -> None:
    tokenizer = BinTokenizer(bins, chunk_length=1)
    tokens_BN = torch.arange(bins)[:, None].expand(-1, ACTION_DIM)
    actions_BCD = tokenizer.decode(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))
    assert torch.equal(tokenizer.encode(actions_BCD)[0], tokens_BN)
    step = 2 / bins
    assert float(actions_BCD.min()) == pytest.approx(-1 + step / 2) and float(actions_BCD.max()) == pytest.approx(1 - step / 2)


@given(st.lists(st.floats(-1, 1, width=32), min_size=ACTION_DIM, max_size=ACTION_DIM), st.sampled_from([2, 16, 255, 256]))
def test_an_action_comes_back_within_half_a_bin(values: list[float], bins: int) -> None:
    tokenizer = BinTokenizer(bins, chunk_length=1)
    actions_BCD = torch.tensor(values)[None, None]
    tokens_BN, mask_BN = tokenizer.encode(actions_BCD)
    assert mask_BN.all() and int(tokens_BN.min()) >= 0 and int(tokens_BN.max()) < bins
    gap = (tokenizer.decode(tokens_BN, mask_BN).double() - actions_BCD.double()).abs().max()
    assert float(gap) <= 1 / bins + 1e-7, "half a bin, and float32's rounding of its middle"


def test_the_edges_of_the_range_and_what_lies_beyond() -> None:
    tokenizer = BinTokenizer(4, chunk_length=1)
    row = torch.tensor([[[-1.0, 1.0, -7.0, 9.0, 0.0, -0.5, 0.49999]]])
    assert tokenizer.encode(row)[0].tolist() == [[0, 3, 0, 3, 2, 1, 2]]


def test_tokens_of_an_action_lie_together() -> None:
    tokenizer = BinTokenizer(4, chunk_length=2)
    first, second = torch.full((ACTION_DIM,), -0.9), torch.full((ACTION_DIM,), 0.9)
    assert tokenizer.encode(torch.stack((first, second))[None])[0].tolist() == [[0] * ACTION_DIM + [3] * ACTION_DIM]


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_cosine_transform_is_scipys(length: int) -> None:
    values = np.random.default_rng(0).normal(size=(length, ACTION_DIM))
    ours = cosine_matrix(length).numpy() @ values
    np.testing.assert_allclose(ours, dct(values, axis=0, norm="ortho"), atol=1e-12)
    np.testing.assert_allclose(cosine_matrix(length).numpy().T @ ours, values, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_fast_tokens_spell_exactly_the_rounded_coefficients(fast: FastTokenizer, seed: int) -> None:
    actions_BCD = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (3, CHUNK, ACTION_DIM))).float()
    tokens_BN, mask_BN = fast.encode(actions_BCD)
    coefficients = fast.coefficients(actions_BCD)
    assert torch.equal(fast.decode(tokens_BN, mask_BN), fast.actions(coefficients))
    # Rounding moves a coefficient by at most half a step, so a dimension by at most that times the root of C (none is clipped here).
    worst = (fast.actions(coefficients) - actions_BCD).norm(dim=1).max()
    assert float(worst) <= 0.5 / FAST.scale * CHUNK**0.5 + 1e-6


def test_fast_compresses_what_it_was_trained_on(fast: FastTokenizer) -> None:
    _, mask_BN = fast.encode(smooth_chunks(50, seed=1))
    assert float(mask_BN.sum(1).double().mean()) < 0.6 * CHUNK * ACTION_DIM


def test_training_again_gives_the_same_tokenizer(fast: FastTokenizer) -> None:
    chunks = smooth_chunks(300)
    again = train_fast([chunks[:100], chunks[100:]], FAST, CHUNK)
    assert again.pairs.to_str() == fast.pairs.to_str()
    assert again.pairs.get_vocab_size() <= FAST.vocabulary


def test_whatever_a_policy_writes_is_a_chunk(fast: FastTokenizer) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_BN = torch.randint(FAST.vocabulary, (20, FAST.longest), generator=generator)
    mask_BN = torch.arange(FAST.longest) < torch.arange(20)[:, None]
    actions_BCD = fast.decode(tokens_BN, mask_BN)
    assert actions_BCD.shape == (20, CHUNK, ACTION_DIM) and actions_BCD.isfinite().all()
    assert float(actions_BCD[0].abs().max()) == 0.0, "nothing written: all coefficients are 0"


def test_fast_lies_beside_the_prompts_tokenizer(fast: FastTokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="vla-rl sft` trains one on its demonstrations"):
        FastTokenizer.load(tmp_path, FAST, CHUNK)
    fast.pairs.save(str(tmp_path / ACTION_TOKENIZER_FILE))
    chunks = smooth_chunks(5, seed=2)
    for ours, theirs in zip(fast.encode(chunks), FastTokenizer.load(tmp_path, FAST, CHUNK).encode(chunks)):
        assert torch.equal(ours, theirs)


def test_a_tokenizer_of_other_coefficients_is_refused(fast: FastTokenizer, tmp_path: Path) -> None:
    """Symbols that a byte-pair encoding does not know vanish: chunks were encoded as fewer tokens, or none, without a word."""
    fast.pairs.save(str(tmp_path / ACTION_TOKENIZER_FILE))
    known = 2 * FAST.largest_coefficient + 1
    wider = ActionTokensConfig(kind="fast", largest_coefficient=FAST.largest_coefficient + 1, vocabulary=512)
    with pytest.raises(TokenizerError, match=rf"it knows {known} of {known + 2} that action_tokens\.largest_coefficient"):
        FastTokenizer.load(tmp_path, wider, CHUNK)
    (tmp_path / ACTION_TOKENIZER_FILE).write_text("{")
    with pytest.raises(TokenizerError, match=rf"{ACTION_TOKENIZER_FILE} is no tokenizer .*damaged or truncated"):
        FastTokenizer.load(tmp_path, FAST, CHUNK)


def test_a_chunk_that_does_not_fit_is_an_error_with_its_length(fast: FastTokenizer) -> None:
    short = FastTokenizer(fast.pairs, ActionTokensConfig(kind="fast", largest_coefficient=25, vocabulary=96, longest=3), CHUNK)
    rough = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (1, CHUNK, ACTION_DIM))).float()
    with pytest.raises(TokenizerError, match=r"needs \d+ action tokens .*longest is 3; raise it to at least \d+"):
        short.encode(rough)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bins": 1}, "action_tokens.bins is 1; it must be at least 2"),
        ({"scale": 0.0}, "action_tokens.scale is 0.0"),
        ({"vocabulary": 200}, "action_tokens.vocabulary is 200; it must be at least 201"),
        ({"longest": 1}, "action_tokens.longest is 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ActionTokensConfig(**changes)  # type: ignore[arg-type]
