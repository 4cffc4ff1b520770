"""`vla-rl rl`: reinforcement learning of a saved policy, one visible function per step.

    rollout -> values and advantages -> update -> push weights -> (checkpoint, evaluate)

This process is the driver: it holds ids and scalars. Rollout workers (`rl_worker.py`) make episodes, trainer ranks (`rl_trainer.py`) learn
from them; `cluster.backend` says where they run, and the messages are the same. Versions of the weights count RL steps: version n is what
n updates made. With `max_staleness` s, rollout k + s may be made before update k, so its data is at most s versions old when it is trained
on; at 0 nothing crosses an update. Inline, everything a step does depends on (recipe, step number), so that a run that was killed goes on
bit for bit.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

from vla_rl.cluster.open import open_backend, open_meeting
from vla_rl.phases.evaluation import check_evaluation
from vla_rl.phases.interrupt import INTERRUPTED, Interrupt
from vla_rl.phases.loggers import MetricLog, owes_evaluation
from vla_rl.phases.progress import UpdateProgress
from vla_rl.phases.rl_batches import advantages, row_scalars, staleness
from vla_rl.phases.rl_best import evaluate_and_keep_best
from vla_rl.phases.rl_collect import Collector, Rollouts
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_crew import ROLES, Crew, MakeTrainer
from vla_rl.phases.rl_episodes import drop_steps_after, write_rows
from vla_rl.phases.rl_report import step_report
from vla_rl.phases.rl_rollout import Rollout
from vla_rl.phases.rl_specs import training_scenes
from vla_rl.phases.rl_trainer import TrainerRank
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import MakeEnv
from vla_rl.telemetry.run_directory import RunDirectory
from vla_rl.telemetry.spans import SpanLog, close_span_log, open_span_log, span

FREE_TO_CHANGE = ("steps",)
"""A finished run may go on: no rate depends on its length."""


@dataclass
class _Run:
    """What the loop works with."""

    config: RlConfig
    run: RunDirectory
    crew: Crew
    rollouts: Rollouts
    chunk_length: int
    """Actions per chunk of the policy."""
    step: int = 0
    """RL steps done; also the version of the trainer's weights."""


def run_rl(config: RlConfig, make_env: MakeEnv = make_env, make_trainer: MakeTrainer = TrainerRank) -> int:
    """Train, or go on training, until `config.steps`. Returns 0, or 130 after Ctrl-C (with a checkpoint written).

    Raises ConfigError for a run directory of another recipe and an evaluation that cannot run, FolderInUseError for a directory that
    another process writes to, ConnectError for a policy and an env that do not fit, CheckpointError for a damaged checkpoint or a full
    disk, OnPolicyError where rollout and trainer do not compute the same log-probabilities, RoleLost where a trainer rank dies, or a
    rollout worker keeps dying.
    """
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        rl = _prepare(config, make_env, make_trainer, stack)
        log = stack.enter_context(MetricLog(rl.run, config.loggers, config, rl.step))
        drop_steps_after(rl.run.episodes_file, rl.step)
        progress = stack.enter_context(UpdateProgress("rl", config.steps, rl.step, config.show_progress))
        spans = open_span_log(rl.run.spans_file, role="driver")
        stack.callback(close_span_log)
        _train(rl, interrupt, log, progress, spans)
    return 0 if rl.step >= config.steps else INTERRUPTED


def _train(rl: _Run, interrupt: Interrupt, log: MetricLog, progress: UpdateProgress, spans: SpanLog) -> None:
    """The loop: one step after another; checkpoints and evaluations when they are due."""
    config, saved_at = rl.config, rl.step
    if owes_evaluation(rl.run, rl.step, config.evaluation.every) and (validation := _evaluate(rl, interrupt)):
        log.write(rl.step, validation)  # it was killed in its last evaluation
    while rl.step < config.steps and not interrupt.requested:
        spans.rows.clear()
        with span("rl_step"):
            metrics, rollout = rl_step(rl)
            _log_step(rl, log, metrics, rollout)
            validation = dict[str, float]()
            due = rl.step % config.checkpoint_every == 0 or rl.step == config.steps or interrupt.requested
            if due:
                with span("checkpoint"):
                    saved_at = _save(rl)
            if due and owes_evaluation(rl.run, rl.step, config.evaluation.every):
                with span("evaluation"):
                    validation = _evaluate(rl, interrupt)
        envs = config.cluster.rollout_workers * config.pool.workers
        report, numbers = step_report(spans.rows, rollout.seconds, envs, metrics["batch_fill"])
        log.write(rl.step, numbers | validation)
        progress.advance(rl.step, f"success {metrics.get('success', float('nan')):.0%}")
        if config.show_progress:
            print(report, file=sys.stderr)
    if saved_at != rl.step:
        _save(rl)


def _evaluate(rl: _Run, interrupt: Interrupt) -> dict[str, float]:
    """Numbers of the checkpoint that was just written; nothing after Ctrl-C."""
    with interrupt.breaking():
        return evaluate_and_keep_best(rl.config, rl.run, rl.step)
    return {}


def _log_step(rl: _Run, log: MetricLog, metrics: dict[str, float], rollout: Rollout) -> None:
    """A step's numbers and episodes, before its checkpoint: a step that a checkpoint holds never runs again, so its rows must be there."""
    with span("log"):
        write_rows(rl.run.episodes_file, rollout.rows)
        log.write(rl.step, {name: value for name, value in metrics.items() if math.isfinite(value)})


def rl_step(rl: _Run) -> tuple[dict[str, float], Rollout]:
    """One RL step; returns its numbers and the rollout it trained on."""
    algorithm, crew = rl.config.algorithm, rl.crew
    with span("rollout"):
        rollout, offloaded = _next_rollout(rl)
    metrics = rollout.metrics | offloaded
    rolled = [*rollout.episodes, *rollout.masked]
    if rollout.episodes:
        with span("advantages"):
            rows = row_scalars([one.episode for one in rollout.episodes], [one.episode for one in rollout.masked], rl.chunk_length)
            penalty_B = crew.take(rows, [one.parcel for one in rolled])
            age_B = staleness(rows, rl.step, algorithm.max_staleness)
            episodes, earned = [one.episode for one in rolled], [one.earned for one in rolled]
            wanted = advantages(episodes, earned, rows, rollout.final_values, penalty_B, algorithm)
        with span("update"):
            metrics |= crew.update(wanted, rl.step, not age_B.any(), _measures_noise(rl))
        metrics |= {"return": wanted.mean_return, "explained_variance": wanted.explained_variance, "rows": float(len(rows))}
        metrics |= {"staleness_mean": float(age_B.double().mean()), "staleness_max": float(age_B.max())}
    rollout.release()
    rl.step += 1
    with span("weight_sync"):
        metrics |= crew.push(rl.step)
    metrics |= {"version": float(rl.step), "staleness_bound": float(algorithm.max_staleness)}
    return metrics | {"driver_megabytes": crew.received_bytes() / 1e6}, rollout


def _next_rollout(rl: _Run) -> tuple[Rollout, dict[str, float]]:
    """The rollout of this step, and the start of those that may be made meanwhile. Colocated roles take turns on the device.

    The numbers say how much left each trainer's device for the time of the rollout.
    """
    colocated = rl.config.cluster.placement == "colocated"
    offloaded = {"offloaded_megabytes": rl.crew.train("rest") / 1e6} if colocated else {}
    rl.rollouts.start_due(rl.step)
    rollout = rl.rollouts.take()
    if colocated:
        rl.crew.train("wake")
    return rollout, offloaded


def _measures_noise(rl: _Run) -> bool:
    """Whether this step's gradient is measured; while the critic warms up, the policy's is 0."""
    every = rl.config.gradient_noise_every
    return every > 0 and rl.step % every == 0 and rl.config.algorithm.policy_coefficient(rl.step) > 0


def _prepare(config: RlConfig, make_env: MakeEnv, make_trainer: MakeTrainer, stack: ExitStack) -> _Run:
    """Everything up to the first step: the roles, connected by weights, and the last checkpoint if there is one."""
    check_evaluation(config.evaluation, config.env.resolution)
    run = stack.enter_context(RunDirectory.open(config.run_dir, config, FREE_TO_CHANGE))
    scenes = training_scenes(config)
    backend = stack.enter_context(closing(open_backend(config.cluster, run.path, run.spans_file, ROLES)))
    crew = Crew(config, backend, make_env, make_trainer, open_meeting(backend, stack))
    executor = None if config.cluster.backend == "inline" else ThreadPoolExecutor(1, thread_name_prefix="rollouts")
    rollouts = Rollouts(Collector(config, scenes, crew), executor, config.steps, config.algorithm.max_staleness)
    stack.callback(rollouts.close)
    rl = _Run(config, run, crew, rollouts, crew.train("chunk_length"))
    _resume(rl)
    crew.open_weights(rl.step)
    return rl


def _resume(rl: _Run) -> None:
    """Go on from the last checkpoint, on every trainer rank and here; rollouts that no update saw come back as parcels of rank 0."""
    extra, pending = rl.crew.train("resume", rl.run.checkpoints)
    if extra is not None:
        rl.step = extra["step"]
        whole = [rollout.with_parcels(lambda parcel: rl.crew.trainers[0].call("restored").result().payload) for rollout in pending]
        rl.rollouts.resume(rl.step, extra["next_group"], whole)


def _save(rl: _Run) -> int:
    """Write a checkpoint; returns the step it belongs to."""
    pending, next_group = rl.rollouts.made()
    rl.crew.train("save", rl.run.checkpoints, {"step": rl.step, "next_group": next_group}, pending)
    return rl.step
