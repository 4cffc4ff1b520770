"""Paired comparison: by spec, refused when unlike, exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vla_rl.episode import Outcome
from vla_rl.eval.compare import CompareError, compare_rows, load_run, run_compare
from vla_rl.eval.protocol import effective_protocol, get_protocol
from vla_rl.eval.results import EpisodeRow, ResultError, row_of
from vla_rl.eval.statistics import mcnemar_exact, paired_difference_interval
from vla_rl.telemetry.files import DamagedFileError, append_jsonl

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(fakes: Any, tmp_path: Path) -> MakeRun:
    """Writes a finished run whose k-th episode succeeds where the k-th letter is `s`."""

    def make(name: str, letters: str, first_init: int = 0, change: dict[str, Any] | None = None, hashes: str = "h") -> Path:
        folder = tmp_path / name
        for k, letter in enumerate(letters):
            outcome = Outcome.SUCCESS if letter == "s" else Outcome.FAILURE
            episode = fakes.episode(fakes.spec(first_init + k), outcome, provenance={"initial_state_sha256": f"{hashes}{first_init + k}"})
            append_jsonl(folder / "episodes.jsonl", asdict(row_of(episode, name)))
        protocol, deviations = effective_protocol(
            get_protocol("openvla-oft"), resolution=128, orientation=get_protocol("openvla-oft").orientation, executed_horizon=8
        )
        summary = {
            "complete": True,
            "planned": len(letters),
            "missing": [],
            "protocol": protocol.to_dict() | {"deviations": deviations},
            "env": {"mujoco": "3.3.2", "render_profile": "exact"},
        }
        (folder / "summary.json").write_text(json.dumps(summary | (change or {})))
        return folder

    return make


def test_pairs_wins_and_losses(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run("before", "ssfffffffs"), make_run("after", "sfsssssssf")
    assert run_compare(first, second, allow_unlike=False) == 0
    text = capsys.readouterr().out
    assert f"7 wins, 2 losses, McNemar exact p = {mcnemar_exact(7, 2):.3g}" in text
    low, high = paired_difference_interval(7, 2, 10)
    assert f"B - A over 10 pairs: +50.0 points, 95 % interval [{100 * low:+.1f}, {100 * high:+.1f}]" in text
    assert "A  " in text and "3/10" in text and "8/10" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("loss ")] == [
        "libero_object/0/benchmark:1/s0",
        "libero_object/0/benchmark:9/s0",
    ]


def test_a_run_against_itself_differs_in_nothing(make_run: MakeRun) -> None:
    rows = load_run(make_run("run", "sfsf")).rows
    comparison = compare_rows(rows, rows)
    assert (comparison.difference, comparison.p_value, comparison.wins, comparison.losses) == (0, 1, (), ())


def test_specs_of_one_run_only_are_left_out_and_counted(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_compare(make_run("a", "ssss"), make_run("b", "ssss", first_init=2))
    text = capsys.readouterr().out
    assert "over 2 pairs" in text
    assert "left out, only in A: 2 specs, for example libero_object/0/benchmark:0/s0" in text


def test_unlike_protocols_are_refused_with_every_difference(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    other = get_protocol("libero").to_dict()
    first = make_run("a", "ss")
    second = make_run("b", "ss", change={"protocol": other, "env": {"mujoco": "3.4.0", "render_profile": "exact"}})
    with pytest.raises(CompareError) as refusal:
        run_compare(first, second)
    expected = (
        "executed_horizon: 8 against 1",
        "settle_steps: 10 against 5",
        "protocol orientation",
        "protocol max_steps",
        "env mujoco: 3",
    )
    assert [line for line in (*expected, "--allow-unlike") if line not in str(refusal.value)] == []
    assert run_compare(first, second, allow_unlike=True) == 0
    assert "UNLIKE, the difference may have another cause: env mujoco: 3.3.2 against 3.4.0" in capsys.readouterr().out


def test_initial_states_that_moved_are_unlike(make_run: MakeRun) -> None:
    with pytest.raises(CompareError, match="initial states differ in 2 specs, for example libero_object/0/benchmark:0/s0"):
        run_compare(make_run("a", "ss"), make_run("b", "ss", hashes="other"))


def test_runs_that_are_no_result_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    good = make_run("good", "ss")
    with pytest.raises(CompareError, match=r"nowhere holds no finished evaluation"):
        run_compare(good, tmp_path / "nowhere")
    (tmp_path / "collected" / "eval").mkdir(parents=True)
    (tmp_path / "collected" / "summary.json").write_text('{"planned": 3}')
    with pytest.raises(CompareError, match=r"a run of another command, not an evaluation .* run `vla-rl eval`"):
        run_compare(good, tmp_path / "collected")
    (tmp_path / "collected" / "eval" / "summary.json").write_text('{"protocol": {}}')
    with pytest.raises(CompareError, match=r"evaluations in it: .*collected/eval"):
        run_compare(good, tmp_path / "collected")
    (tmp_path / "collected" / "summary.json").write_text('{"plann')
    with pytest.raises(DamagedFileError, match=r"collected/summary\.json: not JSON"):
        run_compare(good, tmp_path / "collected")
    incomplete = make_run("incomplete", "s", change={"complete": False, "planned": 2, "missing": ["x | libero_object/0/benchmark:1/s0"]})
    with pytest.raises(CompareError, match=r"incomplete is incomplete: 1 of 2 specs.*benchmark:1"):
        run_compare(good, incomplete)
    append_jsonl(good / "episodes.jsonl", json.loads((good / "episodes.jsonl").read_text().splitlines()[0]))
    with pytest.raises(ResultError, match="more than one outcome"):
        run_compare(good, good)
    with pytest.raises(CompareError, match="share no spec"):
        run_compare(make_run("c", "s"), make_run("d", "s", first_init=5))


def test_two_conditions_in_one_run_cannot_be_paired(make_run: MakeRun) -> None:
    folder = make_run("two", "s")
    row = json.loads((folder / "episodes.jsonl").read_text())
    append_jsonl(folder / "episodes.jsonl", asdict(replace(EpisodeRow(**row), condition="other")))
    with pytest.raises(CompareError, match="evaluate each condition in a run of its own"):
        load_run(folder)
