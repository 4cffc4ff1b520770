"""One rollout as the driver knows it: ids, scalars, and parcels that it does not open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vla_rl.cluster.backend import Parcel
from vla_rl.episode import ChunkStep, Episode, Float32, Observation, Outcome


@dataclass(frozen=True)
class RolledEpisode:
    """An episode that ended on a rollout worker."""

    episode: Episode
    """Without pictures and records (`without_arrays`)."""
    earned: list[Float32]
    """Its rewards, float32[E] per chunk, computed where the pictures are."""
    parcel: Parcel
    """The whole episode."""


@dataclass
class Rollout:
    """The episodes of one RL step, in spec order."""

    step: int
    """Number of the RL step that trains on it, from 0."""
    episodes: list[RolledEpisode]
    """To train on."""
    masked: list[RolledEpisode]
    """In the batch with weight 0 (`group.filter.rejected: mask`)."""
    final_values: dict[str, float]
    """`EpisodeSpec.key` -> the critic's value of the final observation, for episodes that did not succeed."""
    next_group: int
    """The first group that the next step may use."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers about all of its episodes, those that are left out included."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Busy seconds by part, over all envs: `physics`, `render`, `reset`, `policy_forward`; and `wall`."""
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """A row for `episodes.jsonl` of every episode, those that are left out included."""

    @property
    def parcels(self) -> tuple[list[Parcel], list[Parcel]]:
        """Those of `episodes`, and those of `masked`."""
        return [rolled.parcel for rolled in self.episodes], [rolled.parcel for rolled in self.masked]

    def with_parcels(self, change: Callable[[Parcel], Parcel]) -> Rollout:
        """The same rollout with each parcel replaced, in order."""
        episodes = [replace(rolled, parcel=change(rolled.parcel)) for rolled in self.episodes]
        masked = [replace(rolled, parcel=change(rolled.parcel)) for rolled in self.masked]
        return replace(self, episodes=episodes, masked=masked)

    def release(self) -> None:
        """Its parcels are not needed any more."""
        for parcel in (*self.parcels[0], *self.parcels[1]):
            parcel.release()


def without_arrays(episode: Episode, renderer: str | None = None) -> Episode:
    """The episode with all that a driver needs (spec, outcome, actions, values, versions, times) and without pictures and records.

    `renderer` is what drew the pictures, on whichever machine that was.
    """
    told = {name: episode.provenance[name] for name in ("reset_s", "earlier_faults", "initial_state_sha256") if name in episode.provenance}
    steps = [_small_step(step) for step in episode.steps]
    return replace(episode, steps=steps, final_observation=None, provenance=told | {"renderer": renderer})


def _small_step(step: ChunkStep) -> ChunkStep:
    observation = Observation({}, step.observation.state, step.observation.prompt)
    return replace(
        step, observation=observation, proposed=replace(step.proposed, record=None), frames={}, sim_states_ED=None, robot_states_ER=None
    )


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
