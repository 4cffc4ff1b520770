"""The trainer rank: one rank of the FSDP2 engine, with everything that an update of reinforcement learning needs.

All ranks get the same messages at the same time, because sharded weights are gathered together.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.cluster.backend import Held, Parcel, Sealed
from vla_rl.cluster.rendezvous import Rendezvous
from vla_rl.config import ConfigError
from vla_rl.engine.checkpoint import resume_last, save_checkpoint
from vla_rl.engine.engine import Engine
from vla_rl.engine.offload import Offload
from vla_rl.engine.world import World, close_world, open_world
from vla_rl.episode import Episode
from vla_rl.phases.rl_batches import Advantages, RowScalars, TrainingRows, episodes_to_hold, rank_of_rows, training_rows
from vla_rl.phases.rl_cloning import CloningStream, open_cloning
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_heads import load_initial, load_teacher, with_heads
from vla_rl.phases.rl_rollout import Rollout
from vla_rl.phases.rl_update import CRITIC, Learner, Scores, kl_penalty, make_targets, measure_gradient_noise, score, update
from vla_rl.policies.accelerate import round_weights
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.module import PolicyModule
from vla_rl.telemetry.spans import span
from vla_rl.weights.transport import CollectiveAddress, Sender, Transport

ROLLOUTS_FILE = "rollouts.pickle"
"""In a checkpoint: rollouts that no update has seen yet (only with `max_staleness` above 0)."""


class TrainerRank:
    """Takes the rows of a step, updates the weights and hands them out."""

    def __init__(self, config: RlConfig, rank: int, meeting: Rendezvous | None) -> None:
        """Join the other ranks at `meeting`; None: this process is the only one."""
        self._config = config
        world = _join(config, rank, meeting)
        self.learner, self._cloning = open_learner(config, world)
        self._sender: Sender | None = None
        self._restored: list[Episode] = []
        self._rows: TrainingRows | None = None
        self._reference: Scores | None = None
        self._offload = Offload(self.learner.engine)

    def chunk_length(self) -> int:
        """Actions per chunk of the policy."""
        return self.learner.policy.spec.chunk_length

    def resume(self, checkpoints: Path) -> tuple[dict[str, Any] | None, list[Rollout]]:
        """Go on from the last checkpoint: what the driver saved (None without one), and rollouts whose episodes rank 0's `restored`
        hands out."""
        resumed = resume_last(self.learner.engine, checkpoints)
        if resumed is None:
            return None, []
        folder, extra = resumed
        if self._cloning is not None:
            self._cloning.load_state_dict(extra["cloning"])
        holds = extra["pending"] and self.learner.engine.world.leads
        pending: list[Rollout] = pickle.loads((folder / ROLLOUTS_FILE).read_bytes()) if holds else []
        self._restored = [parcel.fetch() for rollout in pending for parcel in (*rollout.parcels[0], *rollout.parcels[1])]
        return extra, [rollout.with_parcels(lambda parcel: Held(None)) for rollout in pending]

    def restored(self) -> Sealed:
        """The next episode of the rollouts that `resume` found, as a payload."""
        return Sealed(None, self._restored.pop(0))

    def open_weights(self, transport: Transport, address: CollectiveAddress | None = None) -> Any:
        """Start, or start again, to hand out weights; rank 0 returns where workers connect."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None  # a worker that still waits in the old group notices
        dtype = torch.bfloat16 if self._config.rollout_precision == "bf16" else None
        self._sender = Sender(self.learner.engine, transport, address, dtype)
        return self._sender.address if self.learner.engine.world.leads and address is None else None

    def push(self, version: int) -> dict[str, float]:
        """Hand out the weights; see `Sender.push`."""
        assert self._sender is not None, "opened first"
        return self._sender.push(version)

    def take(self, scalars: RowScalars, episodes: Sequence[Parcel]) -> Tensor | None:
        """Fetch those of a step's episodes that this rank trains on.

        `episodes` are all of them, in the order of `scalars.episode_B`. Returns float32[B], what the reward of each row of this rank loses
        (`kl.place: reward`; 0 for the others), or None.
        """
        learner, world = self.learner, self.learner.engine.world
        rank_B = rank_of_rows(scalars, world.size)
        held: dict[int, Episode] = {number: episodes[number].fetch() for number in episodes_to_hold(scalars, rank_B, world.rank)}
        rows = training_rows(scalars, rank_B, held, self.chunk_length())
        reference = None if learner.reference is None else score(learner, rows, learner.reference)
        self._rows, self._reference = rows, reference
        if reference is None or learner.algorithm.kl.place != "reward":
            return None
        return kl_penalty(learner, rows, reference)

    def update(self, wanted: Advantages, step: int, fresh: bool, measure_noise: bool) -> dict[str, float]:
        """All passes over the rows that were taken; returns the numbers of the step."""
        learner, rows = self.learner, self._rows
        assert rows is not None, "taken first"
        with span("advantages"):
            teacher = None if learner.teacher is None else score(learner, rows, learner.teacher)
            targets = make_targets(learner, rows, wanted, self._reference, teacher)
        metrics: dict[str, float] = {}
        if measure_noise:
            with span("gradient_noise"):
                noise = measure_gradient_noise(learner, targets, step, self._config.gradient_noise_parts)
            if noise is not None:
                metrics |= {"gradient_signal_to_noise": noise.signal_to_noise, "gradient_noise_scale": noise.noise_scale}
        with span("update"):
            metrics |= update(learner, targets, step, fresh)
        self._rows = self._reference = None
        return metrics

    def rest(self) -> int:
        """Move the optimizer's moments to host memory while others use the device; returns the bytes that left it."""
        return self._offload.leave()

    def wake(self) -> None:
        """Bring them back; does nothing where they are there."""
        self._offload.come_back()

    def save(self, checkpoints: Path, extra: Mapping[str, Any], pending: Sequence[Rollout]) -> None:
        """Write the checkpoint of RL step `extra["step"]`, with the rollouts that no update has seen."""
        self.wake()
        cloning = self._cloning.state_dict() if self._cloning is not None else None

        def write_policy(folder: Path, weights: Mapping[str, Any]) -> None:
            save_policy(self.learner.policy, folder, weights)

        def write_pending(folder: Path) -> None:
            if pending:
                whole = [rollout.with_parcels(lambda parcel: Held(parcel.fetch())) for rollout in pending]
                (folder / ROLLOUTS_FILE).write_bytes(pickle.dumps(whole))

        values = {**extra, "pending": len(pending), "cloning": cloning}
        keep, step = self._config.keep_checkpoints, extra["step"]
        save_checkpoint(self.learner.engine, checkpoints, values, write_policy, keep, step, write_pending)

    def close(self) -> None:
        """Leave the other ranks and give shared memory back."""
        if self._sender is not None:
            self._sender.close()
        close_world()


def open_learner(config: RlConfig, world: World) -> tuple[Learner, CloningStream | None]:
    """The engine with the policy that learns, its frozen companions, and the demonstrations of a recipe."""
    initial = load_initial(config)
    cloning = open_cloning(config, initial) if config.demonstrations is not None else None
    learner = Learner(
        engine=Engine(with_heads(config, initial), config.engine, config.steps, world, (CRITIC,), config.seed),
        algorithm=config.algorithm,
        exploration=config.exploration,
        seed=config.seed,
        rollout_rows=config.rollout_rows,
        same_kernels=config.vllm is None and config.sglang is None,
        reference=_frozen(config, world, with_heads(config, initial)) if config.algorithm.kl.kind != "none" else None,
        teacher=_frozen(config, world, load_teacher(config, initial)) if config.teacher is not None else None,
        next_samples=cloning.next_samples if cloning is not None else None,
    )
    return learner, cloning


def _frozen(config: RlConfig, world: World, policy: PolicyModule) -> PolicyModule:
    """A policy that only scores, on the device and in the precision of the one that learns, so that equal weights give equal numbers."""
    if config.engine.precision == "bf16":
        round_weights(policy)
    return policy.to(world.device)


def _join(config: RlConfig, rank: int, meeting: Rendezvous | None) -> World:
    if meeting is not None:
        return open_world(config.engine.device, rank, config.cluster.trainer_ranks, meeting.store("trainer"))
    world = open_world(config.engine.device)
    if world.size > 1:
        raise ConfigError(
            f"cluster.backend 'inline' has one trainer rank, but {world.size} were started; start it without torchrun, with "
            f"cluster.backend: process and cluster.trainer_ranks: {world.size}"
        )
    return world
