"""The bottleneck verdict from shares and busy seconds, by hand."""

from __future__ import annotations

import pytest

from vla_rl.telemetry.verdict import REMEDIES, attribute, bottleneck

BUSY = {"physics": 6.0, "render": 2.0, "reset": 0.0, "policy_forward": 1.0, "wall": 5.0}


def test_waits_for_envs_are_charged_as_the_envs_were_busy() -> None:
    parts = attribute({"wait_env": 0.8, "update": 0.15, "unaccounted": 0.05}, BUSY, envs=2)
    assert parts["physics"] == pytest.approx(0.6) and parts["render"] == pytest.approx(0.2)
    assert parts["optimizer"] == 0.15 and parts["unaccounted"] == 0.05


def test_a_wait_for_either_is_divided_by_the_seconds_of_one_env_and_the_policy() -> None:
    """Two envs were busy 4 s each, the policy 1 s: the policy is charged a fifth."""
    parts = attribute({"wait_env_and_policy": 0.5}, BUSY, envs=2)
    assert parts["policy forward"] == pytest.approx(0.1)
    assert parts["physics"] + parts["render"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        ({"wait_env": 0.9, "update": 0.1}, "physics"),
        ({"wait_policy": 0.6, "update": 0.4}, "policy forward"),
        ({"update": 0.7, "wait_env": 0.3}, "optimizer"),
        ({"wait_trainer": 0.9, "update": 0.1}, "trainer wait"),
        ({"weight_sync": 0.6}, "weight sync"),
        ({"checkpoint": 0.6}, "checkpoint"),
        ({"unaccounted": 0.9}, "unaccounted"),
    ],
)
def test_the_largest_part_is_named_with_what_to_change(shares: dict[str, float], name: str) -> None:
    verdict = bottleneck(shares, BUSY, envs=2)
    assert verdict.name == name and verdict.remedy == REMEDIES[name]
    assert f"{verdict.share:.0%} of the step" in verdict.reason


def test_almost_empty_batches_are_called_by_their_name() -> None:
    assert bottleneck({"wait_policy": 0.9}, BUSY, envs=2, batch_fill=0.2).name == "batch wait"
