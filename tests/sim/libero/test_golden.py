"""The doctor's two checks: they pass on this installation, and they see the two ways in which mujoco changed."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.sim.libero import golden


@pytest.mark.slow
def test_this_installation_is_golden() -> None:
    render, settle = golden.golden_render_check(), golden.settle_check()
    assert render.ok and render.reason == "" and render.measured <= 1.0, render
    assert settle.ok and settle.reason == "" and settle.measured <= 1e-4, settle


def test_a_darker_floor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mujoco 3.3.3 was measured to differ by 36 grey levels; a tenth of that is enough."""
    with np.load(golden.GOLDEN_PATH) as stored:
        cells = stored["cells"]
    monkeypatch.setattr(golden, "_cells", lambda: cells - 3.6)
    result = golden.golden_render_check()
    assert not result.ok and result.measured == pytest.approx(3.6, abs=1e-3) and "darker than with mujoco 3.3.2" in result.reason


def test_an_object_that_slid_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mujoco 3.4.0 was measured to move the bowl by 6 mm."""
    with np.load(golden.GOLDEN_PATH) as stored:
        heights = dict(zip(stored["names"].tolist(), stored["heights"].tolist(), strict=True))
    heights["akita_black_bowl_1"] += 0.006
    monkeypatch.setattr(golden, "_heights", lambda: heights)
    result = golden.settle_check()
    assert not result.ok and result.measured == pytest.approx(0.006) and "akita_black_bowl_1 rests at" in result.reason
