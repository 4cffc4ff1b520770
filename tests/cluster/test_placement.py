"""Who sits where, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.placement import gpu_of_seat, plan_placement, seats_of_nodes
from vla_rl.cluster.process import ProcessBackend
from vla_rl.config import ConfigError


def seats(config: ClusterConfig) -> dict[str, tuple[int, int, float]]:
    return {f"{slot.role}_{slot.rank}": (slot.node, slot.seat, slot.gpu_share) for slot in plan_placement(config)}


def test_split_roles_have_a_gpu_each() -> None:
    found = seats(ClusterConfig(backend="ray", trainer_ranks=3, rollout_workers=1, nodes=2, gpus_per_node=2))
    assert found == {"trainer_0": (0, 0, 1), "trainer_1": (0, 1, 1), "trainer_2": (1, 0, 1), "worker_0": (1, 1, 1)}


def test_colocated_roles_share_one() -> None:
    found = seats(ClusterConfig(backend="ray", trainer_ranks=2, rollout_workers=2, nodes=2, gpus_per_node=1, placement="colocated"))
    assert found == {"trainer_0": (0, 0, 0.5), "worker_0": (0, 0, 0.5), "trainer_1": (1, 0, 0.5), "worker_1": (1, 0, 0.5)}


def test_without_gpus_roles_are_dealt_out_evenly() -> None:
    found = seats(ClusterConfig(backend="ray", trainer_ranks=1, rollout_workers=2, nodes=2))
    assert found == {"trainer_0": (0, 0, 0), "worker_0": (0, 1, 0), "worker_1": (1, 0, 0)}


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_role_has_one_seat_and_no_node_is_left_out(ranks: int, workers: int, nodes: int) -> None:
    config = ClusterConfig(backend="ray", trainer_ranks=ranks, rollout_workers=workers)
    config = replace(config, nodes=min(nodes, ranks + workers))
    slots = plan_placement(config)
    tables = seats_of_nodes(slots)
    seated = [(slot.role, slot.rank) for node in tables for seat in node for slot in seat]
    assert sorted(seated) == sorted((slot.role, slot.rank) for slot in slots) and len(set(seated)) == ranks + workers
    assert all(len(seat) == 1 for node in tables for seat in node)
    sizes = [len(node) for node in tables]
    assert len(sizes) == config.nodes and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_workers": 2}, "use 'process' on one machine, or 'ray'"),
        ({"backend": "process", "nodes": 2}, "belong to backend 'ray'"),
        ({"backend": "process", "rollout_workers": 2, "placement": "colocated"}, "make them equal, or use 'split'"),
        ({"trainer_ranks": 0}, "cluster.trainer_ranks is 0; allowed: at least 1"),
        ({"cpus_per_role": 0.0}, "cluster.cpus_per_role is 0.0; allowed: above 0"),
        ({"torch_threads": 0}, "cluster.torch_threads is 0"),
        ({"gpus_per_node": -1}, "cluster.gpus_per_node is -1"),
        (
            {"backend": "ray", "ray_address": "ray://head:10001"},
            "cluster.ray_address is 'ray://head:10001'; allowed: HOST:PORT, `auto`, or none",
        ),
        ({"backend": "ray", "ray_address": "head"}, "cluster.ray_address is 'head'; allowed: HOST:PORT"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterConfig(**changes)  # type: ignore[arg-type]


def test_too_few_gpus_are_counted() -> None:
    config = ClusterConfig(backend="process", trainer_ranks=6, rollout_workers=3, gpus_per_node=8)
    with pytest.raises(ConfigError, match=r"6 trainer ranks and 3 rollout workers need 9 GPUs, but .* have 8"):
        plan_placement(config)


@pytest.mark.parametrize(
    ("visible", "seat", "gpu"),
    [
        (None, 0, "0"),
        (None, 3, "3"),
        ("7", 0, "7"),
        ("6,7", 0, "6"),
        ("6,7", 1, "7"),
        (" 2 , 3 ", 1, "3"),
        ("GPU-8f2a,GPU-11cc", 1, "GPU-11cc"),
    ],
)
def test_roles_stay_on_the_gpus_that_the_user_shows(visible: str | None, seat: int, gpu: str) -> None:
    """On a shared machine the others' GPUs were taken: seat 0 was GPU 0 whatever CUDA_VISIBLE_DEVICES said."""
    assert gpu_of_seat(seat, visible) == gpu


@pytest.mark.parametrize(("visible", "shown"), [("", 0), ("7", 1)])
def test_too_few_shown_gpus_are_counted(visible: str, shown: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = ClusterConfig(backend="process", trainer_ranks=1, rollout_workers=1, gpus_per_node=2)
    with pytest.raises(ConfigError, match=rf"counts on {shown + 1} GPUs here, but CUDA_VISIBLE_DEVICES='{visible}' shows {shown}; lower"):
        ProcessBackend(config, tmp_path, None)
