"""Records say nothing that their rows do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.eval.record import RECORD_KEYS, RecordError, check_record, missed_bars, success_rates, write_record
from vla_rl.eval.statistics import mcnemar_exact

ROOT = Path(__file__).parents[2]


def rows_of(letters: str, condition: str = "after") -> list[dict[str, Any]]:
    names = {"s": "success", "f": "failure", "c": "crash"}
    return [
        {
            "suite": "libero_object",
            "task": 0,
            "init": f"benchmark:{k}",
            "seed": 0,
            "steps": 100,
            "success": letter == "s",
            "outcome": names[letter],
            "condition": condition,
        }
        for k, letter in enumerate(letters)
    ]


def write(root: Path, rows: list[dict[str, Any]], **metrics: Any) -> Path:
    return write_record("sft_pi0_tiny", "vla-rl run x.yaml", {"seed": 1}, metrics, {"success_rate": 0.9}, rows, root=root)


def test_a_record_has_what_it_takes_to_check_it(tmp_path: Path) -> None:
    folder = write(tmp_path, rows_of("sssfc"), success_rate=0.75)
    record = json.loads((folder / "record.json").read_text())
    assert tuple(record) == RECORD_KEYS
    assert record["metrics"]["success_rates"]["after"]["successes"] == 3
    assert record["metrics"]["success_rates"]["after"]["trials"] == 4, "a crash does not count"
    assert record["machine"]["cores"] and record["environment"]["mujoco"]
    assert check_record(folder) == []
    assert missed_bars(record) == ["success_rate is 0.75, below its bar of 0.9"]


def test_a_rate_that_the_rows_do_not_give_is_found(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"success_rate is 0\.9, which no condition or task of the rows gives"):
        write(tmp_path, rows_of("sssf"), success_rate=0.9)
    folder = write(tmp_path, rows_of("sssf"), success_rate=0.75)
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    flipped = lines[3].replace('"success": false', '"success": true').replace("failure", "success")
    (folder / "episodes.jsonl").write_text("\n".join([*lines[:3], flipped]) + "\n")
    assert any("success_rates are not what the rows give" in problem for problem in check_record(folder))


def test_rows_that_contradict_themselves_or_lack_fields_are_found(tmp_path: Path) -> None:
    bad = rows_of("s")
    bad[0]["outcome"] = "failure"
    with pytest.raises(RecordError, match="row 1: success is True and outcome 'failure'"):
        write(tmp_path, bad, success_rate=1.0)
    del bad[0]["init"]
    with pytest.raises(RecordError, match="row 1 has no 'init'"):
        write(tmp_path, bad, success_rate=1.0)
    with pytest.raises(RecordError, match="has an outcome already"):
        write(tmp_path, rows_of("s") * 2, success_rate=1.0)
    with pytest.raises(RecordError, match="bar 'success_rate' names no metric"):
        write(tmp_path, rows_of("s"))


def test_conditions_are_counted_apart() -> None:
    rates = success_rates([*rows_of("ff", "before"), *rows_of("sf", "after")])
    assert (rates["before"]["successes"], rates["after"]["successes"]) == (0, 1)
    assert rates["after"]["tasks"]["libero_object/0"]["rate"] == 0.5


def test_a_record_in_another_folder_or_without_a_file_is_found(tmp_path: Path) -> None:
    folder = write(tmp_path, rows_of("s"), success_rate=1.0)
    moved = folder.rename(tmp_path / "other")
    assert check_record(moved) == ["other: name is 'sft_pi0_tiny', the folder's is 'other'"]
    assert check_record(tmp_path / "empty") == ["empty: no record.json"]


def test_committed_records_hold() -> None:
    folders = sorted(folder for folder in (ROOT / "docs" / "results").iterdir() if folder.is_dir())
    assert [problem for folder in folders for problem in check_record(folder)] == []


@pytest.mark.parametrize("name", ["ppo_pi0_tiny", "grpo_pi0_tiny"])
def test_gains_and_their_significance_are_those_of_the_rows(name: str) -> None:
    folder = ROOT / "docs" / "results" / name
    metrics = json.loads((folder / "record.json").read_text())["metrics"]
    succeeded: dict[str, dict[str, bool]] = {"before": {}, "after": {}}
    for row in map(json.loads, (folder / "episodes.jsonl").read_text().splitlines()):
        succeeded[row["condition"]][row["key"]] = row["success"]
    before, after = succeeded["before"], succeeded["after"]
    assert before.keys() == after.keys() and len(before) == 50
    wins, losses = sum(after[key] > before[key] for key in before), sum(after[key] < before[key] for key in before)
    assert metrics["points_gained"] == pytest.approx(100 * (wins - losses) / len(before))
    assert metrics["mcnemar_p"] == pytest.approx(mcnemar_exact(wins, losses), rel=0.005)  # three digits were noted
