"""Checkpoints on one rank: resume bit for bit, damage named, nothing half-written."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_jobs import state
from toy_policy import TinyPolicy, count, loss, rows, train

from vla_rl.engine.checkpoint import CheckpointError, last_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World

Limit = Callable[[], AbstractContextManager[None]]


def make(world: World, seed: int = 0, **fields: object) -> Engine:
    return Engine(TinyPolicy(seed=seed), EngineConfig(ema_decay=0.9, **fields), 8, world)  # type: ignore[arg-type]


def equal(first: Engine, second: Engine) -> bool:
    ours, theirs = state(first), state(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("trainable", ["all", "expert"])
def test_two_and_two_updates_are_four(world: World, tmp_path: Path, trainable: str) -> None:
    straight, first = make(world, trainable=trainable), make(world, trainable=trainable)
    train(straight, 4)
    train(first, 2)
    save_checkpoint(first, tmp_path, {"cursor": {"update": 2}})
    second = make(world, seed=7, trainable=trainable)
    assert load_checkpoint(second, tmp_path / "last") == {"cursor": {"update": 2}}
    assert (second.updates, second.version, second.skipped) == (2, 2, 0)
    train(second, 2)
    assert equal(straight, second)


def test_a_resume_after_some_parameters_were_held_still(world: World, tmp_path: Path) -> None:
    def engine() -> Engine:
        return Engine(TinyPolicy(), EngineConfig(), 8, world, groups=("expert.",))

    def hold(engine: Engine) -> None:
        engine.forward_backward([rows(16, seed=engine.updates)], loss, count)
        engine.optim_step({"": 0.0})

    straight, resumed = engine(), engine()
    hold(straight)
    save_checkpoint(straight, tmp_path, {})
    load_checkpoint(resumed, tmp_path / "last")
    for one in (straight, resumed):
        hold(one)
        train(one, 2)
    assert equal(straight, resumed)


def test_random_states_come_back(world: World, tmp_path: Path) -> None:
    engine = make(world)
    train(engine, 1)
    save_checkpoint(engine, tmp_path, {})
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
    load_checkpoint(make(world), tmp_path / "last")
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn  # noqa: NPY002


def test_saving_changes_nothing(world: World, tmp_path: Path) -> None:
    saved, straight = make(world), make(world)
    save_checkpoint(saved, tmp_path, {})  # before the first update, which must stay Adam's first
    for _ in range(2):
        train(saved, 1)
        save_checkpoint(saved, tmp_path, {})
    train(straight, 2)
    assert equal(saved, straight)


def test_policy_folder_gets_the_averaged_weights(world: World, tmp_path: Path) -> None:
    engine = make(world)
    train(engine, 2)

    def write(folder: Path, weights: object) -> None:
        folder.mkdir()
        torch.save(dict(weights), folder / "weights.pt")  # type: ignore[call-overload]

    folder = save_checkpoint(engine, tmp_path, {}, write)
    written = torch.load(folder / "policy" / "weights.pt")
    assert all(torch.equal(written[name], tensor) for name, tensor in engine.named_weights(averaged=True))


def test_old_checkpoints_go_and_the_pointer_follows(world: World, tmp_path: Path) -> None:
    engine = make(world)
    for _ in range(4):
        train(engine, 1)
        save_checkpoint(engine, tmp_path, {}, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_3", "step_4"]
    assert (tmp_path / "last").resolve().name == "step_4"
    assert last_checkpoint(tmp_path) == tmp_path / "step_4"


def test_a_step_is_written_once(world: World, tmp_path: Path) -> None:
    engine = make(world)
    save_checkpoint(engine, tmp_path, {"take": 1})
    with pytest.raises(CheckpointError, match="step_0 exists, and a step is saved once"):
        save_checkpoint(engine, tmp_path, {"take": 2})
    assert load_checkpoint(engine, tmp_path / "last") == {"take": 1}


def test_a_path_with_a_trailing_slash_is_the_same_checkpoint(world: World, tmp_path: Path) -> None:
    engine = make(world)
    save_checkpoint(engine, tmp_path, {"a": 1})
    assert load_checkpoint(engine, Path(f"{tmp_path}/step_0/")) == {"a": 1}


@pytest.mark.parametrize("name", ["state/__0_0.distcp", "state/.metadata", "trainer.json"])
def test_a_truncated_file_is_named_and_nothing_is_loaded(world: World, tmp_path: Path, name: str) -> None:
    engine = make(world)
    save_checkpoint(engine, tmp_path, {})
    train(engine, 1)
    folder = save_checkpoint(engine, tmp_path, {})
    with open(folder / name, "r+b") as file:
        file.truncate(10)
    fresh, untouched = make(world, seed=3), make(world, seed=3)
    with pytest.raises(
        CheckpointError, match=rf"step_1 is damaged: {name} has 10 bytes, \d+ were written; other checkpoints there: step_0"
    ):
        load_checkpoint(fresh, folder)
    train(fresh, 1)
    train(untouched, 1)
    assert equal(fresh, untouched)


def test_a_missing_file_and_a_missing_manifest_are_named(world: World, tmp_path: Path) -> None:
    folder = save_checkpoint(make(world), tmp_path, {})
    (folder / "state" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing, \d+ were written; no other checkpoint is there"):
        verify_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not a whole checkpoint: it has no manifest.json"):
        verify_checkpoint(folder)


def test_a_checkpoint_of_another_policy_is_refused(world: World, tmp_path: Path) -> None:
    folder = save_checkpoint(make(world), tmp_path, {})
    other = Engine(TinyPolicy(width=8), EngineConfig(ema_decay=0.9), 8, world)
    with pytest.raises(CheckpointError, match="does not fit this policy and engine"):
        load_checkpoint(other, folder)


def test_a_full_disk_names_folder_and_previous_checkpoint(world: World, tmp_path: Path, files_of_4_kib: Limit) -> None:
    engine = make(world)
    save_checkpoint(engine, tmp_path, {"good": True})
    train(engine, 1)
    message = r"cannot write checkpoint .*step_1.*step_0 is whole and stays the last checkpoint"
    with files_of_4_kib(), pytest.raises(CheckpointError, match=message):
        save_checkpoint(engine, tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_0"]
    assert load_checkpoint(make(world), tmp_path / "last") == {"good": True}
