"""Records: results that README and docs claim, committed with what is needed to check them.

`docs/results/NAME/record.json` holds the numbers, and `episodes.jsonl` beside it the episodes they come from.
`check_record` recomputes every success rate from the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.eval.statistics import wilson_interval
from vla_rl.telemetry.environment import machine, package_versions, source_commit
from vla_rl.telemetry.files import atomic_path, read_jsonl, write_json

RECORD_KEYS = ("name", "command", "recipe", "commit", "date", "machine", "environment", "metrics", "bars")
ROW_KEYS = ("suite", "task", "init", "seed", "steps", "success", "outcome")
OUTCOMES = ("success", "failure", "crash")
RATE_ENDINGS = ("success_rate", "final_success")
"""A metric with such a name is a success rate, and must be one that the rows give."""


class RecordError(UserError):
    """A record that could not be checked later."""


def success_rates(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """k/n with Wilson interval of every condition, and of every suite and task in it; crashes do not count."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["outcome"] != "crash":
            groups.setdefault(row.get("condition", "all"), []).append(row)
    return {condition: _rate(group) | {"tasks": _task_rates(group)} for condition, group in groups.items()}


def _rate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    successes = sum(bool(row["success"]) for row in rows)
    return {
        "successes": successes,
        "trials": len(rows),
        "rate": round(successes / len(rows), 6),
        "wilson_95": [round(end, 6) for end in wilson_interval(successes, len(rows))],
    }


def _task_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    tasks = sorted({(row["suite"], row["task"]) for row in rows})
    return {f"{suite}/{task}": _rate([row for row in rows if (row["suite"], row["task"]) == (suite, task)]) for suite, task in tasks}


def write_record(
    name: str,
    command: str,
    recipe: Mapping[str, Any],
    metrics: Mapping[str, Any],
    bars: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = (),
    root: Path = Path("docs/results"),
) -> Path:
    """Write `root/name/record.json` and, if there are rows, `episodes.jsonl`; returns the folder.

    With rows, `metrics["success_rates"]` is computed here. `bars` maps a metric's name to the least value it may have,
    or to `{"at_most": x}`; see `missed_bars`. Raises RecordError naming everything that `check_record` would find.
    """
    folder = Path(root) / name
    computed = {"success_rates": success_rates(rows)} if rows else {}
    record = {
        "name": name,
        "command": command,
        "recipe": dict(recipe),
        "commit": source_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "environment": package_versions(),
        "metrics": dict(metrics) | computed,
        "bars": dict(bars),
    }
    problems = _problems(record, rows)
    if problems:
        raise RecordError(f"record {name!r} would not hold:\n  " + "\n  ".join(problems))
    if rows:
        with atomic_path(folder / "episodes.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    write_json(folder / "record.json", record)
    return folder


def check_record(folder: Path) -> list[str]:
    """A line for everything that does not hold in a committed record; empty if all does."""
    record_file = folder / "record.json"
    if not record_file.is_file():
        return [f"{folder.name}: no record.json"]
    record = json.loads(record_file.read_text())
    problems = _problems(record, read_jsonl(folder / "episodes.jsonl"))
    if record.get("name") != folder.name:
        problems.append(f"name is {record.get('name')!r}, the folder's is {folder.name!r}")
    return [f"{folder.name}: {problem}" for problem in problems]


def _problems(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = [f"key {key!r} is missing" for key in RECORD_KEYS if key not in record]
    if problems:
        return problems
    bad_rows = [line for number, row in enumerate(rows, start=1) for line in _row_problems(number, row)]
    if bad_rows:
        return bad_rows[:10]
    metrics = record["metrics"]
    nameless = [f"bar {name!r} names no metric (metrics: {', '.join(metrics)})" for name in record["bars"] if name not in metrics]
    return nameless + _duplicates(rows) + _rate_problems(metrics, rows)


def _row_problems(number: int, row: Mapping[str, Any]) -> list[str]:
    lines = [f"row {number} has no {key!r}" for key in ROW_KEYS if key not in row]
    if not lines and row["outcome"] not in OUTCOMES:
        lines.append(f"row {number}: outcome {row['outcome']!r} is not one of {', '.join(OUTCOMES)}")
    if not lines and bool(row["success"]) != (row["outcome"] == "success"):
        lines.append(f"row {number}: success is {row['success']} and outcome {row['outcome']!r}")
    return lines


def _duplicates(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    seen: set[tuple[Any, ...]] = set()
    lines = []
    for number, row in enumerate(rows, start=1):
        spec = row.get("key") or tuple(row[key] for key in ("suite", "task", "init", "seed"))
        identity = (row.get("condition", "all"), spec)
        if row["outcome"] != "crash":
            if identity in seen:
                lines.append(f"row {number}: {identity} has an outcome already")
            seen.add(identity)
    return lines


def _rate_problems(metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    computed = success_rates(rows)
    lines = []
    if rows and metrics.get("success_rates") != computed:
        lines.append(f"success_rates are not what the rows give: {computed}")
    for name, value in metrics.items():
        if name.endswith(RATE_ENDINGS) and not _is_rate_of_rows(value, computed):
            lines.append(f"{name} is {value}, which no condition or task of the rows gives")
    return lines


def _is_rate_of_rows(value: float, computed: Mapping[str, Mapping[str, Any]]) -> bool:
    rates = [rate for condition in computed.values() for rate in (condition, *condition["tasks"].values())]
    return any(math.isclose(value, rate["successes"] / rate["trials"], abs_tol=1e-6) for rate in rates)


def missed_bars(record: Mapping[str, Any]) -> list[str]:
    """A line for each metric that does not reach its bar. A record may miss a bar: it then says so, and still has to be true."""
    lines = []
    for name, bar in record["bars"].items():
        value = record["metrics"][name]
        if isinstance(bar, Mapping) and value > bar["at_most"]:
            lines.append(f"{name} is {value}, above its bar of at most {bar['at_most']}")
        elif not isinstance(bar, Mapping) and value < bar:
            lines.append(f"{name} is {value}, below its bar of {bar}")
    return lines
