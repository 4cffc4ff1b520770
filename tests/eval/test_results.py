"""Rates come from rows alone; crashes have no place in them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vla_rl.episode import Outcome
from vla_rl.eval.results import EpisodeRow, Rate, ResultError, finished_rows, read_rows, row_of, suite_results
from vla_rl.eval.statistics import wilson_interval
from vla_rl.telemetry.files import append_jsonl


def rows_of(fakes: Any, outcomes_by_task: dict[int, str], condition: str = "after") -> list[EpisodeRow]:
    """One row for each letter: s success, f failure, c crash."""
    kinds = {"s": Outcome.SUCCESS, "f": Outcome.FAILURE, "c": Outcome.CRASH}
    return [
        row_of(fakes.episode(fakes.spec(init, task), kinds[letter]), condition)
        for task, letters in outcomes_by_task.items()
        for init, letter in enumerate(letters)
    ]


def test_a_row_says_what_happened(fakes: Any) -> None:
    spec = fakes.spec(3, 1)
    episode = fakes.episode(spec, Outcome.FAILURE, provenance={"initial_state_sha256": "ab12"})
    row = row_of(episode, "before", weights="w1", video="videos/x.mp4")
    assert (row.suite, row.task, row.init, row.init_hash, row.seed) == ("libero_object", 1, "benchmark:3", "ab12", 0)
    assert row.scene_seed == spec.scene_seed
    assert (row.steps, row.success, row.outcome, row.terminated, row.truncated) == (8, False, "failure", False, True)
    assert (row.condition, row.weights, row.video, row.instruction) == ("before", "w1", "videos/x.mp4", "task 1")


def test_suite_result_by_hand(fakes: Any) -> None:
    [result] = suite_results(rows_of(fakes, {0: "sssfc", 1: "sf"}))
    assert (result.pooled.successes, result.pooled.trials) == (4, 6)
    assert result.pooled.interval == wilson_interval(4, 6)
    assert {task: (rate.successes, rate.trials) for task, rate in result.tasks.items()} == {0: (3, 4), 1: (1, 2)}
    assert result.mean_of_tasks == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert result.bootstrap is not None and result.bootstrap == (0.5, 0.75), "two tasks: the bootstrap's ends are the two rates"
    assert result.mean_steps_of_successes == 8


def test_one_task_has_no_bootstrap_and_conditions_stay_apart(fakes: Any) -> None:
    before, after = suite_results([*rows_of(fakes, {0: "ff"}, "before"), *rows_of(fakes, {0: "sf"}, "after")])
    assert (before.condition, before.pooled.successes, after.condition, after.pooled.successes) == ("before", 0, "after", 1)
    assert before.bootstrap is None and before.mean_steps_of_successes is None


def test_two_outcomes_of_one_spec_are_refused(fakes: Any) -> None:
    rows = rows_of(fakes, {0: "s"})
    crash = replace(rows[0], outcome="crash", success=False)
    assert finished_rows([crash, rows[0]]) == rows
    with pytest.raises(ResultError, match=r"1 specs have more than one outcome.*libero_object/0/benchmark:0/s0 \(after\)"):
        finished_rows([*rows, replace(rows[0], success=False, outcome="failure")])


def test_rows_survive_the_file_and_a_strange_row_is_named(fakes: Any, tmp_path: Path) -> None:
    path, rows = tmp_path / "episodes.jsonl", rows_of(fakes, {0: "sf"})
    for row in rows:
        append_jsonl(path, asdict(row) | {"field_of_a_later_version": 1})
    assert read_rows(path) == rows
    append_jsonl(path, {"suite": "libero_object"})
    with pytest.raises(ResultError, match="row 3 is not a row of an evaluation"):
        read_rows(path)


def test_a_rate_reads_as_k_of_n(fakes: Any) -> None:
    assert str(Rate.of(rows_of(fakes, {0: "s" * 10}))) == "10/10 = 100.0 % [72.2, 100.0]"
