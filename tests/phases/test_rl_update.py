"""The passes over a step's rows: what is checked before the first update, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl_recipe import PPO

from vla_rl.algorithms.health import LogProbGap, OnPolicyError
from vla_rl.algorithms.weights import ElementWeights
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import LossResult, StepResult
from vla_rl.phases import rl_update
from vla_rl.phases.rl_update import update

TARGETS = SimpleNamespace(rows=range(2), weights=ElementWeights(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])))
"""Two rows, the first of which counts nothing: nobody acted in it but a person, or its group was rejected."""


class RecordingEngine:
    """Takes no step and remembers what was asked of it."""

    config = EngineConfig()

    def __init__(self) -> None:
        self.did: list[str] = []

    def optim_step(self, factors: Any) -> StepResult:
        self.did.append("step")
        return StepResult(1, 1e-3, 1.0, skipped=False)

    def take_gradient(self) -> None:
        self.did.append("drop")


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`update` of `TARGETS`, one row a minibatch, in order, with what each gradient pass finds given."""

    def run(gap: float, kl: float, target_kl: float | None = None) -> tuple[RecordingEngine, dict[str, float]]:
        def gradient(learner: Any, targets: Any, row_B: Any, step: int, gaps: list[LogProbGap]) -> LossResult:
            assert row_B.tolist() == [1], "rows that count nothing are not trained on"
            gaps.append(LogProbGap(gap, gap))
            return LossResult(0.5, 1.0, {"kl": kl})

        monkeypatch.setattr(rl_update, "_gradient", gradient)
        monkeypatch.setattr(rl_update, "_importance", lambda learner, targets: {})
        monkeypatch.setattr(rl_update, "minibatches", lambda rows, size, seed: [torch.tensor([0]), torch.tensor([1])])
        engine = RecordingEngine()
        learner: Any = SimpleNamespace(
            algorithm=replace(PPO, target_kl=target_kl),
            engine=engine,
            seed=0,
            same_kernels=True,
            rollout_rows=4,
            next_samples=None,
            factors=lambda step: {},
        )
        return engine, update(learner, TARGETS, 0, fresh=True)  # type: ignore[arg-type]

    return run


def test_the_first_minibatch_that_counts_is_checked(learn: Any) -> None:
    """Not the first that was drawn: there is nothing to see in it."""
    with pytest.raises(OnPolicyError, match=r"differs by up to 0\.01 nats"):
        learn(gap=0.01, kl=0.0)
    engine, metrics = learn(gap=0.0, kl=0.0)
    assert engine.did == ["step", "step"] and metrics["updates"] == 2 and metrics["log_prob_gap_largest"] == 0.0


def test_a_kl_beyond_the_target_in_the_very_first_minibatch_updates_nothing(learn: Any) -> None:
    """As data of older weights may have; the gradient that showed it is dropped, and the next epoch does not begin."""
    engine, metrics = learn(gap=0.0, kl=0.031, target_kl=0.02)
    assert engine.did == ["drop"]
    assert (metrics["updates"], metrics["stopped_by_kl"], metrics["kl_last"]) == (0.0, 1.0, 0.031)
