"""The update of an RL step: passes over its rows in minibatches, each one forward, backward and optimizer step.

Shape legend: B rows of the step;  W rows of a micro-batch;  U ratios per row;  C actions per chunk;  K recorded denoise steps;
              A action dimensions of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_rl.algorithms.batches import minibatches, rank_batches
from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.corrections import OldPolicy, effective_sample_share, old_policy
from vla_rl.algorithms.health import GradientNoise, LogProbGap, check_on_policy, exceeds_target_kl, gradient_noise, log_prob_gap
from vla_rl.algorithms.losses import cloning_coefficient, distillation_advantage, kl_estimate
from vla_rl.algorithms.reductions import element_mask, reduce_per_action
from vla_rl.algorithms.weights import element_weights
from vla_rl.datasets.samples import SampleBatch
from vla_rl.engine.engine import Engine, LossResult
from vla_rl.engine.sharding import compute_context
from vla_rl.episode import ACTION_DIM
from vla_rl.phases.rl_batches import Advantages, TrainingRows
from vla_rl.phases.rl_loss import MicroBatch, Targets, row_loss
from vla_rl.phases.sft_batches import training_batch
from vla_rl.policies.base import LossSums, ScoredTransitions
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.module import PolicyModule

CRITIC = "critic."
"""Prefix of the critic's parameters, which have a learning rate of their own."""
NextSamples = Callable[[], tuple[SampleBatch, list[int]]]
"""Demonstration samples of one update and their noise seeds, for cloning."""


@dataclass(frozen=True)
class Scores:
    """What a frozen policy thinks of the rows."""

    log_prob_BC: Tensor
    """float32[B, C]."""
    velocity_BKCA: Tensor
    """float32[B, K, C, A]."""


@dataclass
class Learner:
    """What an update works with, besides the rows."""

    engine: Engine
    algorithm: AlgorithmConfig
    exploration: Exploration
    seed: int
    rollout_rows: int
    """Rows of the rollout's forward pass: where micro-batches have the same number, log-ratios of fresh data are exactly 0."""
    same_kernels: bool
    """The rollout's log-probabilities come from this very code, and not from vLLM's."""
    reference: PolicyModule | None
    """The weights that the run started from, for KL."""
    teacher: PolicyModule | None
    """For distillation."""
    next_samples: NextSamples | None
    """For cloning."""

    @property
    def policy(self) -> PolicyModule:
        """The policy that learns (sharded: enter it through its entry points)."""
        return self.engine.policy  # type: ignore[return-value]

    def factors(self, step: int) -> dict[str, float]:
        """Factors on the engine's learning rate at RL step `step`: the critic's own rate; the policy stands still while it warms up."""
        critic = self.algorithm.critic
        rate = 1.0 if critic is None or critic.learning_rate is None else critic.learning_rate / self.engine.config.lr
        return {CRITIC: rate, "": self.algorithm.policy_coefficient(step)}


def score(learner: Learner, rows: TrainingRows, policy: PolicyModule | None) -> Scores:
    """Log-probabilities and velocities of the rows that this rank holds, under `policy` or (None) the learner's own weights.

    Not a number for the others. Ranks score equally many micro-batches, because the learner's weights are gathered together.
    """
    world, outputs = learner.engine.world, list[ScoredTransitions]()
    dealt = rank_batches(torch.arange(len(rows)), rows.rank_B, world.size, learner.algorithm.micro_batch_size_per_rank)
    for index_W in dealt.row_RSW[world.rank]:
        batch = (policy or learner.policy).preprocess([rows.observations[row] for row in index_W.tolist()])
        record = rows.record.select(index_W).to(world.device)
        if policy is None:
            outputs.append(learner.engine.infer(lambda own, b=batch, r=record: own.log_prob(b, r, learner.exploration)))
        else:
            with torch.no_grad(), compute_context(learner.engine.config, world):
                outputs.append(policy.log_prob(batch, record, learner.exploration))
    row_B = dealt.row_RSW[world.rank].flatten()
    log_prob_BC, velocity_BKCA = torch.cat([o.log_prob_BC for o in outputs]).cpu(), torch.cat([o.velocity_BKCA for o in outputs]).cpu()
    return Scores(_spread_out(log_prob_BC, row_B, len(rows)), _spread_out(velocity_BKCA, row_B, len(rows)))


def _spread_out(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """[rows, ...] with `values` at `row`, and not a number elsewhere."""
    spread = torch.full((rows, *values.shape[1:]), torch.nan, dtype=values.dtype)
    spread[row] = values
    return spread


def reduced(learner: Learner, rows: TrainingRows, value_BC: Tensor) -> Tensor:
    """float32[B, U]: per-action numbers of all rows, reduced as the ratios are."""
    algorithm = learner.algorithm
    return reduce_per_action(value_BC, rows.mask_BC, algorithm.log_prob, ACTION_DIM, rows.record.kept_steps)


def kl_penalty(learner: Learner, rows: TrainingRows, reference: Scores) -> Tensor:
    """float32[B]: what each chunk's reward loses for its distance from the reference (`kl.place: reward`); 0 for rows of other ranks."""
    kl = learner.algorithm.kl
    assert kl.kind not in ("none", "velocity"), "AlgorithmConfig checks it"
    estimate_BU = kl_estimate(kl.kind, reduced(learner, rows, rows.behaviour_BC), reduced(learner, rows, reference.log_prob_BC))
    penalty_B = kl.coefficient * torch.where(element_mask(rows.mask_BC, learner.algorithm.log_prob.unit), estimate_BU, 0.0).sum(1)
    return torch.where(rows.rank_B == learner.engine.world.rank, penalty_B, 0.0)


def make_targets(learner: Learner, rows: TrainingRows, wanted: Advantages, reference: Scores | None, teacher: Scores | None) -> Targets:
    """Everything about the rows that stays fixed during the update."""
    algorithm = learner.algorithm
    proximal_BU = reduced(learner, rows, score(learner, rows, None).log_prob_BC) if algorithm.old_log_prob == "recompute" else None
    behaviour_BU = reduced(learner, rows, rows.behaviour_BC)
    advantage_BU = wanted.advantage_B[:, None].expand_as(behaviour_BU)
    if teacher is not None and algorithm.distillation.kind == "policy_gradient":
        lead_BU = distillation_advantage(behaviour_BU, reduced(learner, rows, teacher.log_prob_BC), algorithm.distillation.bound)
        advantage_BU = advantage_BU + algorithm.distillation.coefficient * lead_BU
    mask_BU = element_mask(rows.mask_BC, algorithm.log_prob.unit)
    return Targets(
        rows=rows,
        weights=element_weights(mask_BU, rows.episode_B, algorithm.aggregation, algorithm.fixed_divisor),
        old=old_policy(algorithm.correction, behaviour_BU, proximal_BU),
        advantage_BU=advantage_BU,
        return_B=wanted.return_B,
        reference_BU=None if reference is None else reduced(learner, rows, reference.log_prob_BC),
        reference_velocity_BKCA=None if reference is None else reference.velocity_BKCA,
        teacher_velocity_BKCA=None if teacher is None else teacher.velocity_BKCA,
    )


def update(learner: Learner, targets: Targets, step: int, fresh: bool) -> dict[str, float]:
    """All passes over the rows; returns the numbers of the step, averaged over its updates.

    The first minibatch with a weight of `fresh` data (made by the very weights that learn) must have log-ratios of 0: raises
    OnPolicyError otherwise.
    """
    algorithm, results = learner.algorithm, list[dict[str, float]]()
    gap, kl, stopped = None, 0.0, False
    for epoch in range(algorithm.epochs):
        for row_B in minibatches(len(targets.rows), algorithm.global_batch_size, _seed(learner.seed, step, epoch)):
            if not targets.weights.select(row_B).count():
                continue
            gaps: list[LogProbGap] = []
            result = _gradient(learner, targets, row_B, step, gaps)
            if gap is None:
                gap = LogProbGap(max(g.largest for g in gaps), sum(g.mean for g in gaps) / len(gaps))
                if fresh:
                    same = learner.same_kernels and algorithm.micro_batch_size_per_rank == learner.rollout_rows
                    check_on_policy(gap, same, learner.engine.config.precision)
            kl = result.metrics["kl"]
            if exceeds_target_kl(kl, algorithm.target_kl):
                learner.engine.take_gradient()
                stopped = True
                break
            results.append({"loss": result.loss, **result.metrics, **_clone(learner, step, kl), **_step(learner, step)})
        if stopped:
            break
    return _averaged(results) | {
        "updates": float(len(results)),
        "kl_last": kl,
        "stopped_by_kl": float(stopped),
        "log_prob_gap_largest": 0.0 if gap is None else gap.largest,
        "log_prob_gap_mean": 0.0 if gap is None else gap.mean,
        **_importance(learner, targets),
    }


def measure_gradient_noise(learner: Learner, targets: Targets, step: int, parts: int) -> GradientNoise | None:
    """Signal and noise of the policy's gradient on these rows, from equal parts of whole episodes; None where too few have a gradient.

    Nothing is updated. The critic's own parameters do not take part.
    """
    part_B = targets.rows.episode_B % parts
    gradients: list[dict[str, Tensor]] = []
    for part in range(parts):
        row_B = torch.nonzero(part_B == part)[:, 0]
        if len(row_B) and targets.weights.select(row_B).count() > 0:
            _gradient(learner, targets, row_B, step, [])
            gradients.append({n: g for n, g in learner.engine.take_gradient().items() if not n.startswith(CRITIC)})
    if len(gradients) < 2:
        return None
    world = learner.engine.world
    squares = world.sum([_square_norm(gradient.values()) for gradient in gradients])
    mean = [torch.stack([gradient[name] for gradient in gradients]).mean(0) for name in gradients[0]]
    return gradient_noise(torch.tensor(squares), world.sum([_square_norm(mean)])[0])


def _square_norm(gradients: Iterable[Tensor]) -> float:
    return sum(float(gradient.double().square().sum()) for gradient in gradients)


def _gradient(learner: Learner, targets: Targets, row_B: Tensor, step: int, gaps: list[LogProbGap]) -> LossResult:
    """Accumulate the gradient of one minibatch; appends how far its log-probabilities are from the recorded ones."""
    engine, algorithm = learner.engine, learner.algorithm
    dealt = rank_batches(row_B, targets.rows.rank_B, engine.world.size, algorithm.micro_batch_size_per_rank)
    row_SW, real_SW = dealt.row_RSW[engine.world.rank], dealt.real_RSW[engine.world.rank]
    micro_batches = [MicroBatch.of(targets, index_W, real_W) for index_W, real_W in zip(row_SW, real_SW)]

    def loss(policy: PolicyModule, micro: MicroBatch) -> LossSums:
        batch = policy.preprocess([targets.rows.observations[row] for row in micro.index_W.tolist()])
        scored = policy.log_prob(batch, micro.record.to(engine.world.device), learner.exploration)
        gaps.append(log_prob_gap(scored.log_prob_BC.cpu(), micro.behaviour_WC, micro.mask_WC))
        return row_loss(scored, micro, algorithm, algorithm.policy_coefficient(step))

    return engine.forward_backward(micro_batches, loss, lambda micro: micro.weights.count())


def _clone(learner: Learner, step: int, kl: float) -> dict[str, float]:
    """Add the gradient of behaviour cloning to the one that is accumulated; each rank takes its share of the samples."""
    cloning, policy_coefficient = learner.algorithm.cloning, learner.algorithm.policy_coefficient(step)
    if learner.next_samples is None:
        return {}
    samples, seeds = learner.next_samples()
    weight = policy_coefficient * cloning_coefficient(cloning.coefficient, kl, cloning.full_at_kl)
    if not weight:
        return {"cloning_weight": 0.0}
    size, world = learner.algorithm.micro_batch_size_per_rank, learner.engine.world
    share = len(seeds) // world.size  # without a rest: RlConfig checks it
    ends = (world.rank * share, (world.rank + 1) * share)
    parts = [slice(start, min(start + size, ends[1])) for start in range(*ends, size)]

    def loss(policy: PolicyModule, part: slice) -> LossSums:
        batch = training_batch(policy, samples, part)
        sums = policy.sft_loss(batch, seeds[part])
        return LossSums(weight * sums.loss_sum, sums.count, {})

    result = learner.engine.forward_backward(parts, loss, samples.target_count)
    return {"cloning_weight": weight, "loss_cloning": result.loss / weight}


def _step(learner: Learner, step: int) -> dict[str, float]:
    result = learner.engine.optim_step(learner.factors(step))
    return {"grad_norm": result.grad_norm, "learning_rate": result.learning_rate, "skipped_updates": float(result.skipped)}


def _averaged(results: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for result in results for name in result)
    return {name: sum(r[name] for r in results if name in r) / sum(name in r for r in results) for name in names}


def _importance(learner: Learner, targets: Targets) -> dict[str, float]:
    """How much of the batch, over all ranks, the correction for older data leaves."""
    old: OldPolicy = targets.old
    if old.importance_BU is None:
        return {}
    world = learner.engine.world
    counts_BU = (targets.weights.share_BU > 0) & (targets.rows.rank_B == world.rank)[:, None]
    weights = torch.cat(world.gather(old.importance_BU[counts_BU]))
    return {"effective_sample_share": effective_sample_share(weights, torch.ones_like(weights, dtype=torch.bool))}


def _seed(seed: int, step: int, epoch: int) -> int:
    """A 63-bit seed for the order of rows."""
    digest = hashlib.sha256(f"rl:{seed}:{step}:{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
