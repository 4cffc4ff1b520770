"""Weights over a process group: from 1, 2, 4 and 8 trainer ranks to 1 and 3 workers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from synced_policy import SyncedPolicy, change
from weight_jobs import join, pull_collective, pull_collective_once, receive, refused_worker, start, train_and_push

from vla_rl.engine.config import EngineConfig
from vla_rl.weights.collective import CollectiveSender
from vla_rl.weights.digest import tensor_digest
from vla_rl.weights.errors import LayoutMismatch, VersionError, WeightSyncError
from vla_rl.weights.layout import TensorEntry, WeightLayout, held_weights


def full_layout() -> WeightLayout:
    return WeightLayout(tuple(TensorEntry(name, tuple(t.shape), t.dtype) for name, t in held_weights(SyncedPolicy()).items()))


def expected(trainable: str, cast: torch.dtype | None) -> dict[str, torch.Tensor]:
    """What the trainer's weights are after its two changes, without ranks, shards or transport."""
    policy = SyncedPolicy()
    learning = set(policy.parameter_names(trainable))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in learning)
    for version in (3, 4):
        change(policy, version)
    return {name: tensor.to(cast) if tensor.is_floating_point() else tensor for name, tensor in held_weights(policy).items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_worker_holds_the_trainers_bits(tmp_path: Path, ranks: int, workers: int) -> None:
    trainable, cast = ("all", None) if workers == 1 else ("expert", torch.bfloat16)
    config = EngineConfig(trainable=trainable)  # pyright: ignore[reportArgumentType]
    trainers = [start(train_and_push, rank, ranks, workers, tmp_path, config, cast) for rank in range(ranks)]
    pullers = [start(pull_collective, worker, workers, tmp_path, cast) for worker in range(1, workers + 1)]
    pushed = [receive(connection) for _, connection in trainers]
    assert all(digests == pushed[0] for digests in pushed)  # every rank gathered the same
    for _, connection in pullers:
        rows, weights = receive(connection)
        assert rows == [(3, pushed[0][0]), (4, pushed[0][1])]
        assert weights == {name: tensor_digest(tensor) for name, tensor in expected(trainable, cast).items()}
    for process, _ in [*trainers, *pullers]:
        process.join()
        assert process.exitcode == 0


def test_unlike_workers_are_refused_on_both_sides(tmp_path: Path) -> None:
    process, worker = start(refused_worker, str(tmp_path / "store"))
    line = r"value_head.weight: torch.float32 \[2, 24\] in the worker's policy, torch.float32 \[1, 24\] in the trainer"
    with pytest.raises(LayoutMismatch, match=r"worker 1: (.|\n)*" + line):
        CollectiveSender(full_layout(), join(tmp_path / "store", 1), 1)
    assert "value_head.bias" in receive(worker)
    process.join()


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="worker 1 of 1 did not come to the weight sync"):
        CollectiveSender(full_layout(), join(tmp_path / "store", 1), 1, deadline_s=0.5)


@pytest.mark.faults
def test_a_killed_worker_is_an_error_and_its_successor_pulls_before_it_acts(tmp_path: Path) -> None:
    policy, version = SyncedPolicy(), 1
    process, worker = start(pull_collective_once, str(tmp_path / "first"))
    sender = CollectiveSender(full_layout(), join(tmp_path / "first", 1), 1, bucket_bytes=1000, deadline_s=60)
    sender.push(held_weights(policy).items(), version)
    assert receive(worker) == 1
    with pytest.raises(VersionError):
        sender.push(held_weights(policy).items(), 1)
    process.kill()
    process.join()
    with pytest.raises(WeightSyncError, match="a member of the weight sync was lost; connect all members again over a new store"):
        while True:  # the first broadcasts may still fit into the socket's buffer
            version += 1
            sender.push(held_weights(policy).items(), version)
    _, successor = start(pull_collective_once, str(tmp_path / "second"))
    again = CollectiveSender(full_layout(), join(tmp_path / "second", 1), 1)
    again.push(held_weights(policy).items(), version)
    assert receive(successor) == version
