"""`vla-rl record`: a record from finished evaluations.

    vla-rl record sft_pi0_tiny --command "vla-rl run RECIPE" \\
        --run after=runs/x/eval --run noop=runs/x/eval_noop --recipe sft=runs/x/sft --bar success_rate=0.9

Each `--run CONDITION=RUN_DIR` gives rows under that condition and a metric `CONDITION_success_rate`; the first one's is also
`success_rate`. A run with a swapped prompt has two conditions, `CONDITION: named object` and `CONDITION: original object`
(metric `CONDITION_named_object_success_rate`, ...). Incomplete evaluations are refused. `--keep CONDITION` takes over a
condition of the record that is there now, so that one more suite does not cost all the others again; `metrics.commits` says
at which commit each condition was measured. `--gain BEFORE=AFTER` pairs two conditions by spec, as `vla-rl compare` does, into
`points_gained`, `points_gained_95` (Tango's interval) and `mcnemar_p` (exact).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vla_rl.config import nearest_name, read_yaml
from vla_rl.eval.compare import EvaluatedRun, compare_rows, load_run, unlike
from vla_rl.eval.record import RecordError, missed_bars, write_record
from vla_rl.eval.results import EpisodeRow, Rate
from vla_rl.telemetry.files import read_json, read_jsonl

RESULTS = Path("docs/results")


def record_of_runs(
    name: str,
    command: str,
    runs: Mapping[str, Path],
    recipes: Mapping[str, Path],
    metrics: Mapping[str, Any],
    bars: Mapping[str, Any],
    root: Path = RESULTS,
    keep: Sequence[str] = (),
    gain: tuple[str, str] | None = None,
) -> Path:
    """Write a record whose rows are those of finished evaluations; returns its folder.

    runs: condition -> run directory of an evaluation. recipes: name -> run directory of another phase whose recipe belongs to
    the result (the training). keep: conditions of the record that is there now, taken over before those of `runs`.
    gain: the conditions before and after whose paired difference is a metric.
    Raises CompareError for an incomplete evaluation or a gain without pairs, RecordError for a record that would not hold or has no
    condition to keep, and for a gain over evaluations that were made under other conditions.
    """
    evaluated = {condition: load_run(path) for condition, path in runs.items()}
    kept = _kept(root / name, [condition for condition in keep if condition not in runs]) if keep else _Kept([], {}, {}, {})
    if gain:
        _require_evaluated_alike(evaluated, *gain)
    rows = kept.rows + [_under(row, condition) for condition, run in evaluated.items() for row in run.rows.values()]
    measured = _rates(rows) | (_gain(rows, *gain) if gain else {}) | dict(metrics)
    measured["commits"] = kept.commits | {condition: _commit(run) for condition, run in evaluated.items()}
    measured["protocols"] = kept.protocols | {condition: _protocol(run) for condition, run in evaluated.items()}
    recipe = kept.recipe | {label: read_yaml(path / "config.yaml") for label, path in {**recipes, **runs}.items()}
    return write_record(name, command, recipe, measured, bars, [asdict(row) for row in rows], root)


@dataclass(frozen=True)
class _Kept:
    """Conditions of a committed record."""

    rows: list[EpisodeRow]
    protocols: dict[str, Any]
    recipe: dict[str, Any]
    commits: dict[str, str]
    """Condition -> the commit it was measured at."""


def _kept(folder: Path, conditions: Sequence[str]) -> _Kept:
    """Those conditions of a record. Raises RecordError naming one that it does not have."""
    if not (folder / "record.json").is_file():
        raise RecordError(f"--keep {conditions[0]}: there is no record {folder} to keep it from")
    record = read_json(folder / "record.json")
    rows = [EpisodeRow(**row) for row in read_jsonl(folder / "episodes.jsonl")]
    there = list(record["metrics"].get("protocols", ()))
    for condition in conditions:
        if condition not in there:
            raise RecordError(
                f"--keep {condition}: {folder} has no such condition"
                + (nearest_name(condition, there) if there else "; it was not made from evaluations")
            )
    commits = record["metrics"].get("commits", {})
    return _Kept(
        [row for row in rows if row.condition.partition(": ")[0] in conditions],
        {condition: record["metrics"]["protocols"][condition] for condition in conditions},
        {condition: record["recipe"][condition] for condition in conditions},
        {condition: commits.get(condition, record["commit"]) for condition in conditions},
    )


def _under(row: EpisodeRow, condition: str) -> EpisodeRow:
    """The row as a record keeps it: the record's own condition, with what a swapped prompt asked for; no video, which stays behind."""
    asked = row.condition.partition(": ")[2]
    return replace(row, condition=f"{condition}: {asked}" if asked else condition, video="")


def _rates(rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    """`CONDITION_success_rate` of every condition, and `success_rate` of the first one."""
    conditions = list(dict.fromkeys(row.condition for row in rows))
    rates = {condition: Rate.of([row for row in rows if row.condition == condition]).value for condition in conditions}
    named = {re.sub(r"\W+", "_", condition) + "_success_rate": rate for condition, rate in rates.items()}
    return {"success_rate": rates[conditions[0]]} | named


def _require_evaluated_alike(evaluated: Mapping[str, EvaluatedRun], before: str, after: str) -> None:
    """Raise RecordError where `vla-rl compare` would refuse two evaluations. Of a kept condition only rows are left, see `_gain`."""
    first, second = (evaluated.get(condition.partition(": ")[0]) for condition in (before, after))
    differences = unlike(first, second) if first is not None and second is not None else []
    if differences:
        raise RecordError(f"--gain {before}={after}: they were not evaluated alike:\n  " + "\n  ".join(differences))


def _gain(rows: Sequence[EpisodeRow], before: str, after: str) -> dict[str, Any]:
    """The paired difference of two conditions, in points.

    Raises RecordError naming a condition without rows, and for specs that began in other simulator states.
    """
    conditions = list(dict.fromkeys(row.condition for row in rows))
    for condition in (before, after):
        if condition not in conditions:
            raise RecordError(f"--gain {before}={after}: no row has condition {condition!r}{nearest_name(condition, conditions)}")
    first, second = ({row.key: row for row in rows if row.condition == condition} for condition in (before, after))
    moved = [key for key in first.keys() & second.keys() if first[key].init_hash != second[key].init_hash]
    if moved:
        raise RecordError(f"--gain {before}={after}: initial states differ in {len(moved)} specs, for example {min(moved)}")
    compared = compare_rows(first, second)
    return {
        "points_gained": round(100 * compared.difference, 6),
        "points_gained_95": [round(100 * end, 2) for end in compared.interval],
        "mcnemar_p": float(f"{compared.p_value:.3g}"),
    }


def _protocol(run: EvaluatedRun) -> dict[str, Any]:
    protocol = run.summary["protocol"]
    return {"name": protocol["name"], "hash": protocol["hash"], "deviations": protocol["deviations"]}


def _commit(run: EvaluatedRun) -> str:
    """At which commits its episodes ran, from the rows themselves: a run may go on, or just be looked at, at another one."""
    at_end = run.summary["environment"]["commit"]  # of rows from before they said it themselves
    return ", ".join(dict.fromkeys(row.commit or at_end for row in run.rows.values()))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise RecordError(f"{text!r} must be NAME=VALUE, such as after=runs/x/eval")
    return key, value


def _named(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Name -> value of `NAME=VALUE`s. Raises RecordError for a name that is given twice: one of the two would be lost."""
    named: dict[str, str] = {}
    for name, value in map(_pair, pairs):
        if name in named:
            raise RecordError(f"{option} {name} is given twice, as {named[name]} and {value}; give each its own name")
        named[name] = value
    return named


def _numbers(option: str, pairs: Sequence[str]) -> dict[str, float]:
    """Name -> number of `NAME=NUMBER`s. Raises RecordError naming one that is none, or twice."""
    numbers: dict[str, float] = {}
    for name, value in _named(option, pairs).items():
        try:
            numbers[name] = float(value)
        except ValueError as error:
            raise RecordError(f"{name}={value} must end in a number, such as {name}=0.9") from error
    return numbers


def _bars(least: Sequence[str], most: Sequence[str]) -> dict[str, Any]:
    """Metric -> bar, as `write_record` takes them. Raises RecordError for a metric with both: a record holds one bar for each."""
    lower, upper = _numbers("--bar", least), _numbers("--bar-at-most", most)
    both = sorted(lower.keys() & upper.keys())
    if both:
        raise RecordError(f"--bar and --bar-at-most are both given for {', '.join(both)}; give one")
    return lower | {name: {"at_most": value} for name, value in upper.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see this module's docstring. Bars that are missed are printed, and do not change the exit status."""
    parser = argparse.ArgumentParser(prog="vla-rl record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the record's name, that of its folder")
    parser.add_argument("--command", required=True, help="the command that gave the result")
    parser.add_argument("--run", action="append", required=True, metavar="CONDITION=RUN_DIR")
    parser.add_argument("--keep", action="append", default=[], metavar="CONDITION", help="a condition of the record that is there now")
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=RUN_DIR")
    parser.add_argument("--gain", type=_pair, metavar="BEFORE=AFTER", help="two conditions whose paired difference is a metric")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--bar", action="append", default=[], metavar="METRIC=NUMBER", help="the least that a metric should be")
    parser.add_argument("--bar-at-most", action="append", default=[], metavar="METRIC=NUMBER", help="the most that it should be")
    parser.add_argument("--root", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    runs = {name: Path(path) for name, path in _named("--run", given.run).items()}
    recipes = {name: Path(path) for name, path in _named("--recipe", given.recipe).items()}
    metrics, bars = _numbers("--metric", given.metric), _bars(given.bar, given.bar_at_most)
    folder = record_of_runs(given.name, given.command, runs, recipes, metrics, bars, given.root, given.keep, given.gain)
    missed = missed_bars(read_json(folder / "record.json"))
    print("\n".join([str(folder), *missed]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
