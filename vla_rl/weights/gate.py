"""A gate in front of a policy: closed until a whole set of weights has arrived.

A worker that was restarted holds the weights it was built with, and one whose transfer broke off holds half of two versions.
Either would act, and nobody would see it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from vla_rl.engine.sharding import ENTRY_POINTS
from vla_rl.weights.errors import NotPulledError


def close_gate(policy: nn.Module, reason: str) -> None:
    """Every entry point of `policy` raises NotPulledError from now on."""

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise NotPulledError(f"the policy cannot act: {reason}; pull first")

    for name in ENTRY_POINTS:
        if hasattr(policy, name):
            policy.__dict__[name] = refuse


def open_gate(policy: nn.Module) -> None:
    """Let the policy act again."""
    for name in ENTRY_POINTS:
        policy.__dict__.pop(name, None)
