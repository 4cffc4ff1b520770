"""Faster inference for policies of ours, each way an option: bfloat16, and `torch.compile`.

bfloat16 halves the weights' memory and changes actions (8 bits of mantissa); how much is measured in `tests/policies/test_accelerate.py`
and told in `docs/policies.md`. Compiling keeps the arithmetic and fuses it; the first chunk waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.episode import Float32, Observation
from vla_rl.policies.base import PolicyOutput
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.inference import ActingPolicy
from vla_rl.policies.module import PolicyModule

Precision = Literal["fp32", "bf16"]


class BFloat16Policy:
    """A policy whose weights are bfloat16 and whose matrix products are too; noise, time steps and actions stay float32.

    So do rotary frequencies, which are no weights: rounded, they turn a token at position 190 of the published sizes by up to 0.2 radians.
    """

    def __init__(self, policy: PolicyModule) -> None:
        self.spec, self._policy = policy.spec, policy
        round_weights(policy)

    def preprocess(self, observations: Sequence[Observation]) -> Any:
        """The policy's own."""
        return self._policy.preprocess(observations)

    def act(self, batch: Any, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """The policy's own, under autocast."""
        with torch.autocast(self._policy.device.type, dtype=torch.bfloat16):
            return self._policy.act(batch, noise_seeds, exploration)

    def value(self, batch: Any) -> Tensor:
        """The policy's own, under autocast."""
        with torch.autocast(self._policy.device.type, dtype=torch.bfloat16):
            return self._policy.value(batch)

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """The policy's own."""
        return self._policy.postprocess(actions_BCA)


def round_weights(policy: PolicyModule) -> None:
    """Make the weights bfloat16 in place, as the engine gathers them under `precision: bf16`; buffers stay what they are."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def accelerate(policy: ActingPolicy, precision: Precision, compiled: bool) -> ActingPolicy:
    """The policy with the options asked for, in place. Raises ConfigError naming the option that this kind of policy does not have."""
    if compiled:
        if not isinstance(policy, FlowPolicy):
            raise ConfigError(f"compile is on, and {type(policy).__name__} is no flow policy (pi0, pi0.5, GR00T); set it to false")
        compile_network(policy)
    if precision == "fp32":
        return policy
    if not isinstance(policy, PolicyModule):
        raise ConfigError(f"precision is 'bf16', and {type(policy).__name__} is no family of ours; use 'fp32'")
    return BFloat16Policy(policy)


def compile_network(policy: FlowPolicy) -> None:
    """Compile what runs once per chunk and what runs once per denoise step; everything around them stays as it is."""
    network: Any = policy.model
    for name in ("encode", "suffix"):
        setattr(network, name, torch.compile(getattr(network, name)))
