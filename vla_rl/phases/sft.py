"""`vla-rl sft`: supervised fine-tuning, one visible loop from recorded episodes to a policy.

Everything an update does depends on (recipe, update number): which samples, in which order, with which noise. So a run that was
interrupted or killed goes on bit for bit when it is started again, and a global batch gives the same gradient
(up to the order of float32 sums) however it is cut into micro-batches and ranks.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.conventions import require_equal
from vla_rl.datasets.loader import DataConfig, TrainLoader, open_datasets
from vla_rl.datasets.samples import EpisodeDataset, SampleBatch
from vla_rl.datasets.stats import compute_statistics
from vla_rl.engine.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine, LossResult, StepResult
from vla_rl.engine.world import World, close_world, open_world
from vla_rl.episode import ACTION_DIM
from vla_rl.phases.action_tokenizer import tokenizer_folder
from vla_rl.phases.evaluation import EvaluationConfig, check_evaluation, evaluate_checkpoint
from vla_rl.phases.interrupt import INTERRUPTED, Interrupt
from vla_rl.phases.loggers import LoggerConfig, MetricLog, owes_evaluation
from vla_rl.phases.progress import UpdateProgress
from vla_rl.policies.base import Batch, LossSums
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.factory import PolicyConfig, make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.telemetry.files import read_jsonl
from vla_rl.telemetry.run_directory import RunDirectory
from vla_rl.telemetry.spans import close_span_log, leaf_shares, open_span_log, span

MicroBatch = tuple[Batch, list[int]]
"""Model inputs and the noise seeds of the rows, draw after draw."""


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
    Its sizes replace `policy`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Optimizer, schedule, precision, what learns."""
    seed: int = 0
    """Of initial weights, sample order and noise; at least 0."""
    updates: int = 2000
    """Optimizer steps; at least 1."""
    global_batch_size: int = 64
    """Samples of one update over all ranks; a multiple of the number of ranks."""
    micro_batch_size_per_rank: int = 64
    """Samples of one forward and backward pass of one rank; at least 1. Smaller needs less memory and gives the same gradient."""
    noise_draws: int = 1
    """Noises and flow times per sample and update, over one prefix; at least 1. More give a steadier gradient and cost passes of the action
    expert only. Policies that denoise (pi0, pi0.5, groot); 1 for token policies."""
    validate_every: int = 200
    """Updates between two validation losses; 0 turns them off, as does data.validation_fraction 0."""
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
    validation: EpisodeDataset | None


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
    return 0 if engine.updates == config.updates else INTERRUPTED


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
                result = engine.forward_backward(micro_batches, _loss, _count)
            with span("optimizer"):
                step = engine.optim_step()
            with span("log"):
                _write(log, engine, loader, result, step)
                progress.advance(engine.updates, f"loss {result.loss:.4f}")
            if training.validation is not None and _due(engine.updates, config.validate_every):
                with span("validation"):
                    _log_values(log, engine.updates, {"validation_loss": validation_loss(training)})
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
    opened = RunDirectory.open(config.run_dir, config) if world.leads else nullcontext(RunDirectory(Path(config.run_dir)))
    run = stack.enter_context(opened)
    world.barrier()
    dataset, validation = open_datasets(config.data)
    policy = _make_policy(config, dataset, run, world)
    check_evaluation(config.evaluation, policy.spec.resolution)
    if config.noise_draws > 1 and not isinstance(policy, FlowPolicy):
        raise ConfigError(f"noise_draws is {config.noise_draws}, but a {policy.config.family!r} policy denoises nothing; set it to 1")
    engine = Engine(policy, config.engine, config.updates, world)
    loader = _make_loader(config, dataset, policy.spec.chunk_length, world)
    training = _Training(config, world, run, policy, engine, loader, validation if config.validate_every else None)
    _resume(training)
    return training


def _make_loader(config: SftConfig, dataset: EpisodeDataset, chunk_length: int, world: World) -> TrainLoader:
    data = config.data
    return TrainLoader(
        dataset, chunk_length, config.global_batch_size, config.seed, world.rank, world.size, data.workers, data.first_picture_repeats
    )


def _make_policy(config: SftConfig, dataset: EpisodeDataset, run: RunDirectory, world: World) -> PolicyModule:
    """Statistics are fixed here, once: the dataset's, or those that the initial policy was trained with."""
    if config.initial_policy is not None:
        policy = load_policy(config.initial_policy)
        require_equal("initial_policy", policy.spec.conventions, "data", dataset.infos[0].conventions)
        return policy
    first = dataset.infos[0]
    spec = policy_spec(config.policy, first.resolution, first.conventions)
    statistics = compute_statistics(dataset)
    tokenizer = tokenizer_folder(config.policy, dataset, statistics, run.path / "tokenizer", world)
    return make_policy(config.policy, statistics, spec, config.seed, tokenizer)


def _resume(training: _Training) -> None:
    """Go on from the last checkpoint. Raises ConfigError when the statistics of the data are no longer those it was trained with."""
    folder = last_checkpoint(training.run.checkpoints)
    if folder is None:
        return
    extra = load_checkpoint(training.engine, folder)
    ours = training.policy.processor.statistics.sha256
    if extra["statistics_sha256"] != ours:
        raise ConfigError(
            f"{folder} was trained with statistics {extra['statistics_sha256'][:12]}, the data now give {ours[:12]}: episodes were added, "
            "removed or changed; restore them, or start a new run_dir (initial_policy goes on from saved weights)"
        )
    training.loader.load_state_dict(extra["loader"])


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
    streams = [f"update {samples.update}"] + [f"update {samples.update} draw {draw}" for draw in range(1, config.noise_draws)]
    seeds_K = [noise_seeds(config.seed, stream, places) for stream in streams]
    parts = [slice(start, start + config.micro_batch_size_per_rank) for start in range(0, rows, config.micro_batch_size_per_rank)]
    return [(_inputs(training, samples, part), [seed for seeds in seeds_K for seed in seeds[part]]) for part in parts]


def _inputs(training: _Training, samples: SampleBatch, rows: slice) -> Batch:
    return training_batch(training.policy, samples, rows).to(training.world.device)


def training_batch(policy: PolicyModule, samples: SampleBatch, rows: slice) -> Batch:
    """Some rows of samples as a policy takes them, with their weights in the loss where they are not all 1."""
    batch = policy.preprocess(samples.observations[rows], samples.actions_BCA[rows], samples.action_mask_BC[rows])
    weight_B = samples.weight_B[rows]
    return batch if (weight_B == 1).all() else replace(batch, weight_B=torch.from_numpy(weight_B).to(batch.state_BS.device))


def noise_seeds(seed: int, stream: str, places: Sequence[int]) -> list[int]:
    """A 63-bit seed for each place of a global batch, from (seed, stream, place) and nothing else."""
    digests = (hashlib.sha256(f"sft:{seed}:{stream}:{place}".encode()).digest() for place in places)
    return [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]


def _loss(policy: PolicyModule, micro_batch: MicroBatch) -> LossSums:
    return policy.sft_loss(*micro_batch)


def _count(micro_batch: MicroBatch) -> float:
    """What `sft_loss` will count: the weighted numbers of all real actions (the engine compares the two)."""
    mask_BC, weight_B = micro_batch[0].action_mask_BC, micro_batch[0].weight_B
    assert mask_BC is not None, "training batches have actions"
    counts_B = mask_BC.sum(1) if weight_B is None else mask_BC.sum(1) * weight_B
    return float(counts_B.sum()) * ACTION_DIM


def validation_loss(training: _Training) -> float:
    """The loss on held-out samples with noise that is the same at every update, with the averaged weights where there are some."""
    engine, world, dataset = training.engine, training.world, training.validation
    assert dataset is not None, "called only where there is held-out data"
    places = _validation_places(len(dataset), training.config.validation_samples, world)
    sums = np.zeros(2)
    with engine.averaged_weights():
        for start in range(0, len(places), training.config.micro_batch_size_per_rank):
            chosen = places[start : start + training.config.micro_batch_size_per_rank]
            samples = dataset.batch(dataset.columns(chosen, training.policy.spec.chunk_length))
            batch = _inputs(training, samples, slice(None))
            seeds = noise_seeds(training.config.seed, "validation", chosen.tolist())
            result = engine.infer(lambda policy, batch=batch, seeds=seeds: policy.sft_loss(batch, seeds))
            sums += [float(result.loss_sum), float(result.count)]
    loss_sum, count = world.sum(sums.tolist())
    return loss_sum / count


def _validation_places(samples: int, most: int, world: World) -> np.ndarray:
    """int64: this rank's samples; every rank gets equally many, because every rank must enter the policy equally often."""
    chosen = np.unique(np.linspace(0, samples - 1, min(samples, most)).round().astype(np.int64))
    if len(chosen) < world.size:
        raise ConfigError(
            f"{samples} validation samples cannot be shared by {world.size} ranks; raise data.validation_fraction, or set it to 0"
        )
    return chosen[: len(chosen) // world.size * world.size][world.rank :: world.size]


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
