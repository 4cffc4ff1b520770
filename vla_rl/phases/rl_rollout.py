"""One rollout: the episodes of an RL step, with everything the update needs from the weights that acted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.episode import Episode, Outcome
from vla_rl.phases.rl_specs import StepSource, TrainingScenes
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policy_actor import PolicyActor
from vla_rl.rollout import look_of, run_episodes
from vla_rl.sim.base import EnvPool
from vla_rl.telemetry.spans import span


@dataclass
class Rollout:
    """The episodes of one RL step, in spec order."""

    step: int
    """Number of the RL step that trains on it, from 0."""
    version: int
    """Version of the weights that acted."""
    episodes: list[Episode]
    """To train on."""
    masked: list[Episode]
    """In the batch with weight 0 (`group.filter.rejected: mask`)."""
    final_values: dict[str, float]
    """`EpisodeSpec.key` -> the critic's value of the final observation, for episodes that did not succeed."""
    next_group: int
    """The first group that the next step may use."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers about all of its episodes, those that are left out included."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Busy seconds by part, over all envs: `physics`, `render`, `reset`, `policy_forward`; and `wall`."""


def roll_out(
    step: int, first_group: int, scenes: TrainingScenes, algorithm: AlgorithmConfig, pool: EnvPool, actor: PolicyActor, rows: int
) -> Rollout:
    """Run the episodes of an RL step with the weights that `actor` has. `rows` is the size of its batches."""
    source = StepSource(scenes, first_group, algorithm)
    look = look_of(actor.needs)
    started, forwards, busy_s = time.perf_counter(), actor.forwards, actor.busy_s
    for _ in run_episodes(pool, actor, source, lambda spec: look):
        pass
    wall_s = time.perf_counter() - started
    episodes, masked = source.episodes()
    every = source.all_episodes()
    values: dict[str, float] = {}
    if algorithm.critic is not None:
        with span("final_values"):
            values = final_values(actor.policy, [*episodes, *masked], rows)  # type: ignore[arg-type]
    metrics = rollout_metrics(every, wall_s) | {f"groups_{name}": float(count) for name, count in source.plan().counts.items()}
    chunks = sum(len(episode.steps) for episode in every)
    metrics["batch_fill"] = chunks / max((actor.forwards - forwards) * rows, 1)
    seconds = busy_seconds(every) | {"policy_forward": actor.busy_s - busy_s, "wall": wall_s}
    return Rollout(step, actor.weights_version, episodes, masked, values, source.next_group, metrics, seconds)


def final_values(policy: Pi0Policy, episodes: Sequence[Episode], rows: int) -> dict[str, float]:
    """The critic's value after the last action of every episode that did not succeed, in batches of the rollout's shape."""
    ended = [episode for episode in episodes if not episode.success]
    values: dict[str, float] = {}
    for start in range(0, len(ended), rows):
        part = ended[start : start + rows]
        observations = [episode.final_observation for episode in part]
        padded = [observation for observation in observations if observation is not None]
        if len(padded) < len(part):
            raise ValueError(f"{part[0].spec.key} and others ended without a final observation, so the value to bootstrap from is missing")
        padded += [padded[0]] * (rows - len(padded))
        with torch.no_grad():
            value_B = policy.value(policy.preprocess(padded))
        values |= {episode.spec.key: float(value) for episode, value in zip(part, value_B)}
    return values


def rollout_metrics(episodes: Sequence[Episode], wall_s: float) -> dict[str, float]:
    """Success by task, lengths, crashes and the time of episodes; `env_slowest_s` is the slowest control step of any env."""
    finished = [episode for episode in episodes if episode.outcome is not Outcome.CRASH]
    metrics = {"episodes": float(len(finished)), "crashes": float(len(episodes) - len(finished))}
    if not finished:
        return metrics
    tasks = sorted({(episode.spec.suite, episode.spec.task) for episode in finished})
    rates = {
        f"success/{suite}_{task}": float(np.mean([e.success for e in finished if (e.spec.suite, e.spec.task) == (suite, task)]))
        for suite, task in tasks
    }
    steps = sum(episode.num_steps for episode in finished)
    per_step = [step.timing.get("step", 0.0) / max(len(step.executed_EA), 1) for episode in finished for step in episode.steps]
    metrics |= {"success": float(np.mean([episode.success for episode in finished])), **rates}
    metrics |= {"episode_steps": steps / len(finished), "control_steps_per_s": steps / wall_s}
    p50, p95 = np.percentile(per_step, [50, 95])
    return metrics | {"env_step_p50_s": float(p50), "env_step_p95_s": float(p95), "env_step_slowest_s": max(per_step)}


def busy_seconds(episodes: Sequence[Episode]) -> dict[str, float]:
    """Seconds that envs were busy, by part; those of several envs overlap, so their sum may exceed the wall time."""
    chunks = [step for episode in episodes for step in episode.steps]
    seconds = {name: sum(step.timing.get(name, 0.0) for step in chunks) for name in ("physics", "render")}
    resets = [episode.provenance.get("reset_s", {}) for episode in episodes]
    return seconds | {"reset": sum(timing.get("reset", 0.0) for timing in resets)}
