"""Who sees whom, read off the network: a position is perturbed, and it shows where that arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tokens_setup import AUTOREGRESSIVE, FORMS, PARALLEL, REASONING, REASONING_CAUSAL, RESOLUTION, make_tokens

from vla_rl.episode import Observation
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokens.attention import SequenceLayout, positions
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.decoding import read_whole

PREFIX, TEXT = 6, 8
"""Positions of a short prefix, and of the reasoning with its opening mark."""


def reach_of(config: TokenConfig, statistics: Statistics, padding: tuple[int, ...] = ()) -> torch.Tensor:
    """bool[S, S]: whether a change of input k (column) changes output q (row), measured in the network of `config`."""
    policy = make_tokens(config, statistics)
    layout = SequenceLayout(
        PREFIX, TEXT if config.reasoning_tokens else 0, 5, config.prefix_attention == "bidirectional", config.decoding == "parallel"
    )
    torch.manual_seed(0)
    x_1SM = torch.randn(1, layout.length, config.language.width)
    valid_1S = torch.ones(1, layout.length, dtype=torch.bool)
    valid_1S[:, list(padding)] = False
    with torch.no_grad():
        plain = read_whole(policy.model.language, layout, x_1SM, valid_1S)
        reached = []
        for k in range(layout.length):
            changed = x_1SM.clone()
            changed[:, k] += 1.0
            reached.append((read_whole(policy.model.language, layout, changed, valid_1S) - plain).abs().amax(-1)[0] > 1e-6)
    return torch.stack(reached, 1)


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def test_parallel_actions_see_everything_and_each_other(statistics: Statistics) -> None:
    """The prefix sees itself in both directions, and no placeholder."""
    expected = torch.ones(PREFIX + 5, PREFIX + 5, dtype=torch.bool)
    expected[:PREFIX, PREFIX:] = False
    assert torch.equal(reach_of(PARALLEL, statistics), expected)


def test_autoregressive_is_causal_throughout(statistics: Statistics) -> None:
    assert torch.equal(reach_of(AUTOREGRESSIVE, statistics), causal(PREFIX + 5))
    assert torch.equal(reach_of(REASONING_CAUSAL, statistics), causal(PREFIX + TEXT + 5))


def test_reasoning_is_causal_between_a_bidirectional_prefix_and_parallel_actions(statistics: Statistics) -> None:
    expected = causal(PREFIX + TEXT + 5)
    expected[:PREFIX, :PREFIX] = True
    expected[-5:, -5:] = True
    assert torch.equal(reach_of(REASONING, statistics), expected)


def test_padding_is_seen_by_nobody_but_itself(statistics: Statistics) -> None:
    reached = reach_of(PARALLEL, statistics, padding=(2, 3))
    for padded in (2, 3):
        others = [q for q in range(len(reached)) if q != padded]
        assert not reached[others, padded].any(), "its own residual stream carries a padded position to itself alone"


def test_padding_takes_no_position(statistics: Statistics) -> None:
    """The same tokens with and without padding in between have the same hidden states, so an engine may leave padding out."""
    policy = make_tokens(AUTOREGRESSIVE, statistics)
    x_1SM = torch.randn(1, 7, AUTOREGRESSIVE.language.width, generator=torch.Generator().manual_seed(0))
    padded = torch.cat((x_1SM[:, :3], torch.full_like(x_1SM[:, :2], 9.0), x_1SM[:, 3:]), 1)
    valid = torch.tensor([[True] * 3 + [False] * 2 + [True] * 4])
    assert positions(valid).tolist() == [[0, 1, 2, 2, 2, 3, 4, 5, 6]]
    with torch.no_grad():
        short = read_whole(policy.model.language, SequenceLayout(7, 0, 0, False, False), x_1SM, valid[:, valid[0]])
        long = read_whole(policy.model.language, SequenceLayout(9, 0, 0, False, False), padded, valid)
    torch.testing.assert_close(long[:, valid[0]], short, atol=1e-5, rtol=1e-5)  # sums over masked zeros round otherwise


@pytest.mark.parametrize("form", FORMS)
def test_an_action_token_informs_only_later_ones_and_only_in_autoregressive_decoding(
    form: str, statistics: Statistics, observe: Callable[..., list[Observation]]
) -> None:
    """Recorded tokens are inputs of the scoring pass; a token's own score must not depend on it."""
    config = FORMS[form]
    policy = make_tokens(config, statistics)
    batch = policy.preprocess(observe(1, RESOLUTION))
    with torch.no_grad():
        x_BPM, valid_BP = policy.model.embed_prefix(batch, batch.images_BVCHW)
        written = policy.write(x_BPM, valid_BP, None, None)
        plain = policy.action_logits(policy.read(x_BPM, valid_BP, written))
        for place in range(written.actions_BN.shape[1]):
            other = written.actions_BN.clone()
            other[:, place] = (other[:, place] + 1) % policy.actions.size
            logits = policy.action_logits(policy.read(x_BPM, valid_BP, replace(written, actions_BN=other)))
            moved_N = (logits - plain).abs().amax((0, 2)) > 1e-6
            expected_N = (torch.arange(len(moved_N)) > place) & (config.decoding == "autoregressive")
            assert torch.equal(moved_N, expected_N)
