"""`vla-rl collect`: scripted demonstrations through parallel workers into a folder of episodes.

Every episode is a function of the recipe and its number: which worker ran it, when, and after how many interruptions leaves no
trace in its file. A finished episode survives whatever happens to the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vla_rl.actors import scripted_actor
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.corrected import corrected_episodes
from vla_rl.collection.operators import PageOperator, ScriptedOperatorConfig
from vla_rl.collection.plan import noisy_expert, plan_demonstrations, provenance_of, task_numbers
from vla_rl.collection.recorder import Recorder, fill_frames
from vla_rl.collection.session import record_session
from vla_rl.datasets.collected import Store, collected_store
from vla_rl.datasets.store import merge
from vla_rl.episode import Episode, EpisodeSpec
from vla_rl.eval.results import EpisodeRow
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import Env, EnvPool
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import MakeEnv, make_pool
from vla_rl.telemetry.files import read_jsonl, write_json, write_text
from vla_rl.telemetry.progress import EpisodeProgress
from vla_rl.telemetry.run_directory import RunDirectory
from vla_rl.telemetry.spans import close_span_log, open_span_log, span

__all__ = ["CollectConfig", "CollectSummary", "collect", "run_collect"]


@dataclass(frozen=True)
class CollectSummary:
    """What a run directory holds."""

    planned: int
    """Episodes of the recipe."""
    finished: int
    """Those that ended as success or failure."""
    successes: int
    episodes: int
    """Files written."""
    steps: int
    """Control steps of the files."""
    bytes: int
    """Size of the files."""
    tasks: Mapping[str, str]
    """`SUITE task TASK` -> successes of finished, as `k/n`."""
    recorded_now: int
    """Episodes that ended in this start of the command."""
    wall_s: float
    """Time this start took (s)."""
    steps_per_s: float
    """Control steps of this start per second."""

    @property
    def complete(self) -> bool:
        """Whether every episode has an outcome."""
        return self.finished == self.planned


def run_collect(config: CollectConfig) -> int:
    """Collect, or go on collecting, and print a summary; 0 if every planned episode has an outcome, else 1."""
    summary = collect(config)
    print(summary_text(summary, config.run_dir, isinstance(config.operator, PageOperator)))
    return 0 if summary.complete else 1


def collect(config: CollectConfig, make_env: MakeEnv = make_env) -> CollectSummary:
    """Record what is missing of a recipe into `episodes/`, `episodes.jsonl` and `summary.json` of its run directory.

    Raises ConfigError and SpecError for what the recipe cannot mean, CheckpointError for a policy that is none, FolderInUseError
    if another process records into the directory, StorageError on a full disk, PortTaken.
    """
    specs = plan_demonstrations(config)
    _require_policy(config)
    with RunDirectory.open(config.run_dir, config, free_to_change(config)) as run:
        return _collect(config, specs, run, make_env)


def _collect(config: CollectConfig, specs: Sequence[EpisodeSpec], run: RunDirectory, make_env: MakeEnv) -> CollectSummary:
    """What is missing, then the summary of everything."""
    store = collected_store(run.path, config.format, config.pictures, config.compression)
    started = time.perf_counter()
    open_span_log(run.spans_file, role="collect")
    try:
        with store.writing(), span("collect"):
            missing = _missing(config, specs, run, store)
            record = record_session if isinstance(config.operator, PageOperator) else _record
            recorded = record(config, run, store, specs, missing, make_env) if missing else []
    finally:
        close_span_log()
    summary = _summarize(specs, list(_done(config, read_jsonl(run.episodes_file)).values()), recorded, time.perf_counter() - started)
    write_json(run.path / "summary.json", asdict(summary))
    if config.libero_files and summary.complete and summary.episodes:
        merge([run.path / "episodes"], run.path / "libero")
    return summary


def _require_policy(config: CollectConfig) -> None:
    """Raise CheckpointError for a checkpoint that is none, before simulators start, which takes a while."""
    if config.checkpoint is not None:
        from vla_rl.policies.published import detect_layout, resolve_folder

        detect_layout(resolve_folder(config.checkpoint))


def free_to_change(config: CollectConfig) -> tuple[str, ...]:
    """Key paths that may change when a run goes on, because the episodes that are there stay the recipe's.

    How a person reaches the page and moves the arm; in how many processes environments run, unless a policy is corrected by the
    script (the size of its batches may change the last bits); and more episodes, where only one task counts them.
    """
    person = isinstance(config.operator, PageOperator)
    free = [f"operator.{field.name}" for field in fields(PageOperator) if field.name != "kind"] if person else []
    if not isinstance(config.operator, ScriptedOperatorConfig):
        free.append("pool")
    rows = read_jsonl(Path(config.run_dir) / "episodes.jsonl")
    if len(task_numbers(config)) == 1 and all(row["number"] < config.episodes_per_task for row in rows):
        free.append("episodes_per_task")
    return tuple(free)


def _missing(config: CollectConfig, specs: Sequence[EpisodeSpec], run: RunDirectory, store: Store) -> list[int]:
    """Numbers of the episodes without an outcome, or whose file is gone. Rows of what will run again are removed."""
    present = set(store.numbers())
    rows = read_jsonl(run.episodes_file)
    valid = [row for row in rows if row["outcome"] != "crash" and (not row["kept"] or row["number"] in present)]
    if len(valid) != len(rows):
        write_text(run.episodes_file, "".join(json.dumps(row) + "\n" for row in valid))
    done = _done(config, valid)
    return [number for number in range(len(specs)) if number not in done]


def _done(config: CollectConfig, rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Episodes that need not run again, with their rows.

    A scripted episode is tried once, whatever comes out. A person wants demonstrations: a take that failed and is not kept, or
    was discarded, leaves its scene to be shown again.
    """
    person = isinstance(config.operator, PageOperator)
    ended = [row for row in rows if row["outcome"] in ("success", "failure")]
    return {row["number"]: row for row in ended if row["kept"] or not person}


def _record(
    config: CollectConfig, run: RunDirectory, store: Store, specs: Sequence[EpisodeSpec], missing: Sequence[int], make_env: MakeEnv
) -> list[EpisodeRow]:
    """Run the missing episodes and write each when it ends."""
    numbers = {specs[number].key: number for number in missing}
    rows: list[EpisodeRow] = []
    with ExitStack() as stack:
        with span("start_envs"):
            pool = stack.enter_context(closing(make_pool(config.pool, config.env, make_env)))
            fill = _renderer(config, make_env, stack)
        recorder = Recorder(store, run.episodes_file, pool.spec, config.frame_every, config.keep_failures)
        progress = stack.enter_context(EpisodeProgress("collect", len(specs), len(specs) - len(missing), config.show_progress))
        for episode in _episodes(config, pool, [specs[number] for number in missing]):
            with span("write_episode"):
                kept = fill_frames(episode, fill, config.frame_every) if fill and recorder.keeps(episode) else episode
                row, size = recorder.record(numbers[episode.spec.key], kept, provenance_of(config, episode.spec))
                recorder.require_room(size)
            rows.append(row)
            progress.ended(row.success, row.crashed)
    return rows


def _renderer(config: CollectConfig, make_env: MakeEnv, stack: ExitStack) -> Env | None:
    """The env that re-simulates kept episodes, if they were not rendered live."""
    if config.render == "live":
        return None
    return stack.enter_context(closing(make_env(config.env, lambda: False, 0, nullcontext())))


def _episodes(config: CollectConfig, pool: EnvPool, specs: Sequence[EpisodeSpec]) -> Iterator[Episode]:
    """Episodes as they end."""
    if config.operator is not None:
        yield from corrected_episodes(config, pool, specs)
        return
    actor = scripted_actor(lambda spec: noisy_expert(config, spec))
    record_every = config.frame_every if config.render == "live" else 0
    look = look_of(actor.needs, record_every=record_every, record_states=True)
    yield from run_episodes(pool, actor, ListSource(specs), lambda spec: look)


def _summarize(
    specs: Sequence[EpisodeSpec], finished: Sequence[Mapping[str, Any]], recorded: Sequence[EpisodeRow], wall_s: float
) -> CollectSummary:
    kept = [row for row in finished if row["kept"]]
    tasks = {
        f"{spec.suite} task {spec.task}": [row for row in finished if (row["suite"], row["task"]) == (spec.suite, spec.task)]
        for spec in specs
    }
    return CollectSummary(
        planned=len(specs),
        finished=len(finished),
        successes=sum(row["success"] for row in finished),
        episodes=len(kept),
        steps=sum(row["steps"] for row in kept),
        bytes=sum(row["bytes"] for row in kept),
        tasks={name: f"{sum(row['success'] for row in of_task)}/{len(of_task)}" for name, of_task in tasks.items()},
        recorded_now=len(recorded),
        wall_s=wall_s,
        steps_per_s=sum(row.steps for row in recorded) / wall_s,
    )


def summary_text(summary: CollectSummary, run_dir: str, person: bool = False) -> str:
    """The summary as people read it; `person`: somebody shows the episodes, who may go on another day."""
    lines = [f"{name}: {counts} succeeded" for name, counts in summary.tasks.items()]
    lines.append(f"{summary.episodes} episodes, {summary.steps} control steps, {summary.bytes / 2**20:.1f} MiB in {run_dir}")
    lines.append(f"this start: {summary.recorded_now} episodes in {summary.wall_s:.0f} s, {summary.steps_per_s:.1f} control steps/s")
    if not summary.complete:
        lost = summary.planned - summary.finished
        why = "are not recorded yet" if person else "crashed twice (reasons in episodes.jsonl)"
        lines.append(f"INCOMPLETE: {lost} of {summary.planned} episodes {why}; start again to go on")
    return "\n".join(lines)
