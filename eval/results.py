"""Rows of episodes, and every number that is computed from them.

`episodes.jsonl` holds one row per episode that was run; rates, intervals and coverage are always recomputed from
these rows. A spec may have crashed rows (its worker raised, hung or died), which never count as failures, and at most
one row with a real outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vla_rl.episode import Episode, Outcome
from vla_rl.errors import UserError
from vla_rl.eval.statistics import Interval, clustered_bootstrap, minimum_detectable_effect, wilson_interval
from vla_rl.telemetry.environment import source_commit
from vla_rl.telemetry.files import read_jsonl


class ResultError(UserError):
    """Rows from which no result can be computed."""


@dataclass(frozen=True)
class EpisodeRow:
    """One episode of an evaluation."""

    key: str
    """`EpisodeSpec.key`: rows of two runs are paired by it."""
    condition: str
    """What was compared: `before`, `after`, `no-op`, ..."""
    suite: str
    task: int
    init: str
    init_hash: str
    """sha256 of the simulator state that the episode started from; empty for a crash before the first observation."""
    scene_seed: int
    seed: int
    """`EpisodeSpec.sample`: the index of the policy's noise."""
    steps: int
    """Executed control steps, without settling."""
    success: bool
    outcome: str
    """`success`, `failure` or `crash`."""
    reason: str
    terminated: bool
    """Success ended the episode."""
    truncated: bool
    """The time limit ended the episode."""
    wall_s: float
    """Wall time from reset to end (s)."""
    instruction: str = ""
    """The prompt that the actor saw."""
    goal: str = ""
    """The goal in place of the task's own."""
    video: str = ""
    """Path relative to the run directory."""
    weights: str = ""
    """Digest of the weights that acted."""
    commit: str = ""
    """Of vla-rl, as it ran the episode; `-dirty` where files differed from it. Empty in rows older than this field."""

    @property
    def crashed(self) -> bool:
        """Whether the episode was lost to a fault."""
        return self.outcome == Outcome.CRASH.value

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Its place among other episodes: suite, task, number of the init, seed."""
        return self.suite, self.task, int(self.init.partition(":")[2]), self.seed

    @property
    def pairing(self) -> tuple[str, str]:
        """What identifies an episode inside a run."""
        return self.condition, self.key


def row_of(episode: Episode, condition: str, weights: str = "", video: str = "") -> EpisodeRow:
    """The row of an episode. Rates never come from anywhere else."""
    spec, last = episode.spec, episode.steps[-1] if episode.steps else None
    return EpisodeRow(
        key=spec.key,
        condition=condition,
        suite=spec.suite,
        task=spec.task,
        init=spec.init,
        init_hash=str(episode.provenance.get("initial_state_sha256", "")),
        scene_seed=spec.scene_seed,
        seed=spec.sample,
        steps=episode.num_steps,
        success=episode.success,
        outcome=episode.outcome.value,
        reason=episode.reason,
        terminated=last is not None and last.terminated,
        truncated=last is not None and last.truncated,
        wall_s=round(episode.wall_s, 3),
        instruction=episode.steps[0].observation.prompt if episode.steps else spec.prompt,
        goal=spec.goal,
        video=video,
        weights=weights,
        commit=source_commit(),
    )


def read_rows(path: Path) -> list[EpisodeRow]:
    """All rows of an `episodes.jsonl`. Raises ResultError naming the row and the fields that it lacks."""
    known = {field.name for field in fields(EpisodeRow)}
    rows = []
    for number, values in enumerate(read_jsonl(path), start=1):
        try:
            rows.append(EpisodeRow(**{name: value for name, value in values.items() if name in known}))
        except TypeError as error:
            raise ResultError(f"{path}: row {number} is not a row of an evaluation ({error})") from error
    return rows


def finished_rows(rows: Iterable[EpisodeRow]) -> list[EpisodeRow]:
    """The rows with a real outcome. Raises ResultError naming the specs that have more than one."""
    finished = [row for row in rows if not row.crashed]
    seen: set[tuple[str, str]] = set()
    twice = []
    for row in finished:
        (twice.append(row.pairing) if row.pairing in seen else seen.add(row.pairing))
    if twice:
        names = ", ".join(f"{key} ({condition})" for condition, key in twice[:5])
        raise ResultError(f"{len(twice)} specs have more than one outcome, so that no rate is right: {names}; remove the duplicate rows")
    return finished


@dataclass(frozen=True)
class Rate:
    """A success rate with its uncertainty."""

    successes: int
    trials: int
    interval: Interval
    """Wilson, 95 %."""

    @classmethod
    def of(cls, rows: Sequence[EpisodeRow]) -> Rate:
        """Count the successes of finished rows."""
        successes = sum(row.success for row in rows)
        return cls(successes, len(rows), wilson_interval(successes, len(rows)))

    @property
    def value(self) -> float:
        """The rate itself; 0 without trials."""
        return self.successes / self.trials if self.trials else 0.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes}/{self.trials} = {100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rate": self.value, "interval": list(self.interval)}


@dataclass(frozen=True)
class SuiteResult:
    """One condition on one suite."""

    condition: str
    suite: str
    pooled: Rate
    tasks: Mapping[int, Rate]
    mean_of_tasks: float
    """The suite's mean: each task has the same weight."""
    bootstrap: Interval | None
    """Task-clustered 95 % interval of that mean; None for a single task, which has no spread between tasks."""
    detectable: float
    """The smallest difference of rates that this many unpaired episodes detect with a power of 0.8."""
    mean_steps_of_successes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "condition": self.condition,
            "suite": self.suite,
            **self.pooled.to_dict(),
            "mean_of_tasks": self.mean_of_tasks,
            "bootstrap": list(self.bootstrap) if self.bootstrap else None,
            "minimum_detectable_effect": self.detectable,
            "mean_steps_of_successes": self.mean_steps_of_successes,
            "tasks": {str(task): rate.to_dict() for task, rate in self.tasks.items()},
        }


def suite_results(rows: Iterable[EpisodeRow]) -> list[SuiteResult]:
    """Rates of every condition and suite, in the order in which they first appear; crashes do not count."""
    groups: dict[tuple[str, str], list[EpisodeRow]] = {}
    for row in finished_rows(rows):
        groups.setdefault((row.condition, row.suite), []).append(row)
    return [_suite_result(condition, suite, group) for (condition, suite), group in groups.items()]


def _suite_result(condition: str, suite: str, rows: Sequence[EpisodeRow]) -> SuiteResult:
    by_task = {task: [row for row in rows if row.task == task] for task in sorted({row.task for row in rows})}
    tasks = {task: Rate.of(group) for task, group in by_task.items()}
    outcomes = [[row.success for row in group] for group in by_task.values()]
    steps = [row.steps for row in rows if row.success]
    pooled = Rate.of(rows)
    return SuiteResult(
        condition=condition,
        suite=suite,
        pooled=pooled,
        tasks=tasks,
        mean_of_tasks=sum(rate.value for rate in tasks.values()) / len(tasks),
        bootstrap=clustered_bootstrap(outcomes) if len(tasks) > 1 else None,
        detectable=minimum_detectable_effect(pooled.value, pooled.trials),
        mean_steps_of_successes=sum(steps) / len(steps) if steps else None,
    )
