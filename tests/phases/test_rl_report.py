"""What a step's time went into."""

from __future__ import annotations

from typing import Any

import pytest

from vla_rl.phases.rl_report import step_report


def row(name: str, start: float, seconds: float, depth: int, leaf: bool = True) -> dict[str, Any]:
    return {"name": name, "start": start, "s": seconds, "depth": depth, "leaf": leaf, "thread": "MainThread", "pid": 1}


def test_an_evaluation_is_not_charged_to_the_envs_of_the_rollout() -> None:
    """Seven of ten seconds are the evaluation's, five of them in its own pool."""
    rows = [
        row("pool", 0.0, 2.0, 2),
        row("rollout", 0.0, 2.0, 1, leaf=False),
        row("update", 2.0, 1.0, 1),
        row("pool", 3.0, 5.0, 2),
        row("load_actor", 8.0, 1.0, 2),
        row("evaluation", 3.0, 7.0, 1, leaf=False),
        row("rl_step", 0.0, 10.0, 0, leaf=False),
    ]
    text, numbers = step_report(rows, {"physics": 2.0, "wall": 2.0}, envs=1, batch_fill=1.0)
    shares = {name.removeprefix("time/"): share for name, share in numbers.items() if name.startswith("time/")}
    assert shares == pytest.approx({"evaluation": 0.7, "pool": 0.2, "update": 0.1, "unaccounted": 0.0})
    assert "bottleneck: evaluation: 70% of the step" in text and "a larger evaluation.every" in text
