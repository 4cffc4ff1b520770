"""Policies by family name: from a recipe's config to a policy.

A family is a config dataclass with a `family` tag and a builder; `FAMILIES` is the one place that lists them, and recipes
(`policy: {family: pi0, ...}`), checkpoints and `make_policy` all find a family by its tag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vla_rl.config import ConfigError, nearest_name
from vla_rl.conventions import Conventions
from vla_rl.episode import VIEWS
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.groot.config import GrootConfig
from vla_rl.policies.groot.policy import build_groot
from vla_rl.policies.module import FamilyConfig, PolicyModule
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.policy import build_pi0
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, PromptTokenizer
from vla_rl.policies.tokens.config import TokenConfig
from vla_rl.policies.tokens.policy import build_tokens

PolicyConfig = Pi0Config | GrootConfig | TokenConfig
"""What a recipe's `policy` may be: a union of the families' configs, told apart by `family`."""
Builder = Callable[[Any, Statistics, PolicySpec, PromptTokenizer], PolicyModule]
FAMILIES: dict[str, tuple[type[PolicyConfig], Builder]] = {
    "pi0": (Pi0Config, build_pi0),
    "pi05": (Pi0Config, build_pi0),
    "groot": (GrootConfig, build_groot),
    "tokens": (TokenConfig, build_tokens),
}
"""Family name -> its config class and its builder."""


def policy_spec(
    config: FamilyConfig, resolution: int, conventions: Conventions | None = None, views: tuple[str, ...] = VIEWS
) -> PolicySpec:
    """The spec of a policy with this config, trained on observations rendered at `resolution` pixels."""
    return PolicySpec(config.chunk_length, config.executed_horizon, views, resolution, conventions or Conventions())


def make_policy(
    config: FamilyConfig, statistics: Statistics, spec: PolicySpec, seed: int = 0, tokenizer_folder: str | None = None
) -> PolicyModule:
    """A policy with random weights that depend on `seed` alone; the global random state is left as it was.

    `tokenizer_folder` replaces the config's tokenizer (a checkpoint brings its own). Under `torch.device("meta")` nothing
    is allocated. Raises ConfigError for an unknown family or sizes that contradict each other, ProcessorError for
    statistics that do not fit the features.
    """
    _, build = family(config.family)
    tokenizer = PromptTokenizer(tokenizer_folder or config.tokenizer or SHIPPED_TOKENIZER, config.prompt_tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(config, statistics, spec, tokenizer)


def family(name: str) -> tuple[type[PolicyConfig], Builder]:
    """Config class and builder of a family. Raises ConfigError with the nearest name."""
    if name not in FAMILIES:
        raise ConfigError(f"policy family {name!r} is unknown{nearest_name(name, list(FAMILIES))}")
    return FAMILIES[name]
