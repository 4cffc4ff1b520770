"""Inference options: compiled networks give the same actions; bfloat16 changes them by a measured amount."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from serving_policies import EchoPolicy
from test_groot_policy import LANGUAGE_POLICIES
from test_published_groot import write_tokenizer

from vla_rl.config import ConfigError
from vla_rl.episode import Observation
from vla_rl.policies.accelerate import Precision, accelerate
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.inference import answer
from vla_rl.policies.statistics import Statistics

Observe = Callable[..., list[Observation]]
SEEDS = [1, 2]


def chunk(policy: FlowPolicy, observations: list[Observation], precision: Precision = "fp32", compiled: bool = False) -> np.ndarray:
    return answer(accelerate(policy, precision, compiled), observations, SEEDS, len(SEEDS), "cpu")[1]


def moving(policy: FlowPolicy) -> FlowPolicy:
    """The policy with an output layer that is not zero, so that its actions depend on everything."""
    for name, parameter in policy.named_parameters():
        if "action_out_proj" in name or "action_decoder" in name:
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    return policy


def test_compiled_networks_give_the_same_actions(policy: FlowPolicy, observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk compiles, the second runs what was compiled, with other observations and without compiling again.

    The graphs are the shipped ones; they run on torch's own kernels, because the C++ compiler takes a minute for them (with it, actions
    differed by 2e-7 at the most, see `docs/policies.md`).
    """
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    first, second = observe(2), observe(2, seed=1)
    plain = [chunk(moving(policy), observations) for observations in (first, second)]
    accelerated = accelerate(policy, "fp32", compiled=True)
    for observations, wanted in zip((first, second), plain):
        compiled = answer(accelerated, observations, SEEDS, 2, "cpu")[1]
        np.testing.assert_allclose(compiled, wanted, rtol=0, atol=1e-5)
        assert len(graphs) == 2, "the prefix's network and the suffix's, each as one graph"
    assert np.abs(plain[0]).max() > 0.1


def test_bfloat16_changes_actions_by_less_than_its_precision_promises(policy: FlowPolicy, observe: Observe) -> None:
    """bfloat16 has 8 bits of mantissa, a relative step of 0.4 %; over the layers and denoise steps it stays within 3 % of the range."""
    observations = observe(2)
    plain = chunk(moving(policy), observations)
    low = chunk(policy, observations, precision="bf16")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    error = np.abs(low - plain)
    assert 0 < error.max() < 0.06 and error.mean() < 0.01, "actions lie in [-1, 1]"


@pytest.mark.parametrize("backbone", LANGUAGE_POLICIES)
def test_rotary_frequencies_stay_exact_in_bfloat16(backbone: str, statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    config = replace(LANGUAGE_POLICIES[backbone], tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))
    policy = make_policy(config, statistics, policy_spec(config, resolution=64)).eval()
    assert isinstance(policy, FlowPolicy)
    before = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    chunk(policy, observe(2), precision="bf16")
    after = dict(policy.named_buffers())
    assert any("inv_freq" in name for name in before)
    assert all(after[name].dtype == buffer.dtype and torch.equal(after[name], buffer) for name, buffer in before.items())


def test_options_that_a_policy_does_not_have_are_named() -> None:
    with pytest.raises(ConfigError, match="EchoPolicy is no flow policy"):
        accelerate(EchoPolicy(), "fp32", compiled=True)
    with pytest.raises(ConfigError, match="EchoPolicy is no family of ours"):
        accelerate(EchoPolicy(), "bf16", compiled=False)
