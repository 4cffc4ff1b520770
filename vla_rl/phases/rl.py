"""`vla-rl rl`: reinforcement learning of a saved policy, one visible function per step.

    rollout -> values and advantages -> update -> push weights -> (checkpoint, evaluate)

Versions of the weights count RL steps: version n is what n updates made. With `max_staleness` s, rollout k + s is made before update k,
so its data is s versions old when it is trained on: the schedule of overlapping workers, run in order in one process. At 0 nothing
crosses an update. Everything a step does depends on (recipe, step number), so that a run that was killed goes on bit for bit.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.config import ConfigError
from vla_rl.engine.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import close_world, open_world
from vla_rl.phases.interrupt import INTERRUPTED, Interrupt
from vla_rl.phases.loggers import MetricLog
from vla_rl.phases.progress import UpdateProgress
from vla_rl.phases.rl_batches import advantages, staleness, training_rows
from vla_rl.phases.rl_best import evaluate_and_keep_best
from vla_rl.phases.rl_cloning import CloningStream, open_cloning
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_report import step_report
from vla_rl.phases.rl_rollout import Rollout, roll_out
from vla_rl.phases.rl_specs import TrainingScenes, training_scenes
from vla_rl.phases.rl_update import CRITIC, Learner, kl_penalty, make_targets, measure_gradient_noise, score, update
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.extend import extend_policy
from vla_rl.policies.module import PolicyModule
from vla_rl.policy_actor import PolicyActor
from vla_rl.sim.base import EnvPool
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import MakeEnv, make_pool
from vla_rl.telemetry.run_directory import RunDirectory
from vla_rl.telemetry.spans import SpanLog, close_span_log, open_span_log, span
from vla_rl.weights.in_place import InPlaceSync

ROLLOUTS_FILE = "rollouts.pickle"
"""In a checkpoint: rollouts that no update has seen yet (only with `max_staleness` above 0)."""


@dataclass
class _Run:
    """What the loop works with."""

    config: RlConfig
    run: RunDirectory
    learner: Learner
    scenes: TrainingScenes
    pool: EnvPool
    actor: PolicyActor
    sync: InPlaceSync
    cloning: CloningStream | None
    step: int = 0
    """RL steps done; also the version of the trainer's weights."""
    next_group: int = 0
    """The first group of scenes that no rollout has used."""
    pending: deque[Rollout] = field(default_factory=deque[Rollout])
    """Rollouts that no update has seen, oldest first."""
    best: float = -1.0
    """Highest success rate on validation scenes so far."""

    @property
    def engine(self) -> Engine:
        return self.learner.engine


def run_rl(config: RlConfig, make_env: MakeEnv = make_env) -> int:
    """Train, or go on training, until `config.steps`. Returns 0, or 130 after Ctrl-C (with a checkpoint written).

    Raises ConfigError for a run directory of another recipe, ConnectError for a policy and an env that do not fit, CheckpointError for
    a damaged checkpoint or a full disk, OnPolicyError where rollout and trainer do not compute the same log-probabilities.
    """
    with ExitStack() as stack:
        stack.callback(close_world)
        interrupt = stack.enter_context(Interrupt())
        rl = _prepare(config, make_env, stack)
        log = stack.enter_context(MetricLog(rl.run, config.loggers, config, rl.step))
        progress = stack.enter_context(UpdateProgress("rl", config.steps, rl.step, config.show_progress))
        spans = open_span_log(rl.run.spans_file, role="driver")
        stack.callback(close_span_log)
        _train(rl, interrupt, log, progress, spans)
    return 0 if rl.step == config.steps else INTERRUPTED


def _train(rl: _Run, interrupt: Interrupt, log: MetricLog, progress: UpdateProgress, spans: SpanLog) -> None:
    """The loop: one step after another; checkpoints and evaluations when they are due."""
    config, saved_at = rl.config, rl.step
    while rl.step < config.steps and not interrupt.requested:
        spans.rows.clear()
        with span("rl_step"):
            metrics, rollout = rl_step(rl)
            due = rl.step % config.checkpoint_every == 0 or rl.step == config.steps or interrupt.requested
            if due:
                with span("checkpoint"):
                    saved_at = _save(rl)
            if due and config.evaluation.every and rl.step % config.evaluation.every == 0:
                with span("evaluation"), interrupt.breaking():
                    values, rl.best = evaluate_and_keep_best(config, rl.run, rl.step, rl.best)
                    metrics |= values
        report, numbers = step_report(spans.rows, rollout.seconds, rl.pool.num_envs, metrics["batch_fill"])
        log.write(rl.step, {name: value for name, value in (metrics | numbers).items() if math.isfinite(value)})
        progress.advance(rl.step, f"success {metrics.get('success', float('nan')):.0%}")
        if config.show_progress:
            print(report, file=sys.stderr)
    if saved_at != rl.step:
        _save(rl)


def rl_step(rl: _Run) -> tuple[dict[str, float], Rollout]:
    """One RL step; returns its numbers and the rollout it trained on."""
    algorithm, learner = rl.config.algorithm, rl.learner
    with span("rollout"):
        _fill_pending(rl)
    rollout = rl.pending.popleft()
    metrics = dict(rollout.metrics)
    episodes = [*rollout.episodes, *rollout.masked]
    if rollout.episodes:
        with span("advantages"):
            rows = training_rows(rollout.episodes, rollout.masked, learner.policy.spec.chunk_length)
            age_B = staleness(rows, rl.step, algorithm.max_staleness)
            reference = None if learner.reference is None else score(learner, rows, learner.reference)
            teacher = None if learner.teacher is None else score(learner, rows, learner.teacher)
            penalty_B = kl_penalty(learner, rows, reference) if reference is not None and algorithm.kl.place == "reward" else None
            wanted = advantages(episodes, rows, rollout.final_values, penalty_B, algorithm)
            targets = make_targets(learner, rows, wanted, reference, teacher)
        if _measures_noise(rl):
            with span("gradient_noise"):
                metrics |= _noise_metrics(learner, rl, targets)
        with span("update"):
            metrics |= update(learner, targets, rl.step, fresh=not age_B.any())
        metrics |= {"return": wanted.mean_return, "explained_variance": wanted.explained_variance, "rows": float(len(rows))}
        metrics |= {"staleness_mean": float(age_B.double().mean()), "staleness_max": float(age_B.max())}
    rl.step += 1
    with span("weight_sync"):
        rl.sync.push(rl.engine.named_weights(), rl.step)
    return metrics | {"version": float(rl.step), "staleness_bound": float(algorithm.max_staleness)}, rollout


def _fill_pending(rl: _Run) -> None:
    """Make the rollouts that have to be there before update `rl.step`: its own, and those of the next `max_staleness` steps."""
    last = min(rl.step + rl.config.algorithm.max_staleness, rl.config.steps - 1)
    while (step := rl.step + len(rl.pending)) <= last:
        with span("weight_sync"):
            rl.actor.weights_version = rl.sync.pull(_acting(rl))
        rollout = roll_out(step, rl.next_group, rl.scenes, rl.config.algorithm, rl.pool, rl.actor, rl.config.rollout_rows)
        rl.next_group = rollout.next_group
        rl.pending.append(rollout)


def _measures_noise(rl: _Run) -> bool:
    """Whether this step's gradient is measured; while the critic warms up, the policy's is 0."""
    every = rl.config.gradient_noise_every
    return every > 0 and rl.step % every == 0 and rl.config.algorithm.policy_coefficient(rl.step) > 0


def _noise_metrics(learner: Learner, rl: _Run, targets: Any) -> dict[str, float]:
    noise = measure_gradient_noise(learner, targets, rl.step, rl.config.gradient_noise_parts)
    return {} if noise is None else {"gradient_signal_to_noise": noise.signal_to_noise, "gradient_noise_scale": noise.noise_scale}


def _acting(rl: _Run) -> PolicyModule:
    """The replica that acts."""
    assert isinstance(rl.actor.policy, PolicyModule)
    return rl.actor.policy


def _prepare(config: RlConfig, make_env: MakeEnv, stack: ExitStack) -> _Run:
    """Everything up to the first step: policies, engine, envs, and the last checkpoint if there is one."""
    world = open_world(config.engine.device)
    if world.size > 1:
        raise ConfigError(f"the inline backend has one trainer rank, but {world.size} were started; start it without torchrun")
    run = RunDirectory.open(config.run_dir, config)
    initial = load_policy(config.initial_policy)
    scenes = training_scenes(config)
    learning = _with_heads(config, initial)
    acting = _with_heads(config, initial).to(world.device)
    engine = Engine(learning, config.engine, config.steps, world, groups=(CRITIC,))
    cloning = open_cloning(config, initial) if config.demonstrations is not None else None
    pool = stack.enter_context(closing(make_pool(config.pool, config.env, make_env)))
    actor = PolicyActor(acting, config.rollout_rows, config.initial_policy, 0, str(world.device), config.exploration)
    stack.callback(actor.close)
    learner = Learner(
        engine=engine,
        algorithm=config.algorithm,
        exploration=config.exploration,
        seed=config.seed,
        rollout_rows=config.rollout_rows,
        reference=_with_heads(config, initial).to(world.device) if config.algorithm.kl.kind != "none" else None,
        teacher=load_policy(config.teacher).to(world.device) if config.teacher is not None else None,
        next_samples=cloning.next_samples if cloning is not None else None,
    )
    rl = _Run(config, run, learner, scenes, pool, actor, InPlaceSync(), cloning)
    _resume(rl)
    rl.sync.push(engine.named_weights(), rl.step)
    rl.sync.pull(acting)
    rl.sync.verify(acting)
    return rl


def _with_heads(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The initial policy with the heads that the recipe needs; equal weights at every call."""
    critic = config.critic if config.algorithm.critic is not None else None
    noise_head = config.noise_head if config.exploration.method == "flow_noise" else None
    return extend_policy(initial, critic, noise_head, config.seed)


def _resume(rl: _Run) -> None:
    """Go on from the last checkpoint."""
    folder = last_checkpoint(rl.run.checkpoints)
    if folder is None:
        return
    extra = load_checkpoint(rl.engine, folder)
    rl.step, rl.next_group, rl.best = extra["step"], extra["next_group"], extra["best"]
    if rl.cloning is not None:
        rl.cloning.load_state_dict(extra["cloning"])
    if extra["pending"]:
        rl.pending = deque(pickle.loads((folder / ROLLOUTS_FILE).read_bytes()))


def _save(rl: _Run) -> int:
    """Write a checkpoint; returns the step it belongs to."""
    extra = {
        "step": rl.step,
        "next_group": rl.next_group,
        "pending": len(rl.pending),
        "best": rl.best,
        "cloning": rl.cloning.state_dict() if rl.cloning is not None else None,
    }

    def write_policy(folder: Path, weights: Mapping[str, Any]) -> None:
        save_policy(rl.learner.policy, folder, weights)

    def write_pending(folder: Path) -> None:
        if rl.pending:
            (folder / ROLLOUTS_FILE).write_bytes(pickle.dumps(list(rl.pending)))

    save_checkpoint(rl.engine, rl.run.checkpoints, extra, write_policy, rl.config.keep_checkpoints, rl.step, write_pending)
    return rl.step
