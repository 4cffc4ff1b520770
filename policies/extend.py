"""Give a policy the heads that reinforcement learning needs: explicitly, once, when a run starts from a policy without them."""

from __future__ import annotations

from dataclasses import replace

from vla_rl.config import ConfigError
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.factory import make_policy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.noise_head import NoiseHeadConfig

HEADS = ("critic.", "noise_head.")
"""Prefixes of the names of the heads' weights."""


def extend_policy(policy: PolicyModule, critic: CriticConfig | None, noise_head: NoiseHeadConfig | None, seed: int) -> PolicyModule:
    """A policy with the weights of `policy` and the heads asked for; new heads get random weights from `seed`, others keep theirs.

    A head that `policy` has and nobody asked for is left out. Raises ConfigError where it has a head of another config.
    """
    for name, wanted in (("critic", critic), ("noise_head", noise_head)):
        present = getattr(policy.config, name)
        if present is not None and wanted is not None and present != wanted:
            raise ConfigError(f"{name} is {wanted}, but the initial policy has one of another config, {present}; use that one")
    config = replace(policy.config, critic=critic, noise_head=noise_head)
    tokenizer = str(policy.processor.tokenizer.folder)
    extended = make_policy(config, policy.processor.statistics, policy.spec, seed, tokenizer_folder=tokenizer)
    weights = policy.state_dict()
    kept = {name: weight for name, weight in weights.items() if name in extended.state_dict()}
    missing, _ = extended.load_state_dict(kept, strict=False)
    foreign = [name for name in missing if not name.startswith(HEADS)]
    assert not foreign, f"only heads may be new, not {foreign}"
    return extended.eval()
