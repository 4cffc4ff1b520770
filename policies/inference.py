"""Acting with a policy: one function that answers observations, for rollouts, evaluation and servers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.episode import Float32, Observation
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration


class ActingPolicy(Protocol):
    """What is needed of a policy that only acts: a family of ours, a LeRobot policy behind its adapter, a stand-in of a benchmark."""

    spec: PolicySpec

    def preprocess(self, observations: Sequence[Observation]) -> Any:
        """Observations to the policy's own kind of batch, which has `to(device)`."""
        ...

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """float32[B, C, 7] in environment units."""
        ...

    def act(self, batch: Any, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """See `Policy.act`."""
        ...


def answer(
    policy: ActingPolicy,
    observations: Sequence[Observation],
    noise_seeds: Sequence[int],
    batch_size: int,
    device: torch.device | str,
    exploration: Exploration | None = None,
) -> tuple[PolicyOutput, Float32]:
    """The policy's output for at most `batch_size` observations, and the actions float32[n, C, 7] in environment units.

    The batch is filled up with its first row, so that every forward has one size and a row's bits do not depend on who else asked;
    the rows of the output beyond `len(observations)` are that filling.
    """
    missing = batch_size - len(observations)
    rows, seeds = [*observations, *[observations[0]] * missing], [*noise_seeds, *[noise_seeds[0]] * missing]
    with torch.no_grad():
        output = policy.act(policy.preprocess(rows).to(device), seeds, exploration)
        return output, policy.postprocess(output.actions_BCA)[: len(observations)]
