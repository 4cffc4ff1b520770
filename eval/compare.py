"""`vla-rl compare A B`: two evaluations over the same specs, paired.

Two rates over different episodes differ by luck of the draw; the same initial states under two policies cancel most
of it. Runs are paired by `EpisodeSpec.key`, and refused if their protocols, environments or initial states differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.eval.protocol import protocol_differences
from vla_rl.eval.results import EpisodeRow, Rate, finished_rows, read_rows
from vla_rl.eval.statistics import Interval, mcnemar_exact, paired_difference_interval, paired_minimum_detectable_effect
from vla_rl.telemetry.files import read_json


class CompareError(UserError):
    """Two runs whose comparison would say nothing."""


@dataclass(frozen=True)
class EvaluatedRun:
    """A finished evaluation as its files tell it."""

    path: Path
    summary: Mapping[str, Any]
    rows: Mapping[str, EpisodeRow]
    """By `EpisodeSpec.key`."""


@dataclass(frozen=True)
class Comparison:
    """B against A over the pairs that both ran."""

    first: Rate
    second: Rate
    wins: tuple[str, ...]
    """Keys where A failed and B succeeded."""
    losses: tuple[str, ...]
    """Keys where A succeeded and B failed."""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def difference(self) -> float:
        """rate(B) - rate(A)."""
        return self.second.value - self.first.value

    @property
    def interval(self) -> Interval:
        """Tango's 95 % interval of the difference."""
        return paired_difference_interval(len(self.wins), len(self.losses), self.first.trials)

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar."""
        return mcnemar_exact(len(self.wins), len(self.losses))


def load_run(path: Path) -> EvaluatedRun:
    """Read a finished evaluation. Raises CompareError if it is none, is incomplete, or has several outcomes of one spec."""
    summary_file = path / "summary.json"
    if not summary_file.is_file():
        raise CompareError(f"{path} holds no finished evaluation (no summary.json); {_below(path)}")
    summary = read_json(summary_file)
    if "protocol" not in summary:
        raise CompareError(f"{path} is a run of another command, not an evaluation (no protocol in summary.json); {_below(path)}")
    if not summary["complete"]:
        missing = summary["missing"]
        raise CompareError(
            f"{path} is incomplete: {len(missing)} of {summary['planned']} specs have no outcome ({', '.join(missing[:5])}); "
            f"start its evaluation again to run them"
        )
    finished = sorted(finished_rows(read_rows(path / "episodes.jsonl")), key=lambda row: row.place)
    rows = {row.key: row for row in finished}
    if len(rows) != len(finished):
        raise CompareError(f"{path} has several outcomes of one spec, in several conditions; evaluate each condition in a run of its own")
    return EvaluatedRun(path, summary, rows)


def _below(path: Path) -> str:
    """What to do with a folder that is no evaluation."""
    evaluations = [str(file.parent) for file in sorted(path.glob("*/summary.json")) if "protocol" in read_json(file)]
    return f"evaluations in it: {', '.join(evaluations)}" if evaluations else "run `vla-rl eval` with that run_dir first"


def unlike(first: EvaluatedRun, second: EvaluatedRun) -> list[str]:
    """A line for everything but the policy in which two runs differ."""
    lines = [f"protocol {line}" for line in protocol_differences(first.summary["protocol"], second.summary["protocol"])]
    one, other = first.summary["env"], second.summary["env"]
    lines += [
        f"env {name}: {one.get(name)} against {other.get(name)}"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
    moved = [key for key in sorted(first.rows.keys() & second.rows.keys()) if first.rows[key].init_hash != second.rows[key].init_hash]
    if moved:
        lines.append(f"initial states differ in {len(moved)} specs, for example {moved[0]}")
    return lines


def compare_rows(first: Mapping[str, EpisodeRow], second: Mapping[str, EpisodeRow]) -> Comparison:
    """Pair two sets of finished rows by key. Raises CompareError if no key is in both."""
    shared = [key for key in first if key in second]
    if not shared:
        raise CompareError("the two runs share no spec: nothing can be paired. Evaluate the same suite, tasks, inits and seed")
    return Comparison(
        first=Rate.of([first[key] for key in shared]),
        second=Rate.of([second[key] for key in shared]),
        wins=tuple(key for key in shared if second[key].success and not first[key].success),
        losses=tuple(key for key in shared if first[key].success and not second[key].success),
        only_first=tuple(key for key in first if key not in second),
        only_second=tuple(key for key in second if key not in first),
    )


def run_compare(run_a: Path, run_b: Path, allow_unlike: bool = False) -> int:
    """Print the paired comparison of two evaluations; returns 0.

    Raises CompareError naming every difference if protocol, environment or initial states are unlike, unless
    `allow_unlike`; then the differences are printed above the result.
    """
    first, second = load_run(Path(run_a)), load_run(Path(run_b))
    differences = unlike(first, second)
    if differences and not allow_unlike:
        listed = "\n  ".join(differences)
        raise CompareError(
            f"{first.path} and {second.path} were not evaluated alike:\n  {listed}\nPass --allow-unlike to compare them anyway."
        )
    comparison = compare_rows(first.rows, second.rows)
    print(comparison_text(first.path, second.path, comparison, differences))
    return 0


def comparison_text(name_a: Path, name_b: Path, comparison: Comparison, differences: Sequence[str] = ()) -> str:
    """What `vla-rl compare` prints."""
    low, high = comparison.interval
    discordant, pairs = len(comparison.wins) + len(comparison.losses), comparison.first.trials
    detectable = paired_minimum_detectable_effect(discordant, pairs)
    lines = [f"UNLIKE, the difference may have another cause: {line}" for line in differences]
    lines += [
        f"A  {name_a}: {comparison.first}",
        f"B  {name_b}: {comparison.second}",
        f"B - A over {pairs} pairs: {100 * comparison.difference:+.1f} points, 95 % interval [{100 * low:+.1f}, {100 * high:+.1f}] (Tango)",
        f"{len(comparison.wins)} wins, {len(comparison.losses)} losses, McNemar exact p = {comparison.p_value:.3g}",
        f"with so many pairs in disagreement, {_detectable_text(detectable)}",
    ]
    for name, keys in (("only in A", comparison.only_first), ("only in B", comparison.only_second)):
        if keys:
            lines.append(f"left out, {name}: {len(keys)} specs, for example {keys[0]}")
    lines += [f"win   {key}" for key in comparison.wins] + [f"loss  {key}" for key in comparison.losses]
    return "\n".join(lines)


def _detectable_text(detectable: float) -> str:
    if detectable >= 1:
        return "no difference is detectable with a power of 80 %"
    return f"a difference of {100 * detectable:.1f} points is the smallest detectable with a power of 80 %"
