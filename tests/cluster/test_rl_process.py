"""Reinforcement learning with roles in processes: the bits of one process, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cluster_run import RUN
from rl_recipe import PPO, metrics_of, rl_recipe, same_weights, saved_weights

from vla_rl.algorithms.corrections import Correction
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleLost
from vla_rl.config import to_plain
from vla_rl.phases import rl
from vla_rl.phases.rl_collect import Collector
from vla_rl.phases.rl_config import RlConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

PROCESS = ClusterConfig(backend="process", torch_threads=1)
STALE = replace(PPO, max_staleness=1, correction=Correction("behaviour_clip"))


def recipe(run_dir: Path, initial: Path, **changes: Any) -> RlConfig:
    return rl_recipe(run_dir, initial, **(RUN | {"cluster": PROCESS} | changes))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_the_same_bits_and_small_messages(inline: RlConfig, initial: Path, tmp_path: Path) -> None:
    """Also with two workers, where it depends on timing who runs what; and with moments that leave the device during rollouts."""
    before = shared_memory()
    config = recipe(tmp_path / "one", initial, cluster=replace(PROCESS, placement="colocated"))
    assert rl.run_rl(config) == 0
    assert same_weights(config, inline)
    pictures = sum(row["episodes"] * (row["episode_steps"] / 4) * 2 * 128 * 128 * 3 for row in metrics_of(config))
    moments = 2 * 4 * sum(weight.numel() for weight in saved_weights(config).values()) / 1e6
    first, second, third = (row["offloaded_megabytes"] for row in metrics_of(config))
    assert first == 0.0, "there are no moments before the first update"
    assert 0.9 * moments < second == third <= moments, "saved weights hold some tensors under two names"
    assert all(row["weights/gb_per_s"] > 0 for row in metrics_of(config))
    assert metrics_of(config)[-1]["driver_megabytes"] * 1e6 < pictures / 20
    two = recipe(tmp_path / "two", initial, cluster=replace(PROCESS, rollout_workers=2))
    assert rl.run_rl(two) == 0
    assert same_weights(two, inline)
    assert shared_memory() <= before


def test_two_trainer_ranks_learn_what_one_learns(inline: RlConfig, initial: Path, tmp_path: Path) -> None:
    config = recipe(tmp_path / "run", initial, cluster=replace(PROCESS, trainer_ranks=2))
    assert rl.run_rl(config) == 0
    for ours, theirs in zip(metrics_of(config), metrics_of(inline), strict=True):
        assert ours["log_prob_gap_largest"] == 0.0
        for name in ("loss", "grad_norm", "return", "kl"):
            # sums in another order, carried through Adam for up to six updates; the KL is a small difference of numbers of order 1
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4)


def test_rollouts_overlap_updates_and_stay_as_fresh_as_promised(initial: Path, tmp_path: Path) -> None:
    """With a bound of 1 a rollout begins when the one before was taken, so that even the overlapping run gives the twin's bits."""
    config = recipe(tmp_path / "run", initial, algorithm=STALE)
    twin = replace(config, run_dir=str(tmp_path / "twin"), cluster=ClusterConfig())
    assert rl.run_rl(config) == 0 and rl.run_rl(twin) == 0
    assert same_weights(config, twin)
    assert [row["staleness_max"] for row in metrics_of(config)] == [0, 1, 1]
    spans = read_jsonl(Path(config.run_dir) / "spans.jsonl")
    updates = [(row["start"], row["start"] + row["s"]) for row in spans if (row["name"], row["role"]) == ("update", "trainer_0")]
    forwards = [row["start"] for row in spans if (row["name"], row["role"]) == ("policy_forward", "worker_0")]
    assert any(start < moment < end for start, end in updates for moment in forwards), "they ran at the same time"


@pytest.mark.faults
def test_a_killed_worker_is_replaced_and_changes_nothing(
    inline: RlConfig, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, killed = Collector._take, list[int]()

    def take(self: Any, worker: int, *arguments: Any) -> None:
        plain(self, worker, *arguments)
        if len(killed) < 1:
            killed.append(self._crew.workers[worker].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Collector, "_take", take)
    config = recipe(tmp_path / "run", initial)
    assert rl.run_rl(config) == 0
    assert killed and not psutil.pid_exists(killed[0])
    assert same_weights(config, inline)


@pytest.mark.faults
def test_a_stopped_worker_is_killed_and_replaced_and_changes_nothing(
    inline: RlConfig, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, stopped = Collector._take, list[int]()

    def take(self: Any, worker: int, *arguments: Any) -> None:
        plain(self, worker, *arguments)
        if not stopped:
            stopped.append(self._crew.workers[worker].process.pid)
            os.kill(stopped[0], signal.SIGSTOP)

    monkeypatch.setattr(Collector, "_take", take)
    config = recipe(tmp_path / "run", initial, cluster=replace(PROCESS, heartbeat_deadline_s=15.0))
    assert rl.run_rl(config) == 0
    assert stopped and not psutil.pid_exists(stopped[0])
    assert same_weights(config, inline)


@pytest.mark.faults
def test_a_killed_trainer_rank_ends_the_run_which_goes_on_from_its_checkpoint(
    inline: RlConfig, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, processes = rl.rl_step, list[int]()

    def step(run: Any) -> Any:
        if run.step == 1:
            processes.extend(member.process.pid for member in (*run.crew.trainers, *run.crew.workers))
            run.crew.trainers[0].process.kill()
        return plain(run)

    config = recipe(tmp_path / "run", initial)
    with monkeypatch.context() as patch:
        patch.setattr(rl, "rl_step", step)
        with pytest.raises(RoleLost, match=r"trainer 0 on .*trainer_0\.log\) was lost: killed by SIGKILL.*same command") as caught:
            rl.run_rl(config)
    assert caught.value.name.role == "trainer"
    assert len(processes) == 2 and not any(psutil.pid_exists(process) for process in processes)
    assert rl.run_rl(config) == 0
    assert same_weights(config, inline)


@pytest.mark.faults
def test_a_killed_driver_leaves_nothing_behind(initial: Path, tmp_path: Path) -> None:
    before = shared_memory()
    config = recipe(tmp_path / "run", initial, pool=PoolConfig(backend="process", workers=1), rollout_batch_size=4)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(to_plain(config)))
    driver = subprocess.Popen([sys.executable, "-m", "vla_rl.cli", "rl", str(file)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    metrics = Path(config.run_dir) / "metrics.jsonl"
    while driver.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        os.sched_yield()
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) >= 4, "a forkserver, a trainer rank, a worker and its env"
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert shared_memory() <= before
