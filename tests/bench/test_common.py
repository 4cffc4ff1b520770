"""What every benchmark ends with: one JSON line, an exit status, and a record if it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_rl.bench.common import benchmark_parser, finish, median_iqr
from vla_rl.eval.record import check_record, missed_bars


def test_median_and_quartiles() -> None:
    assert median_iqr([3.0]) == (3.0, 3.0, 3.0)
    assert median_iqr([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0)


def test_the_last_line_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    options = benchmark_parser("sim", "doc").parse_args([])
    assert finish("sim", 6.04999, 6.0, 0.5, [{"suite": "x"}], options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {key: result[key] for key in ("name", "ratio", "bar", "fraction_of_limit", "rows")} == {
        "name": "sim", "ratio": 6.05, "bar": 6.0, "fraction_of_limit": 0.5, "rows": [{"suite": "x"}],
    }  # fmt: skip
    assert finish("sim", 5.9, 6.0, None, [], options) == 1


def test_a_record_keeps_options_rows_and_a_missed_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = benchmark_parser("sim", "doc")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args(["--record", "bench_sim", "--pairs", "3"])
    assert finish("sim", 5.0, 6.0, 0.25, [{"suite": "x"}], options) == 1
    folder = tmp_path / "docs/results/bench_sim"
    record = json.loads((folder / "record.json").read_text())
    assert record["command"] == "vla-rl bench sim --record bench_sim --pairs 3"
    assert record["recipe"] == {"pairs": 3}
    assert record["metrics"] == {"ratio": 5.0, "fraction_of_limit": 0.25, "rows": [{"suite": "x"}]}
    assert check_record(folder) == []
    assert missed_bars(record) == ["ratio is 5.0, below its bar of 6.0"]
