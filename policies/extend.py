"""Give a policy the heads that reinforcement learning needs: explicitly, once, when a run starts from a policy without them."""

from __future__ import annotations

from dataclasses import replace

from vla_rl.config import ConfigError
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.factory import make_policy
from vla_rl.policies.module import HEADS, PolicyModule
from vla_rl.policies.noise_head import NoiseHeadConfig


def extend_policy(policy: PolicyModule, critic: CriticConfig | None, noise_head: NoiseHeadConfig | None, seed: int) -> PolicyModule:
    """A policy with the weights of `policy` and the heads asked for; new heads get random weights from `seed`, others keep theirs.

    A head that `policy` has and nobody asked for is left out. Raises ConfigError where it has a head of another config, and for a noise
    head of a family that is no flow.
    """
    wanted_heads = {"critic": critic, "noise_head": noise_head}
    if noise_head is not None and not hasattr(policy.config, "noise_head"):
        raise ConfigError(f"a noise head is for flows, and the initial policy's family is {policy.config.family!r}")
    wanted_heads = {name: wanted for name, wanted in wanted_heads.items() if hasattr(policy.config, name)}
    for name, wanted in wanted_heads.items():
        present = getattr(policy.config, name)
        if present is not None and wanted is not None and present != wanted:
            raise ConfigError(f"{name} is {wanted}, but the initial policy has one of another config, {present}; use that one")
    config = replace(policy.config, **wanted_heads)
    tokenizer = str(policy.processor.tokenizer.folder)
    extended = make_policy(config, policy.processor.statistics, policy.spec, seed, tokenizer_folder=tokenizer)
    weights = policy.state_dict()
    kept = {name: weight for name, weight in weights.items() if name in extended.state_dict()}
    missing, _ = extended.load_state_dict(kept, strict=False)
    foreign = [name for name in missing if not name.startswith(HEADS)]
    assert not foreign, f"only heads may be new, not {foreign}"
    return extended.eval()
