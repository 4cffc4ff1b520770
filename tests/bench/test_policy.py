"""The policy benchmark: LeRobot's own code is really what runs beside ours, with the same actions; other actions are refused."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from vla_rl.bench import policy

OPTIONS = argparse.Namespace(record=None)


@pytest.mark.parametrize("family", policy.FAMILIES)
def test_both_sides_give_the_same_actions(family: str) -> None:
    case = policy.measure(family, "tiny", batch_size=2, pairs=1)
    assert case["difference"] < policy.TOLERANCE and min(*case["lerobot_s"], *case["ours_s"]) > 0
    assert policy.lerobot_policy.__module__ == "vla_rl.bench.lerobot_peer"


def case(ours: float, difference: float = 0.0) -> dict[str, Any]:
    return {"case": "pi0", "difference": difference, "lerobot_s": [1.0, 1.0, 1.0], "ours_s": [ours, ours, ours]}


def test_the_smallest_ratio_counts_and_other_actions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert policy.report([case(0.5), case(0.8)], OPTIONS) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["name"], result["ratio"], result["bar"]) == ("policy", 1.25, 1.0)
    assert policy.report([case(0.5), case(1.1)], OPTIONS) == 1
    with pytest.raises(RuntimeError, match=r"actions differ by 0\.1"):
        policy.report([case(0.5, difference=0.1)], OPTIONS)
