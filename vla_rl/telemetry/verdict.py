"""Which part of a step limits it, why, and what to change: from the shares of wall time and who was busy while the driver waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENV_PARTS = ("physics", "render", "reset")
"""What envs do; measured by the workers themselves."""
SPANS: Mapping[str, str] = {
    "update": "optimizer",
    "gradient_noise": "optimizer",
    "advantages": "optimizer",
    "final_values": "policy forward",
    "wait_policy": "policy forward",
    "actor": "policy forward",
    "weight_sync": "weight sync",
    "wait_trainer": "trainer wait",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "rewards": "rewards",
}
"""Span -> the part it belongs to. Time in and waits for the pool are divided among `ENV_PARTS`, waits for either by how busy each was."""
REMEDIES: Mapping[str, str] = {
    "physics": "more pool.workers while there are idle cores, or a longer executed horizon",
    "render": "env.render_profile: fast, a smaller env.resolution, or a longer executed horizon (one look per chunk)",
    "reset": "fewer settle steps, or longer episodes per reset",
    "policy forward": "a larger rollout_batch_size with more pool.workers, fewer denoise_steps, or a GPU",
    "batch wait": "a smaller rollout_batch_size: batches go out almost empty",
    "trainer wait": "algorithm.max_staleness above 0, so that rollouts and updates overlap",
    "weight sync": "fewer trainable parameters (engine.trainable: expert), or a faster transport",
    "optimizer": "fewer epochs, a larger micro_batch_size_per_rank, or more trainer ranks",
    "checkpoint": "a larger checkpoint_every",
    "evaluation": "a larger evaluation.every, or fewer episodes_per_task",
    "rewards": "a faster reward.function",
    "unaccounted": "a profile: no span covers this time",
}
FULL_ENOUGH = 0.5
"""Batches of the policy filled less than this count as waiting for the batch where the policy is what limits."""


@dataclass(frozen=True)
class Verdict:
    """What limits a step."""

    name: str
    """One of `REMEDIES`."""
    share: float
    """Its share of the step's wall time."""
    reason: str
    remedy: str


def attribute(shares: Mapping[str, float], busy_s: Mapping[str, float], envs: int) -> dict[str, float]:
    """Share of the step by part, from leaf spans (`leaf_shares`) and busy seconds (`physics`, `render`, `reset`, `policy_forward`).

    While the driver is in the pool or waits for it, the envs' parts are charged as they were busy; while it waits for envs and policy
    alike, the policy is charged its own seconds against those of one env.
    """
    parts = dict.fromkeys(REMEDIES, 0.0)
    for name, share in shares.items():
        if name in SPANS or name == "unaccounted":
            parts[SPANS.get(name, name)] += share
    env_s = sum(busy_s.get(part, 0.0) for part in ENV_PARTS) / max(envs, 1)
    policy_s = busy_s.get("policy_forward", 0.0)
    both = shares.get("wait_env_and_policy", 0.0)
    to_policy = both * policy_s / (env_s + policy_s) if env_s + policy_s else 0.0
    parts["policy forward"] += to_policy
    for_envs = shares.get("pool", 0.0) + shares.get("wait_env", 0.0) + both - to_policy
    for part in ENV_PARTS:
        parts[part] += for_envs * busy_s.get(part, 0.0) / envs / env_s if env_s else 0.0
    return parts


def bottleneck(shares: Mapping[str, float], busy_s: Mapping[str, float], envs: int, batch_fill: float = 1.0) -> Verdict:
    """The part with the largest share, with its reason and what to change."""
    parts = attribute(shares, busy_s, envs)
    name = max(parts, key=lambda part: parts[part])
    share, reason = parts[name], f"{parts[name]:.0%} of the step"
    if name == "policy forward" and batch_fill < FULL_ENOUGH:
        name, reason = "batch wait", f"{reason} is policy forward, with batches filled {batch_fill:.0%}"
    second = sorted(parts, key=lambda part: -parts[part])[1]
    return Verdict(name, share, f"{reason}, before {second} with {parts[second]:.0%}", REMEDIES[name])
