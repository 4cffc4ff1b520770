"""What a report is made of: the phases found in a run directory, as their files tell them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.config import read_yaml
from vla_rl.errors import UserError
from vla_rl.eval.results import EpisodeRow, SuiteResult, finished_rows, read_rows, suite_results
from vla_rl.telemetry.files import read_json, read_jsonl
from vla_rl.telemetry.spans import leaf_shares

STEP_KEYS = ("update", "step", "updates")
"""Names under which a metrics row says where it stands, best first."""
NO_SERIES = frozenset({*STEP_KEYS, "time", "epoch", "version"})
"""Numbers of a metrics row that are no curve."""
DEPTH = 3
"""How deep phases may lie below the directory that is reported (`demo/eval_noop` lies one below `demo`)."""


WORTHINESS = ("policy", "expert", "replay", "random", "noop")
"""Which actor a report is about, if several were evaluated: the first of these."""


class ReportError(UserError):
    """A directory of which there is nothing to report."""


@dataclass(frozen=True)
class Phase:
    """One run directory: an evaluation, a training, a collection."""

    path: Path
    name: str
    """Path relative to the reported directory; `.` for itself."""
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    """`summary.json`; empty if the phase wrote none."""
    rows: tuple[EpisodeRow, ...]
    """Episodes of an evaluation that has written a summary."""
    metrics: tuple[Mapping[str, Any], ...]
    spans: tuple[Mapping[str, Any], ...]

    @property
    def is_evaluation(self) -> bool:
        """Whether it has a success rate to report."""
        return "protocol" in self.summary

    @property
    def is_unfinished(self) -> bool:
        """Whether it is an evaluation, as its recipe says, without any result yet."""
        return "protocol" in self.config and not (self.is_evaluation and self.finished)

    @property
    def is_collection(self) -> bool:
        """Whether it recorded demonstrations."""
        return "recorded_now" in self.summary

    @property
    def is_policy(self) -> bool:
        """Whether a policy was evaluated (not a control)."""
        return self.is_evaluation and self.summary["actor"]["kind"] == "policy"

    @property
    def results(self) -> list[SuiteResult]:
        """Rates, recomputed from the rows."""
        return suite_results(self.rows)

    @property
    def finished(self) -> list[EpisodeRow]:
        """Rows with a real outcome."""
        return finished_rows(self.rows)


def read_phases(run_dir: Path) -> list[Phase]:
    """Every phase in a directory, in the order in which they began.

    Raises ReportError if there is none.
    """
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory; give the run_dir of a training, an evaluation or a pipeline")
    folders = [folder for folder in _folders(run_dir, DEPTH) if (folder / "config.yaml").is_file()]
    if not folders:
        raise ReportError(f"{run_dir} holds no run (no config.yaml in it or below it)")
    return sorted((_read_phase(run_dir, folder) for folder in folders), key=_began)


def _began(phase: Phase) -> tuple[bool, float]:
    """The reported directory itself first, then by the first span: a recipe that is written again, or copied, has another time."""
    starts = [row["start"] for row in phase.spans]
    return phase.name != ".", min(starts, default=(phase.path / "config.yaml").stat().st_mtime)


def _folders(folder: Path, depth: int) -> Iterable[Path]:
    yield folder
    if depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink() and child.name not in ("checkpoints", "videos"):
                yield from _folders(child, depth - 1)


def _read_phase(run_dir: Path, folder: Path) -> Phase:
    summary = _read_json(folder / "summary.json")
    return Phase(
        path=folder,
        name=str(folder.relative_to(run_dir)),
        config=read_yaml(folder / "config.yaml"),
        environment=_read_json(folder / "environment.json"),
        summary=summary,
        rows=tuple(read_rows(folder / "episodes.jsonl")) if "protocol" in summary else (),
        metrics=tuple(read_jsonl(folder / "metrics.jsonl")),
        spans=tuple(read_jsonl(folder / "spans.jsonl")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


Curve = list[tuple[float, float]]
"""(step, value) in order."""


def curves(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Every numeric series of metrics rows by name; rows without a step count from 0. Values that are no finite number are left out."""
    found: dict[str, Curve] = {}
    for number, row in enumerate(metrics):
        step = next((float(row[key]) for key in STEP_KEYS if isinstance(row.get(key), int | float)), float(number))
        for name, value in row.items():
            if name not in NO_SERIES and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
                found.setdefault(name, []).append((step, float(value)))
    return found


@dataclass(frozen=True)
class TimeShare:
    """Where the wall time of one kind of span went."""

    root: str
    """Name of the outermost spans."""
    seconds: float
    shares: Mapping[str, float]
    """Leaf name -> share, largest first, `unaccounted` last; they add up to 1."""


def time_shares(spans: Iterable[Mapping[str, Any]]) -> list[TimeShare]:
    """The breakdown of every outermost span name, the longest first."""
    spans = list(spans)
    seconds: dict[str, float] = {}
    for row in spans:
        if row["depth"] == 0 and not row["leaf"]:
            seconds[row["name"]] = seconds.get(row["name"], 0.0) + row["s"]
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [TimeShare(root, total, leaf_shares(spans, root)) for root, total in ordered if total > 0]


def reported_evaluations(phases: Iterable[Phase]) -> list[Phase]:
    """Evaluations on test episodes; those on the validation split (during training) only if there is nothing else."""
    evaluations = [phase for phase in phases if phase.is_evaluation and phase.finished]
    tests = [phase for phase in evaluations if phase.summary["protocol"]["split"] == "test"]
    return tests or evaluations


def main_evaluation(phases: Iterable[Phase]) -> Phase | None:
    """The evaluation that the report is about: of the worthiest actor, with the most episodes, the last one of equals."""
    evaluations = reported_evaluations(phases)
    return max(reversed(evaluations), key=_weight) if evaluations else None


def _weight(phase: Phase) -> tuple[int, int]:
    return -WORTHINESS.index(phase.summary["actor"]["kind"]), len(phase.finished)


def controls_of(phases: Iterable[Phase], main: Phase) -> list[Phase]:
    """Evaluations of actors that are no policy, beside the main one."""
    return [phase for phase in reported_evaluations(phases) if phase is not main and not phase.is_policy]
