"""In-place sync: versions grow, copies are copies, nothing half-fitting is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vla_rl.weights.digest import weights_digest
from vla_rl.weights.in_place import InPlaceSync, WeightSyncError


def network(seed: int, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))


def test_a_pull_gives_the_pushed_bits_whatever_the_trainer_does_meanwhile() -> None:
    trainer, actor, sync = network(0), network(1), InPlaceSync()
    sync.push(trainer.state_dict().items(), 0)
    pushed = weights_digest(trainer.state_dict())
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(1.0)
    assert sync.pull(actor) == 0
    assert sync.verify(actor) == pushed
    sync.push(trainer.state_dict().items(), 7)
    with pytest.raises(WeightSyncError, match="pull again"):
        sync.verify(actor)
    assert sync.pull(actor) == 7
    assert weights_digest(actor.state_dict()) == weights_digest(trainer.state_dict())


def test_versions_only_grow() -> None:
    sync = InPlaceSync()
    sync.push(network(0).state_dict().items(), 3)
    for version in (3, 2):
        with pytest.raises(WeightSyncError, match="versions must grow"):
            sync.push(network(0).state_dict().items(), version)


def test_nobody_acts_before_the_first_push() -> None:
    with pytest.raises(WeightSyncError, match="before the first push"):
        InPlaceSync().pull(network(0))


def test_other_shapes_and_names_are_refused_whole() -> None:
    sync, actor = InPlaceSync(), network(1, width=5)
    before = weights_digest(actor.state_dict())
    sync.push(network(0).state_dict().items(), 0)
    with pytest.raises(WeightSyncError, match=r"0\.weight"):
        sync.pull(actor)
    with pytest.raises(WeightSyncError, match=r"1\.running_mean"):
        sync.pull(nn.Sequential(nn.Linear(4, 3)))
    assert weights_digest(actor.state_dict()) == before


def test_the_digest_tells_names_shapes_types_and_bits_apart() -> None:
    base = {"a": torch.zeros(2, 3)}
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3, dtype=torch.int32)}, {"a": -torch.zeros(2, 3)}]
    assert len({weights_digest(weights) for weights in [base, *others]}) == 5
    assert weights_digest({"a": torch.ones(1), "c": torch.ones(2)}) == weights_digest({"c": torch.ones(2), "a": torch.ones(1)})
