"""`vla-rl sft`: supervised fine-tuning, one visible loop from recorded episodes to a policy.

Everything an update does depends on (recipe, update number): which samples, in which order, with which noise. So a run that was
interrupted or killed goes on bit for bit when it is started again, and a global batch gives the same gradient
(up to the order of float32 sums) however it is cut into micro-batches and ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.config import ConfigError
from vla_rl.datasets.loader import DataConfig, TrainLoader, open_datasets, require_made_for
from vla_rl.datasets.samples import EpisodeDataset, SampleBatch
from vla_rl.datasets.stats import compute_statistics
from vla_rl.engine.checkpoint import resume_last, save_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine, LossResult, StepResult
from vla_rl.engine.world import World, close_world, open_world
from vla_rl.phases.action_tokenizer import tokenizer_folder
from vla_rl.phases.evaluation import EvaluationConfig, check_evaluation, evaluate_checkpoint
from vla_rl.phases.interrupt import INTERRUPTED, Interrupt
from vla_rl.phases.loggers import LoggerConfig, MetricLog, owes_evaluation
from vla_rl.phases.progress import UpdateProgress
from vla_rl.phases.sft_batches import MicroBatch, noise_draws, supervised_loss, target_count, training_batch
from vla_rl.phases.sft_validation import OTHER_PROMPT, OWN_PROMPT, Validation, prompt_verdict, validation_losses
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.factory import PolicyConfig, make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.telemetry.files import read_jsonl
from vla_rl.telemetry.run_directory import RunDirectory
from vla_rl.telemetry.spans import close_span_log, leaf_shares, open_span_log, span


@dataclass(frozen=True)
class SftConfig:
    """The recipe of `vla-rl sft`."""

    run_dir: str
    """Where checkpoints, metrics and spans go; starting again with the same directory resumes."""
    data: DataConfig
    """Recorded episodes."""
    policy: PolicyConfig = field(default_factory=Pi0Config)
    """Family and sizes."""
    initial_policy: str | None = None
    """Folder of a saved policy to start from (its statistics are kept); none starts from random weights.
    Its sizes replace `policy`. The episodes must have the conventions, rate and resolution that it was made for."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Optimizer, schedule, precision, what learns."""
    seed: int = 0
    """Of initial weights, sample order and noise; at least 0."""
    updates: int = 2000
    """Optimizer steps; at least 1. A finished run goes on when it is raised, if no rate depends on it: engine.schedule `constant`, and
    engine.warmup_fraction 0."""
    global_batch_size: int = 64
    """Samples of one update over all ranks; a multiple of the number of ranks."""
    micro_batch_size_per_rank: int = 64
    """Samples of one forward and backward pass of one rank; at least 1. Smaller needs less memory and gives the same gradient."""
    noise_draws: int = 1
    """Noises and flow times per sample and update, over one prefix; at least 1. More give a steadier gradient and cost passes of the action
    expert only. Policies that denoise (pi0, pi0.5, groot); 1 for token policies."""
    validate_every: int = 200
    """Updates between two validation losses; 0 turns them off, as does data.validation_fraction 0. Where the held-out episodes have several
    prompts, their first pictures get losses of their own, under their prompt and under another one: alike, the policy does not read it."""
    validation_samples: int = 256
    """Most samples of a validation loss, evenly spaced over the held-out episodes; at least 1."""
    checkpoint_every: int = 500
    """Updates between two checkpoints; at least 1. The last update always gets one."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept, newest first; at least 1."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Success rates in simulation during training."""
    loggers: LoggerConfig = field(default_factory=LoggerConfig)
    """TensorBoard and W&B beside `metrics.jsonl`."""
    show_progress: bool = True
    """A progress bar with a time estimate on standard error."""

    def __post_init__(self) -> None:
        least = {"seed": 0, "updates": 1, "global_batch_size": 1, "micro_batch_size_per_rank": 1, "noise_draws": 1, "validate_every": 0}
        least |= {"validation_samples": 1, "checkpoint_every": 1, "keep_checkpoints": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.engine.trainable == "lora" and self.initial_policy is None:
            raise ConfigError(
                "engine.trainable is 'lora' and initial_policy none: adapters learn beside weights that were learned, and a new "
                "policy's are random (pi0's output layer is 0, so that nothing would be learned); name an initial_policy, or train 'all'"
            )
        if self.evaluation.every % self.checkpoint_every:
            raise ConfigError(
                f"evaluation.every is {self.evaluation.every} and checkpoint_every {self.checkpoint_every}: "
                "checkpoints are what is evaluated, so the first must be a multiple of the second"
            )


@dataclass
class _Training:
    """What the loop works with."""

    config: SftConfig
    world: World
    run: RunDirectory
    policy: PolicyModule
    engine: Engine
    loader: TrainLoader
    validation: Validation | None


def free_to_change(config: SftConfig) -> tuple[str, ...]:
    """The key paths that may change when a run goes on: its length, where every update would be the same in a longer one."""
    return ("updates",) if config.engine.schedule == "constant" and config.engine.warmup_fraction == 0 else ()


def run_sft(config: SftConfig) -> int:
    """Train, or go on training, until `config.updates`. Returns 0, or 130 after Ctrl-C (with a checkpoint written).

    Raises ConfigError for a run directory of another recipe and batch sizes the ranks cannot share, FolderInUseError for a run
    directory that another process writes to, DatasetError for episodes that cannot be trained on, CheckpointError for a damaged
    checkpoint or a full disk.
    """
    with ExitStack() as stack:
        training = _prepare(config, stack)
        engine = training.engine
        interrupt = stack.enter_context(Interrupt())
        log = stack.enter_context(MetricLog(training.run, config.loggers, config, engine.updates)) if training.world.leads else None
        show = config.show_progress and training.world.leads
        progress = stack.enter_context(UpdateProgress("sft", config.updates, engine.updates, show))
        _open_spans(training)
        stack.callback(close_span_log)
        _train(training, interrupt, log, progress)
    if training.world.leads:
        _report(training)
    training.loader.close()
    close_world()
    return 0 if engine.updates >= config.updates else INTERRUPTED


def _train(training: _Training, interrupt: Interrupt, log: MetricLog | None, progress: UpdateProgress) -> None:
    """The loop: samples, gradient, optimizer step; validation, checkpoint and evaluation when they are due."""
    config, engine, loader = training.config, training.engine, training.loader
    saved_at = engine.updates
    if training.world.from_leader(owes_evaluation(training.run, engine.updates, config.evaluation.every)):
        _log_values(log, engine.updates, _evaluate(training, interrupt))  # it was killed in its last evaluation
    while engine.updates < config.updates and not _any_rank(training.world, interrupt.requested):
        with span("update"):
            with span("data"):
                samples = next(loader)
            with span("preprocess"):
                micro_batches = _micro_batches(training, samples)
            with span("forward_backward"):
                result = engine.forward_backward(micro_batches, supervised_loss, target_count)
            with span("optimizer"):
                step = engine.optim_step()
            with span("log"):
                _write(log, engine, loader, result, step)
                progress.advance(engine.updates, f"loss {result.loss:.4f}")
            if training.validation is not None and _due(engine.updates, config.validate_every):
                with span("validation"):
                    _log_values(log, engine.updates, validation_losses(engine, training.policy, training.validation))
            if _due(engine.updates, config.checkpoint_every):
                with span("checkpoint"):
                    saved_at = _save(training)
            if _due(engine.updates, config.evaluation.every):
                with span("evaluation"):
                    _log_values(log, engine.updates, _evaluate(training, interrupt))
    if saved_at != engine.updates:
        _save(training)


def _prepare(config: SftConfig, stack: ExitStack) -> _Training:
    """Everything up to the first update: data, statistics, policy, engine, and the last checkpoint if there is one.

    Rank 0 is the run directory's only writer until `stack` is closed.
    """
    world = open_world(config.engine.device)
    if config.global_batch_size % world.size:
        raise ConfigError(f"global_batch_size is {config.global_batch_size}, which {world.size} ranks cannot share; make it a multiple")
    run = stack.enter_context(_open_run(config) if world.leads else nullcontext(RunDirectory(Path(config.run_dir))))
    world.barrier()
    dataset, validation = open_datasets(config.data)
    policy = _make_policy(config, dataset, run, world)
    check_evaluation(config.evaluation, policy.spec.resolution)
    if config.noise_draws > 1 and not isinstance(policy, FlowPolicy):
        raise ConfigError(f"noise_draws is {config.noise_draws}, but a {policy.config.family!r} policy denoises nothing; set it to 1")
    engine = Engine(policy, config.engine, config.updates, world, seed=config.seed)
    loader = _make_loader(config, dataset, policy.spec.chunk_length, world)
    held_out = None if validation is None or not config.validate_every else _held_out(config, validation)
    training = _Training(config, world, run, policy, engine, loader, held_out)
    _resume(training)
    return training


def _held_out(config: SftConfig, dataset: EpisodeDataset) -> Validation:
    return Validation(dataset, config.seed, config.validation_samples, config.micro_batch_size_per_rank, config.noise_draws)


def _open_run(config: SftConfig) -> AbstractContextManager[RunDirectory]:
    return RunDirectory.open(config.run_dir, config, free_to_change(config))


def _make_loader(config: SftConfig, dataset: EpisodeDataset, chunk_length: int, world: World) -> TrainLoader:
    data = config.data
    return TrainLoader(
        dataset, chunk_length, config.global_batch_size, config.seed, world.rank, world.size, data.workers, data.first_picture_repeats
    )


def _make_policy(config: SftConfig, dataset: EpisodeDataset, run: RunDirectory, world: World) -> PolicyModule:
    """Statistics are fixed here, once: the dataset's, or those that the initial policy was trained with.

    Raises ConventionMismatch or DatasetError for an initial policy that was made for other episodes than the dataset's.
    """
    if config.initial_policy is not None:
        policy = load_policy(config.initial_policy)
        require_made_for(dataset, config.initial_policy, policy.spec.conventions, policy.spec.resolution)
        return policy
    first = dataset.infos[0]
    spec = policy_spec(config.policy, first.resolution, first.conventions)
    statistics = compute_statistics(dataset)
    tokenizer = tokenizer_folder(config.policy, dataset, statistics, run.path / "tokenizer", world)
    return make_policy(config.policy, statistics, spec, config.seed, tokenizer)


def _resume(training: _Training) -> None:
    """Go on from the last checkpoint.

    Raises DatasetError when the episodes are no longer those it was trained on, ConfigError for an initial policy with other statistics.
    """
    resumed = resume_last(training.engine, training.run.checkpoints)
    if resumed is None:
        return
    folder, extra = resumed
    training.loader.load_state_dict(extra["loader"])
    ours = training.policy.processor.statistics.sha256
    if extra["statistics_sha256"] != ours:
        source = training.config.initial_policy or "the data"
        raise ConfigError(
            f"{folder} was trained with statistics {extra['statistics_sha256'][:12]}, {source} now has {ours[:12]}: it was changed since; "
            "restore it, or start a new run_dir"
        )


def _save(training: _Training) -> int:
    """Write a checkpoint; returns the update it belongs to."""
    extra = {"loader": training.loader.state_dict(), "statistics_sha256": training.policy.processor.statistics.sha256}

    def write_policy(folder: Path, weights: Mapping[str, Any]) -> None:
        save_policy(training.policy, folder, weights)

    save_checkpoint(training.engine, training.run.checkpoints, extra, write_policy, training.config.keep_checkpoints)
    return training.engine.updates


def _micro_batches(training: _Training, samples: SampleBatch) -> list[MicroBatch]:
    """This rank's samples as model inputs, each row with the noise seeds of its place in the global batch."""
    config, rows = training.config, len(samples.observations)
    places = range(training.world.rank * rows, (training.world.rank + 1) * rows)
    seeds_K = noise_draws(config.seed, f"update {samples.update}", places, config.noise_draws)
    parts = [slice(start, start + config.micro_batch_size_per_rank) for start in range(0, rows, config.micro_batch_size_per_rank)]
    batches = (training_batch(training.policy, samples, part).to(training.world.device) for part in parts)
    return [(batch, [seed for seeds in seeds_K for seed in seeds[part]]) for batch, part in zip(batches, parts)]


def _evaluate(training: _Training, interrupt: Interrupt) -> dict[str, float]:
    """Success rate of the checkpoint that was just written; rank 0 plays, the others wait. Nothing after Ctrl-C."""
    values: dict[str, float] = {}
    if training.world.leads:
        place = training.run.path / "evaluations" / f"step_{training.engine.updates}"
        with interrupt.breaking():
            values = evaluate_checkpoint(training.config.evaluation, training.run.checkpoints / "last" / "policy", place)
        _open_spans(training)  # an evaluation logs its own spans, into its own directory
    return training.world.from_leader(values)


def _open_spans(training: _Training) -> None:
    if training.world.leads:
        open_span_log(training.run.spans_file, role="trainer")


def _write(log: MetricLog | None, engine: Engine, loader: TrainLoader, result: LossResult, step: StepResult) -> None:
    row = {"loss": result.loss, **result.metrics, "learning_rate": step.learning_rate, "grad_norm": step.grad_norm}
    row |= {"skipped_updates": engine.skipped, "version": step.version, "epoch": loader.epoch}
    _log_values(log, engine.updates, row)


def _log_values(log: MetricLog | None, update: int, values: Mapping[str, float]) -> None:
    if log is not None:
        log.write(update, values)


def _due(update: int, every: int) -> bool:
    return every > 0 and update % every == 0


def _any_rank(world: World, requested: bool) -> bool:
    """Ranks must leave the loop together: a signal may reach one of them an update earlier."""
    return requested if world.size == 1 else world.sum([float(requested)])[0] > 0


def _report(training: _Training) -> None:
    """Where the time of this process went, and where the result is."""
    shares = leaf_shares((row for row in read_jsonl(training.run.spans_file) if row["pid"] == os.getpid()), "update")
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    done = f"{training.engine.updates} of {training.config.updates} updates"
    print(f"sft: {done}, {training.engine.skipped} skipped; checkpoint {training.run.checkpoints / 'last'}", file=sys.stderr)
    if parts:
        print(f"sft: time of an update: {parts}", file=sys.stderr)
    if compared := [row for row in read_jsonl(training.run.metrics_file) if OTHER_PROMPT in row]:
        print(f"sft: {prompt_verdict(compared[-1][OWN_PROMPT], compared[-1][OTHER_PROMPT])}", file=sys.stderr)
