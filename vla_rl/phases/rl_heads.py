"""The policy that a run of reinforcement learning starts from, as every role makes it."""

from __future__ import annotations

from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.extend import extend_policy
from vla_rl.policies.module import PolicyModule


def with_heads(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The initial policy with the heads that the recipe needs; equal weights at every call, in every process."""
    critic = config.critic if config.algorithm.critic is not None else None
    noise_head = config.noise_head if config.exploration.method == "flow_noise" else None
    return extend_policy(initial, critic, noise_head, config.seed)
