"""The policy that a run of reinforcement learning starts from, as every role makes it."""

from __future__ import annotations

from typing import Any

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


def load_teacher(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The policy that `algorithm.distillation` learns from; its size and what it reads of prompt and state are its own.

    Raises ConfigError where its likelihoods and velocities would be of something else than the initial policy's.
    """
    assert config.teacher is not None, "called where there is one"
    teacher = load_policy(config.teacher)
    ours, theirs = _meaning(initial), _meaning(teacher)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ours | theirs}
    unlike = [f"{name}: {_shown(own)} and {_shown(other)}" for name, (own, other) in pairs.items() if own != other]
    unseen = sorted(set(teacher.spec.views) - set(initial.spec.views))
    if unseen:
        unlike.append(f"views: the teacher looks at {', '.join(unseen)}, which nobody renders")
    if config.exploration.method == "flow_noise" and getattr(teacher, "noise_head", None) is None:
        unlike.append("noise_head: exploration.method is 'flow_noise', and the teacher has none")
    if unlike:
        raise ConfigError(
            f"teacher {config.teacher} cannot score what {config.initial_policy} does; they differ in\n  "
            + "\n  ".join(unlike)
            + "\nTake a teacher that was made for the same data and shapes."
        )
    return teacher


def _meaning(policy: PolicyModule) -> dict[str, Any]:
    """What a sampled chunk means to a policy."""
    names = ("denoise_steps", "model_action_dim", "decoding", "action_tokens", "reasoning_tokens", "vocabulary")
    action = policy.processor.action
    return {
        "kind": type(policy).__name__,
        "chunk_length": policy.spec.chunk_length,
        "resolution": policy.spec.resolution,
        "conventions": policy.spec.conventions.to_dict(),
        **{name: getattr(policy.config, name) for name in names if hasattr(policy.config, name)},
        "normalised action, offset": action.offset.tolist(),
        "normalised action, scale": action.inverse_scale.tolist(),
    }


def _shown(value: Any) -> Any:
    return [round(number, 4) for number in value] if isinstance(value, list) else value


def with_heads(config: RlConfig, initial: PolicyModule) -> PolicyModule:
    """The initial policy with the heads that the recipe needs; equal weights at every call, in every process."""
    critic = config.critic if config.algorithm.critic is not None else None
    noise_head = config.noise_head if config.exploration.method == "flow_noise" else None
    return extend_policy(initial, critic, noise_head, config.seed)
