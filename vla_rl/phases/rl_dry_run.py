"""`vla-rl rl RECIPE --dry-run`: everything short of allocating the weights. Who sits where, batch arithmetic, shapes, memory per rank.

The policy is built on the meta device and scores one micro-batch there, so a shape that does not fit is an error here and not after an
hour in a queue.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_rl.cluster.placement import plan_placement, seats_of_nodes
from vla_rl.config import ConfigError
from vla_rl.engine.estimate import FLOAT32, RankMemory, rank_memory
from vla_rl.engine.selection import select_trainable
from vla_rl.episode import ACTION_DIM, STATE_DIM, Observation
from vla_rl.phases.evaluation import check_evaluation
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_heads import with_heads
from vla_rl.phases.rl_specs import training_scenes
from vla_rl.policies.base import Batch, TransitionBatch
from vla_rl.policies.checkpoint import meta_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.flow_stochastic import recorded_steps
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

GIB = 1 << 30


def dry_run_rl(config: RlConfig) -> int:
    """Print the plan of a recipe; returns 0. Raises ConfigError (and whatever a run would) for a recipe that cannot run."""
    check_evaluation(config.evaluation, config.env.resolution)
    most_steps = training_scenes(config).group(0)[0].protocol.max_steps
    initial = initial_on_meta(config)
    print("\n".join([*placement_lines(config), *batch_lines(config, initial, most_steps), *memory_lines(config, initial)]))
    return 0


def initial_on_meta(config: RlConfig) -> PolicyModule:
    """The initial policy without its weights: from its folder, or, where that is not made yet, from `initial_sizes`."""
    if Path(config.initial_policy).is_dir():
        return meta_policy(Path(config.initial_policy))
    if config.initial_sizes is None:
        raise ConfigError(
            f"initial_policy {config.initial_policy} is not there, so its sizes are unknown; make it first, or set initial_sizes "
            f"(allowed: {', '.join(PI0_PRESETS)})"
        )
    sizes = PI0_PRESETS[config.initial_sizes]
    with torch.device("meta"):
        return make_policy(sizes, unit_statistics(), policy_spec(sizes, config.env.resolution))


def unit_statistics() -> Statistics:
    """State and actions that lie evenly in [-1, 1], for policies that nobody trained."""
    dims = {STATE: STATE_DIM, ACTION: ACTION_DIM}
    return Statistics({name: FeatureStats.from_values(np.linspace([-1.0] * width, [1.0] * width, 9)) for name, width in dims.items()})


def placement_lines(config: RlConfig) -> list[str]:
    """One line per machine: who sits on which seat."""
    cluster = config.cluster
    if cluster.backend == "inline":
        return ["placement: one process, and one per env"]
    lines = [f"placement: {cluster.placement}, backend {cluster.backend}"]
    for number, seats in enumerate(seats_of_nodes(plan_placement(cluster))):
        device = "gpu" if seats[0][0].has_gpu else "seat"
        taken = [f"{device} {seat[0].seat}: {' + '.join(f'{slot.role} {slot.rank}' for slot in seat)}" for seat in seats]
        lines.append(f"  machine {number}: {', '.join(taken)}")
    return lines


def batch_lines(config: RlConfig, policy: PolicyModule, most_steps: int) -> list[str]:
    """Episodes, rows, updates and micro-batches of one RL step."""
    algorithm, cluster = config.algorithm, config.cluster
    envs = cluster.rollout_workers * config.pool.workers
    chunks = math.ceil(most_steps / policy.spec.executed_horizon)
    rows = algorithm.episodes_per_step * chunks
    updates = algorithm.epochs * math.ceil(rows / algorithm.global_batch_size)
    per_rank = algorithm.global_batch_size // (algorithm.micro_batch_size_per_rank * cluster.trainer_ranks)
    pictures = len(policy.spec.views) * policy.spec.resolution**2 * 3
    host = rows * pictures * (1 + algorithm.max_staleness)
    return [
        f"rollout: {algorithm.episodes_per_step} episodes on {cluster.rollout_workers} x {config.pool.workers} = {envs} envs, at most "
        f"{math.ceil(algorithm.episodes_per_step / envs)} each; up to {most_steps} control steps, {chunks} chunks of "
        f"{policy.spec.executed_horizon}; forwards of {config.rollout_rows} rows",
        f"update: up to {rows} rows; {algorithm.epochs} epochs x {math.ceil(rows / algorithm.global_batch_size)} = {updates} updates of "
        f"{algorithm.global_batch_size} rows = {cluster.trainer_ranks} ranks x {per_rank} micro-batches x "
        f"{algorithm.micro_batch_size_per_rank}",
        f"pictures: up to {host / GIB:.1f} GiB of uint8 in host memory, for {1 + algorithm.max_staleness} rollouts",
    ]


def memory_lines(config: RlConfig, initial: PolicyModule) -> list[str]:
    """Device memory of a trainer rank and of a rollout worker, and of both where they share a GPU."""
    policy = learning_policy(config, initial)
    memory = trainer_memory(config, policy)
    every, learning = (sum(p.numel() for p in policy.parameters() if p.requires_grad or not only) for only in (False, True))
    replica = sum(p.numel() for p in initial.parameters()) * (2 if config.rollout_precision == "bf16" else FLOAT32)
    frozen = {"reference": replica * (config.algorithm.kl.kind != "none"), "teacher": replica * (config.teacher is not None)}
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "moments", "gathered", "activations")} | frozen
    together = sum(parts.values())
    standby = f", standby for weights that arrive meanwhile {_gib(replica)}" if config.cluster.backend == "ray" else ""
    lines = [
        f"policy: {type(policy).__name__}, {every / 1e6:,.1f} M parameters, {learning / 1e6:,.1f} M of them learn; batch shapes "
        + ", ".join(f"{name} {list(shape)}" for name, shape in batch_shapes(config, policy).items()),
        f"memory per trainer rank (GiB): {', '.join(f'{name} {_gib(size)}' for name, size in parts.items() if size)}; "
        f"together {_gib(together)}",
        f"memory per rollout worker (GiB): policy {_gib(replica)}{standby}, and the activations of a forward pass",
    ]
    if config.cluster.placement == "colocated" and config.cluster.gpus_per_node:
        resting = replica + together - memory.moments - memory.gradients - memory.gathered - memory.activations
        lines.append(
            f"memory per GPU that both share (GiB): updates {_gib(together + replica)}, rollouts {_gib(resting)} and a forward pass"
        )
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def learning_policy(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The policy that learns, on the meta device, with its heads and what is frozen."""
    with torch.device("meta"):
        policy = with_heads(config, initial)
        select_trainable(policy, config.engine)
    return policy.train()


def trainer_memory(config: RlConfig, policy: PolicyModule) -> RankMemory:
    """Bytes of one trainer rank; scores a micro-batch on the meta device."""

    batch, record = micro_batch(config, policy)

    def forward() -> Tensor:
        scored = policy.log_prob(batch, record, config.exploration)
        loss = scored.log_prob_BC.sum()
        return loss if scored.value_B is None else loss + scored.value_B.sum()

    return rank_memory(policy, config.engine, config.cluster.trainer_ranks, forward)


def micro_batch(config: RlConfig, policy: PolicyModule) -> tuple[Batch, TransitionBatch]:
    """A micro-batch of one rank and its record, on the meta device, with the shapes that the policy's own processor makes.

    Raises ConfigError for policies that are not flows: what they write has no length before they have written it.
    """
    if not isinstance(policy, FlowPolicy):
        raise ConfigError(
            f"a dry run knows the shapes of flow policies, not of {type(policy).__name__}; start the run with steps: 1 instead"
        )
    rows, size = config.algorithm.micro_batch_size_per_rank, policy.spec.resolution
    blank = Observation(
        {view: np.zeros((size, size, 3), np.uint8) for view in policy.spec.views}, np.zeros(STATE_DIM, np.float32), "do the task"
    )
    kept = recorded_steps(config.exploration, policy.config.denoise_steps)
    shape = (rows, kept, policy.spec.chunk_length, policy.config.model_action_dim)
    one = policy.processor.preprocess([blank])
    with torch.device("meta"):
        record = TransitionBatch(torch.empty(shape), torch.empty(shape), torch.empty(shape[:2], dtype=torch.int64))
    return one.select(torch.zeros(rows, dtype=torch.int64)).to("meta"), record


def batch_shapes(config: RlConfig, policy: PolicyModule) -> dict[str, tuple[int, ...]]:
    """Shapes of what goes into one forward pass of the trainer."""
    batch, record = micro_batch(config, policy)
    named = {"images": batch.images_BVCHW, "state": batch.state_BS, "tokens": batch.tokens_BL, "x_t": record.x_t_BKCA}
    return {name: tuple(tensor.shape) for name, tensor in named.items()}
