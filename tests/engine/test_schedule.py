"""Learning rates against hand numbers and torch's own scheduler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.engine.config import EngineConfig, EngineConfigError, Schedule
from vla_rl.engine.schedule import learning_rate


def rates(total: int, **fields: object) -> list[float]:
    config = EngineConfig(lr=1.0, **fields)  # type: ignore[arg-type]
    return [learning_rate(config, update, total) for update in range(total)]


def test_constant_after_a_linear_warmup() -> None:
    assert rates(10, schedule="constant", warmup_fraction=0.4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])


def test_warmup_cosine_ends_at_the_final_fraction() -> None:
    # after 2 warm-up updates: cosine over 3 intervals, cos(0, 60, 120, 180 degrees)
    expected = [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]
    assert rates(6, schedule="warmup_cosine", warmup_fraction=1 / 3, final_lr_fraction=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("total", "rise"), [(10, 0.3), (50, 0.25), (7, 0.5)])
def test_one_cycle_is_torch_one_cycle(total: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=rise, div_factor=25, final_div_factor=4, cycle_momentum=False
    )
    expected = []
    for _ in range(total):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if len(expected) < total:
            scheduler.step()
    # final_div_factor divides the first rate: 1/25/4 = 1/100 of the peak
    assert rates(total, schedule="one_cycle", warmup_fraction=rise, final_lr_fraction=0.01) == pytest.approx(expected, rel=1e-9)


@given(
    schedule=st.sampled_from(["constant", "warmup_cosine", "one_cycle"]),
    total=st.integers(1, 200),
    rise=st.floats(0, 0.99),
    final=st.floats(0, 1),
)
def test_rates_stay_between_zero_and_the_peak_and_hold_after_the_end(schedule: Schedule, total: int, rise: float, final: float) -> None:
    config = EngineConfig(lr=1.0, schedule=schedule, warmup_fraction=rise, final_lr_fraction=final)
    values = [learning_rate(config, update, total) for update in range(total + 3)]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    if schedule == "one_cycle" and total > 1:
        assert values[total] == values[total - 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": 0.0}, "engine.lr is 0.0; allowed: above 0"),
        ({"betas": (0.9, 1.0)}, r"engine.betas is \(0.9, 1.0\); allowed: two numbers in \[0, 1\)"),
        ({"ema_decay": 1.0}, "engine.ema_decay is 1.0"),
        ({"warmup_fraction": 1.0}, "engine.warmup_fraction is 1.0"),
        ({"grad_clip_norm": 0.0}, "engine.grad_clip_norm is 0.0"),
    ],
)
def test_values_outside_their_range_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        EngineConfig(**fields)  # type: ignore[arg-type]
