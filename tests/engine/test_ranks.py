"""One rank and two ranks over gloo: the same losses, gradients and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import gradients, resumed, run_ranks, two_ranks
from toy_policy import TinyPolicy

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.world import World

SUM_ORDER = 2e-6
"""Float32 sums of 16 rows in another order: gradients here are of order 1, one ulp is 1.2e-7, and at most 16 terms differ in order."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks did; `folder` holds their checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    reports = run_ranks(two_ranks, 2, folder, folder)
    return {"reports": reports, "folder": folder}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_two_ranks_give_the_gradient_of_one(world: World, pair: dict[str, Any], micro_batches: int) -> None:
    one = gradients(world, EngineConfig(), 1)
    for report in pair["reports"]:
        two = report["gradients"][micro_batches]
        assert two["loss"] == pytest.approx(one["loss"], abs=SUM_ORDER)
        assert two["metrics"]["error"] == pytest.approx(one["metrics"]["error"], abs=SUM_ORDER)
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(two["gradients"][name], gradient, atol=SUM_ORDER, rtol=0)


def test_rank_0_says_what_the_weights_are(pair: dict[str, Any]) -> None:
    for report in pair["reports"]:
        assert torch.equal(report["seeds"], TinyPolicy(seed=0).state_dict()["expert.weight"])


def test_unequal_numbers_of_micro_batches_are_an_error_not_a_hang(pair: dict[str, Any]) -> None:
    assert all("ranks bring [1, 2] micro-batches" in report["unequal"] for report in pair["reports"])


def test_a_checkpoint_of_two_ranks_goes_on_with_one(world: World, pair: dict[str, Any]) -> None:
    two = pair["reports"][0]
    one = resumed(world, pair["folder"] / "checkpoints" / "last", updates=2)
    assert one["extra"] == {"cursor": [1, 2]}
    assert one["updates"] == 2
    assert one["loaded"].keys() == two["saved"].keys()
    assert all(torch.equal(one["loaded"][name], two["saved"][name]) for name in two["saved"])
    assert torch.equal(one["rng"], two["rng"])
    for name, tensor in two["trained"].items():
        # Adam divides by the root of the second moment, which magnifies a difference in the order of sums
        torch.testing.assert_close(one["trained"][name], tensor, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_of_two_ranks_goes_on_with_two_bit_for_bit(pair: dict[str, Any], tmp_path: Path) -> None:
    reports = run_ranks(resumed, 2, tmp_path, pair["folder"] / "checkpoints" / "last", 2)
    for before, after in zip(pair["reports"], reports):
        assert all(torch.equal(after["trained"][name], before["trained"][name]) for name in before["trained"])
        assert torch.equal(after["rng"], before["rng"])
