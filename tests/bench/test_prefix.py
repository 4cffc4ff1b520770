"""The prefix benchmark: both ways agree, the FLOP ratio is counted, and unlike actions or short prefixes are refused."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest
import torch

from vla_rl.bench import prefix
from vla_rl.policies.pi0.config import PI0_PRESETS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark on the tiny preset."""
    monkeypatch.setattr(prefix, "CONFIG", PI0_PRESETS["tiny"])


def test_both_ways_give_the_same_actions(tiny: None) -> None:
    policy, batch = prefix._policy_and_batch()
    with torch.no_grad():
        cached, again = prefix.cached_chunk(policy, batch), prefix.encoded_again_chunk(policy, batch)
    assert cached.abs().max() > 0.1
    torch.testing.assert_close(cached, again, atol=prefix.TOLERANCE, rtol=0)


def test_flop_ratio_lies_between_one_and_the_number_of_steps(tiny: None) -> None:
    policy, batch = prefix._policy_and_batch()
    assert 1.0 < prefix.flop_ratio(policy, batch) < PI0_PRESETS["tiny"].denoise_steps


def report(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> int:
    return prefix.report(pairs, Namespace(record=None))


def pair(cached_s: float = 1.0, again_s: float = 9.0, prefix_s: float = 0.5, action: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """One pair of measurements with a FLOP ratio of 10."""
    common = {"prefix_s": prefix_s, "flop_ratio": 10.0, "actions": [0.0, 0.0]}
    return {**common, "chunk_s": cached_s}, {**common, "chunk_s": again_s, "actions": [0.0, action]}


def test_report_is_one_json_line_with_the_median_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([pair(again_s=9.0), pair(again_s=8.5), pair(again_s=4.0)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["name"], result["ratio"], result["bar"], result["fraction_of_limit"]) == ("prefix", 8.5, 8.0, 0.85)
    assert report([pair(again_s=7.9)]) == 1


def test_unlike_actions_and_short_prefixes_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"actions that differ by 0\.1"):
        report([pair(action=0.1)])
    with pytest.raises(RuntimeError, match=r"the prefix takes 0\.05 s, less than 0\.1 s"):
        report([pair(prefix_s=0.05)])
