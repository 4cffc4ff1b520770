"""The result of an evaluation: coverage, rates, protocol and environment, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_rl.eval.config import EvalConfig
from vla_rl.eval.contestants import Contestant
from vla_rl.eval.plan import Planned
from vla_rl.eval.protocol import EvalProtocol, effective_protocol
from vla_rl.eval.results import EpisodeRow, SuiteResult, finished_rows, suite_results
from vla_rl.sim.base import EnvSpec
from vla_rl.telemetry.environment import environment
from vla_rl.telemetry.files import read_json


@dataclass(frozen=True)
class Summary:
    """The result of an evaluation, computed from its rows."""

    planned: int
    missing: tuple[str, ...]
    """`condition | key` of the specs without an outcome; empty when complete."""
    crashes: int
    """Rows of lost episodes; they count as nothing else."""
    results: tuple[SuiteResult, ...]
    protocol: Mapping[str, Any]
    """What really ran, with its hash and `deviations` from the published protocol."""
    env: Mapping[str, Any]
    """The simulator: kind, conventions, resolution, versions, renderer."""
    actor: Mapping[str, Any]
    """Who acted."""

    @property
    def complete(self) -> bool:
        """Whether every spec has an outcome."""
        return not self.missing

    @property
    def rate(self) -> float:
        """Success rate of the first condition, tasks weighted equally."""
        return self.results[0].mean_of_tasks if self.results else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self) | {"results": [result.to_dict() for result in self.results]}
        return {"complete": self.complete} | plain | {"environment": environment()}


def summarize(
    planned: Sequence[Planned],
    rows: Sequence[EpisodeRow],
    config: EvalConfig,
    protocol: EvalProtocol,
    contestant: Contestant,
    env: EnvSpec,
) -> Summary:
    """Everything that is reported, recomputed from the rows."""
    simulator = {"kind": env.kind, "views": list(env.views), "resolution": env.resolution}
    return _summary(
        planned,
        rows,
        protocol=_protocol_block(config, protocol, contestant, env),
        env=simulator | env.conventions.to_dict() | dict(env.provenance),
        actor=_actor_block(config, contestant),
    )


def summary_of_finished(path: Path, planned: Sequence[Planned], rows: Sequence[EpisodeRow]) -> Summary | None:
    """The summary of an evaluation whose every spec has an outcome, with the blocks that its `summary.json` has; else None."""
    if not path.is_file():
        return None
    written = read_json(path)
    summary = _summary(planned, rows, written["protocol"], written["env"], written["actor"])
    return summary if summary.complete else None


def _summary(
    planned: Sequence[Planned],
    rows: Sequence[EpisodeRow],
    protocol: Mapping[str, Any],
    env: Mapping[str, Any],
    actor: Mapping[str, Any],
) -> Summary:
    """Coverage and rates of the planned episodes, in their order."""
    place = {entry.pairing: number for number, entry in enumerate(planned)}
    counted = sorted((row for row in rows if row.pairing in place), key=lambda row: place[row.pairing])
    done = {row.pairing for row in finished_rows(counted)}
    return Summary(
        planned=len(planned),
        missing=tuple(" | ".join(entry.pairing) for entry in planned if entry.pairing not in done),
        crashes=sum(row.crashed for row in counted),
        results=tuple(suite_results(counted)),
        protocol=protocol,
        env=env,
        actor=actor,
    )


def _protocol_block(config: EvalConfig, protocol: EvalProtocol, contestant: Contestant, env: EnvSpec) -> dict[str, Any]:
    effective, deviations = effective_protocol(
        protocol,
        resolution=env.resolution,
        orientation=env.conventions.orientation,
        executed_horizon=contestant.executed_horizon,
        inits_per_task=config.episodes_per_task,
    )
    if config.actor == "replay":
        deviations.append(f"inits: those of {config.dataset} in place of the protocol's, with the step limits they were recorded under")
    return effective.to_dict() | {"deviations": deviations, "published_hash": protocol.to_dict()["hash"], "split": config.split}


def _actor_block(config: EvalConfig, contestant: Contestant) -> dict[str, Any]:
    needs = contestant.actor.needs
    return {
        "kind": config.actor,
        "condition": config.label,
        "checkpoint": config.policy.checkpoint or config.policy.remote,
        "weights": contestant.weights,
        "chunk_length": needs.chunk_length,
        "views": list(needs.views),
        "privileged": needs.privileged,
        "prompt": config.prompt,
        "seed": config.seed,
        "notes": list(contestant.notes),
    }


def summary_text(summary: Summary) -> str:
    """What `vla-rl eval` prints at the end."""
    protocol = summary.protocol
    lines = [f"protocol {protocol['name']} (hash {protocol['hash']})"]
    lines += [f"  departs from the published one in {line}" for line in protocol["deviations"]]
    lines += [f"  note: {note}" for note in summary.actor["notes"]]
    for result in summary.results:
        lines.append(f"{result.condition}, {result.suite}: {result.pooled}")
        if result.bootstrap is not None:
            low, high = result.bootstrap
            lines += [f"  task {task}: {rate}" for task, rate in result.tasks.items()]
            mean = f"{100 * result.mean_of_tasks:.1f} %"
            lines.append(f"  mean of tasks {mean}, task-clustered bootstrap [{100 * low:.1f}, {100 * high:.1f}]")
        lines.append(f"  smallest difference that so many unpaired episodes detect (power 80 %): {100 * result.detectable:.1f} points")
    if summary.crashes:
        lines.append(f"{summary.crashes} crashed episodes, counted as nothing else (see `reason` in episodes.jsonl)")
    if not summary.complete:
        lines.append(f"INCOMPLETE: {len(summary.missing)} of {summary.planned} specs have no outcome, so this is no result:")
        lines += [f"  {name}" for name in summary.missing[:10]]
        lines.append("Start the same command again to run them.")
    return "\n".join(lines)
