"""Before and after are paired by scene; the Gantt chart shows the step of median length, lane by lane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vla_rl.episode import Outcome
from vla_rl.eval.report_data import Phase
from vla_rl.eval.report_rl import before_after, gantt, step_lanes
from vla_rl.eval.results import row_of


def evaluation(fakes: Any, name: str, letters: str, condition: str, first: int = 0) -> Phase:
    """An evaluated policy whose k-th scene succeeds where the k-th letter is `s`."""
    rows = [
        row_of(fakes.episode(fakes.spec(0, first + k), Outcome.SUCCESS if letter == "s" else Outcome.FAILURE), condition)
        for k, letter in enumerate(letters)
    ]
    summary = {"protocol": {"split": "test"}, "actor": {"kind": "policy"}}
    return Phase(Path(name), name, {}, {}, summary, tuple(rows), (), ())


def test_before_and_after_are_paired(fakes: Any) -> None:
    before, after = evaluation(fakes, "before", "ssffffffff", "before"), evaluation(fakes, "after", "fsssssssss", "after")
    table = before_after([before, after])
    assert "<b>2/10</b> 20.0 %" in table and "<b>9/10</b> 90.0 %" in table
    assert "+70.0 points" in table and "<td>8, 1</td>" in table and "0.039" in table, "exact McNemar of 8 against 1: 2 * 10 / 512"
    elsewhere = evaluation(fakes, "other", "s" * 10, "other scenes", first=100)
    assert "other scenes" not in before_after([before, after, elsewhere])
    assert before_after([after]) == "" and before_after([before]) == ""


def span(name: str, start: float, seconds: float, depth: int, thread: str = "MainThread", role: str = "driver") -> dict[str, Any]:
    return {"name": name, "start": start, "s": seconds, "depth": depth, "thread": thread, "role": role, "pid": 1}


def test_the_median_step_is_drawn_with_every_thread_that_worked_in_it(fakes: Any) -> None:
    spans = [
        span("rl_step", 0.0, 1.0, 0),
        span("rollout", 10.0, 6.0, 1),
        span("wait_policy", 10.0, 3.0, 2),
        span("policy_forward", 11.0, 2.0, 0, thread="policy_0"),
        span("update", 16.0, 4.0, 1),
        span("rl_step", 10.0, 10.0, 0),
        span("rollout", 20.0, 90.0, 1),
        span("rl_step", 20.0, 100.0, 0),
    ]
    seconds, lanes = step_lanes(spans)
    assert seconds == 10.0 and list(lanes) == ["driver", "driver: policy_0"]
    assert [(bar.name, bar.start, bar.width) for bar in lanes["driver"]] == [("rollout", 0.0, 0.6), ("update", pytest.approx(0.6), 0.4)]
    assert [(bar.name, bar.start, bar.width) for bar in lanes["driver: policy_0"]] == [("policy_forward", pytest.approx(0.1), 0.2)]
    phase = replace(evaluation(fakes, "ppo", "", "x"), spans=tuple(spans))
    assert gantt([phase]).count('class="lane"') == 2 and "one step, 10 s" in gantt([phase])
    assert gantt([replace(phase, spans=())]) == ""
