"""The policy that a run of reinforcement learning starts from, as every role makes it."""

from __future__ import annotations

from vla_rl.config import ConfigError
from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.checkpoint import load_policy
from vla_rl.policies.extend import extend_policy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS


def load_initial(config: RlConfig) -> PolicyModule:
    """The policy that a run starts from. Raises ConfigError where it has other sizes than the recipe says."""
    policy = load_policy(config.initial_policy)
    if config.initial_sizes is not None:
        for part in ("vision", "language", "expert"):
            wanted, found = getattr(PI0_PRESETS[config.initial_sizes], part), getattr(policy.config, part, None)
            if found != wanted:
                raise ConfigError(
                    f"initial_sizes is {config.initial_sizes!r}, whose {part} is {wanted}, but {config.initial_policy} has {found}; leave "
                    "initial_sizes out, or start from another policy"
                )
    return policy


def with_heads(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The initial policy with the heads that the recipe needs; equal weights at every call, in every process."""
    critic = config.critic if config.algorithm.critic is not None else None
    noise_head = config.noise_head if config.exploration.method == "flow_noise" else None
    return extend_policy(initial, critic, noise_head, config.seed)
