"""`vla-rl eval`: run every episode of a plan exactly once, and compute everything from the rows they leave.

A row is appended as soon as its episode ends, so that an evaluation that was killed goes on where it was. A spec
that crashed (its worker raised, hung or died, twice) has no outcome: the result is then incomplete, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rl.config import ConfigError
from vla_rl.conventions import Orientation
from vla_rl.episode import Episode, EpisodeSpec, Float32, Outcome
from vla_rl.eval.config import EvalConfig
from vla_rl.eval.contestants import Contestant, known_weights, make_contestant, require_experts
from vla_rl.eval.plan import Planned, plan_episodes
from vla_rl.eval.protocol import EvalProtocol, get_protocol
from vla_rl.eval.results import EpisodeRow, finished_rows, read_rows, row_of
from vla_rl.eval.summary import Summary, summarize, summary_of_finished, summary_text
from vla_rl.eval.video import video_frames, video_name, write_video
from vla_rl.rollout import ListSource, connect, look_of, run_episodes
from vla_rl.sim.base import EnvPool, EnvSpec, Look
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import MakeEnv, make_pool
from vla_rl.telemetry.files import append_jsonl, write_json
from vla_rl.telemetry.progress import EpisodeProgress
from vla_rl.telemetry.run_directory import RunDirectory, require_same_recipe
from vla_rl.telemetry.spans import close_span_log, open_span_log, span

__all__ = ["EvalConfig", "Summary", "evaluate", "run_eval"]


@dataclass(frozen=True)
class _Recorder:
    """Turns episodes into rows and videos of one run."""

    run: RunDirectory
    conditions: Mapping[str, str]
    """`EpisodeSpec.key` -> condition."""
    filmed: frozenset[str]
    """Keys of the episodes of which a video is written."""
    every: int
    weights: str
    orientation: Orientation
    rate_hz: int

    def record(self, episode: Episode) -> EpisodeRow:
        """Write the episode's video, then append its row."""
        condition, video = self.conditions[episode.spec.key], ""
        if episode.spec.key in self.filmed and episode.frames():
            with span("write_video"):
                video = f"videos/{video_name(episode, condition)}"
                write_video(self.run.path / video, video_frames(episode, self.orientation), max(1, round(self.rate_hz / self.every)))
        row = row_of(episode, condition, self.weights, video)
        with span("write_rows"):
            append_jsonl(self.run.episodes_file, asdict(row))
        return row


def run_eval(config: EvalConfig) -> int:
    """Evaluate and print; 0 if every spec has an outcome, else 1. Spans go to the run's `spans.jsonl`."""
    open_span_log(Path(config.run_dir) / "spans.jsonl", role="eval")
    try:
        summary = evaluate(config)
    finally:
        close_span_log()
    print(summary_text(summary))
    return 0 if summary.complete else 1


def evaluate(config: EvalConfig, make_env: MakeEnv = make_env) -> Summary:
    """Run what is missing of an evaluation and write `episodes.jsonl`, `summary.json` and `videos/`.

    Its spans go to whatever log is open, so that a training that evaluates sees them in its own.
    Raises ConventionMismatch or ConnectError if actor and env do not fit, ConfigError for a run directory of another recipe
    or of other weights, FolderInUseError for one that another process writes to, and what the environment and the checkpoint raise.
    """
    config.require_policy()
    protocol = get_protocol(config.protocol)
    recorded = _recorded_actions(config)
    planned = plan_episodes(config, protocol, [spec for spec, _ in recorded])
    if config.actor == "expert":
        require_experts(entry.spec for entry in planned)
    finished = _finished_before(config, planned)
    if finished is not None:
        return finished
    with RunDirectory.open(config.run_dir, config) as run, span("eval"), ExitStack() as stack:
        with span("load_actor"):
            contestant = make_contestant(config, {spec.key: actions for spec, actions in recorded})
            stack.enter_context(closing(contestant.actor))
        with span("start_envs"):
            pool = stack.enter_context(closing(make_pool(config.pool, config.env, make_env)))
        connect(pool.spec, contestant.actor.needs)
        summary = _evaluate(config, run, planned, protocol, contestant, pool)
        with span("stop_envs"):
            stack.close()
    return summary


def _finished_before(config: EvalConfig, planned: Sequence[Planned]) -> Summary | None:
    """The result of a run directory that has nothing left to run, so that starting again costs nothing and writes nothing; else None.

    Raises ConfigError if the directory holds another recipe, before anything starts.
    """
    folder = Path(config.run_dir)
    if not (folder / "config.yaml").is_file():
        return None
    require_same_recipe(folder, config)
    rows = read_rows(folder / "episodes.jsonl")
    same_weights = {row.weights for row in rows} == {known_weights(config)}
    return summary_of_finished(folder / "summary.json", planned, rows) if same_weights else None


def _evaluate(
    config: EvalConfig, run: RunDirectory, planned: Sequence[Planned], protocol: EvalProtocol, contestant: Contestant, pool: EnvPool
) -> Summary:
    rows = read_rows(run.episodes_file)
    _require_same_weights(run.path, rows, contestant.weights)
    recorder = _recorder(config, run, planned, contestant.weights, pool.spec)
    done = {row.pairing for row in finished_rows(rows)}
    pending = [entry for entry in planned if entry.pairing not in done]
    with EpisodeProgress(config.label, len(planned), len(planned) - len(pending), config.show_progress) as progress:
        for row in run_planned(pool, contestant, pending, recorder):
            progress.ended(row.success, row.crashed)
    summary = summarize(planned, read_rows(run.episodes_file), config, protocol, contestant, pool.spec)
    write_json(run.path / "summary.json", summary.to_dict())
    return summary


def run_planned(pool: EnvPool, contestant: Contestant, planned: Sequence[Planned], recorder: _Recorder) -> Iterator[EpisodeRow]:
    """Run the planned episodes in order and yield the row of each when it ends."""

    def look_for(spec: EpisodeSpec) -> Look:
        return look_of(contestant.actor.needs, record_every=recorder.every if spec.key in recorder.filmed else 0)

    source = ListSource(entry.spec for entry in planned)
    for episode in run_episodes(pool, contestant.actor, source, look_for):
        yield recorder.record(episode)


def _recorder(config: EvalConfig, run: RunDirectory, planned: Sequence[Planned], weights: str, env: EnvSpec) -> _Recorder:
    return _Recorder(
        run=run,
        conditions={entry.spec.key: entry.condition for entry in planned},
        filmed=frozenset(first_of_each_task(planned, config.videos)),
        every=config.video_every,
        weights=weights,
        orientation=env.conventions.orientation,
        rate_hz=env.conventions.control_rate_hz,
    )


def first_of_each_task(planned: Sequence[Planned], count: int) -> list[str]:
    """Keys of the first `count` episodes of every condition and task: the same ones whoever acts, however many envs run."""
    seen: dict[tuple[str, int], int] = {}
    keys = []
    for entry in planned:
        group = (entry.condition, entry.spec.task)
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= count:
            keys.append(entry.spec.key)
    return keys


def _recorded_actions(config: EvalConfig) -> list[tuple[EpisodeSpec, Float32]]:
    """(spec, actions float32[N, 7]) of each successful episode of the dataset, for actor `replay`."""
    if config.dataset is None:
        return []
    from vla_rl.datasets.episodes import load_actions
    from vla_rl.datasets.store import list_episodes

    return [(info.spec, load_actions(info)) for info in list_episodes([config.dataset]) if info.outcome is Outcome.SUCCESS]


def _require_same_weights(path: Path, rows: Sequence[EpisodeRow], weights: str) -> None:
    others = {row.weights for row in rows} - {weights}
    if others:
        raise ConfigError(
            f"{path} holds episodes of other weights ({', '.join(sorted(others))}; now {weights}): the checkpoint changed since. "
            f"Use another run_dir, or the same checkpoint."
        )
