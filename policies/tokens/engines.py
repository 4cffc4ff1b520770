"""Opening the engine that writes a token policy's rollouts."""

from __future__ import annotations

from vla_rl.config import ConfigError
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.tokens.policy import TokenPolicy
from vla_rl.policies.tokens.sglang_engine import SglangConfig, SglangEngine
from vla_rl.policies.tokens.vllm_engine import CPU_HEAD_WIDTHS, VllmConfig, VllmEngine
from vla_rl.policies.tokens.written import RolloutEngine


def open_engine(policy: PolicyModule, config: VllmConfig | SglangConfig, rows: int) -> RolloutEngine:
    """A vLLM process or an SGLang server that writes the tokens of `policy`; whoever opens it closes it. See `open_vllm`."""
    if isinstance(config, VllmConfig):
        return open_vllm(policy, config, rows)
    tokens = _require_autoregressive(policy, "sglang")
    tokens.engine = SglangEngine(config, tokens.model.language)
    return tokens.engine


def open_vllm(policy: PolicyModule, config: VllmConfig, rows: int) -> VllmEngine:
    """Start a vLLM process that writes the tokens of `policy`, up to `rows` chunks at a time; whoever opens it closes it.

    Raises ConfigError for a policy that vLLM cannot run, EngineLost where the process does not come up.
    """
    tokens = _require_autoregressive(policy, "vllm")
    width = tokens.config.language.head_width
    if tokens.device.type == "cpu" and width not in CPU_HEAD_WIDTHS:
        allowed = ", ".join(map(str, CPU_HEAD_WIDTHS))
        raise ConfigError(f"vllm is given and policy.language.head_width is {width}; vLLM's attention on a CPU has {allowed}")
    prefix = len(tokens.spec.views) * tokens.config.vision.tokens + tokens.config.prompt_tokens + 1
    longest = prefix + tokens.text_length + 1 + tokens.actions.length + 1
    engine = VllmEngine(config, tokens.model.language, rows, longest)
    tokens.engine = engine
    return engine


def _require_autoregressive(policy: PolicyModule, name: str) -> TokenPolicy:
    if isinstance(policy, TokenPolicy) and policy.config.decoding == "autoregressive":
        return policy
    kind = type(policy).__name__ if not isinstance(policy, TokenPolicy) else f"a token policy of {policy.config.decoding} decoding"
    raise ConfigError(f"{name} is given and the policy is {kind}; rollout engines run token policies of decoding 'autoregressive'")
