"""The roles as the driver holds them, with roles that die when a test says so: who is replaced, and which weights reach whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rl_recipe import rl_recipe

from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleLost, RoleName
from vla_rl.cluster.rendezvous import Rendezvous
from vla_rl.phases.rl_crew import MOST_LIVES, Crew
from vla_rl.weights.errors import WeightSyncError

RAY = ClusterConfig(backend="ray", rollout_workers=2)
PROCESS = ClusterConfig(backend="process", rollout_workers=2)


class Answer:
    """A call that answers when its result is asked for: then its role may have died."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.outcome = work, list[Any]()

    def result(self) -> Any:
        if not self.outcome:
            self.outcome.append(self.work())
        return self.outcome[0]


class Role:
    """What it was asked, and the version of the weights that it has; dies as soon as its next life is at `dies_at`."""

    def __init__(self, backend: Roles, role: str, rank: int, life: int) -> None:
        self.name, self.life, self.backend = RoleName(role, rank, "here", ""), life, backend
        self.is_lost, self.received_bytes = False, 0
        self.version, self.acts_with, self.generation = -1, -1, -1
        self.ready = self.call("make")

    def call(self, method: str, *arguments: Any, beside: bool = False) -> Answer:
        return Answer(lambda: self.answer(method, *arguments))

    def answer(self, method: str, *arguments: Any) -> Any:
        who = (self.name.role, self.name.rank, self.life, method)
        self.backend.asked.append(who)
        if who in self.backend.before:
            self.backend.before.pop(who)()
        if self.is_lost:
            raise RoleLost(self.name, "killed")
        return getattr(self, method, lambda *given: {})(*arguments)

    def connect(self, address: Any) -> None:
        self.generation = getattr(address, "generation", 0)
        self.version = -1 if self.backend.is_collective else self.backend.pushed  # shared memory keeps what was pushed

    def open_weights(self, transport: str, address: Any = None) -> str:
        return "the address"

    def push(self, version: int) -> dict[str, float]:
        """To those who live and are in the newest group, which is broken where one is dead or in an older one."""
        workers = self.backend.newest("worker")
        if self.backend.is_collective and (any(w.is_lost for w in workers) or len({w.generation for w in workers}) > 1):
            raise WeightSyncError("a member of the weight sync was lost")
        self.backend.pushed = version
        for worker in workers:
            worker.version = version
        return {}

    def begin(self) -> int:
        if self.version < 0:
            raise WeightSyncError("weights were pulled before the first push")
        self.acts_with = self.version
        return self.version


class Roles:
    """A backend in this process; `before` holds what happens before a role (kind, rank, life) answers a method."""

    host = "here"

    def __init__(self, is_collective: bool) -> None:
        self.is_collective = is_collective
        self.pushed = -1
        self.roles: list[Role] = []
        self.asked: list[tuple[str, int, int, str]] = []
        self.before: dict[tuple[str, int, int, str], Callable[[], Any]] = {}

    def start(self, role: str, rank: int, make: Any, *arguments: Any) -> Role:
        life = sum((one.name.role, one.name.rank) == (role, rank) for one in self.roles)
        self.roles.append(Role(self, role, rank, life))
        return self.roles[-1]

    def newest(self, role: str) -> list[Role]:
        return list({one.name.rank: one for one in self.roles if one.name.role == role}.values())

    def wait_any(self, calls: Sequence[Any]) -> list[Any]:
        return list(calls)

    def loss_of(self, member: Role) -> RoleLost | None:
        return RoleLost(member.name, "killed") if member.is_lost else None

    def close(self) -> None: ...


def crew_of(folder: Path, cluster: ClusterConfig) -> tuple[Crew, Roles]:
    roles = Roles(cluster.backend == "ray")
    make: Any = None
    crew = Crew(rl_recipe(folder, folder, cluster=cluster), roles, make, make, Rendezvous("here", 1))  # type: ignore[arg-type]
    crew.open_weights(0)
    crew.begin()
    return crew, roles


def lose(*members: Any) -> None:
    for member in members:
        member.is_lost = True


@pytest.mark.parametrize("cluster", [RAY, PROCESS], ids=["ray", "process"])
def test_two_workers_that_die_at_once_are_both_replaced(cluster: ClusterConfig, tmp_path: Path) -> None:
    crew, roles = crew_of(tmp_path, cluster)
    crew.push(1)
    before = list(crew.workers)
    lose(*before)
    for worker in (0, 1):  # as the collector finds out, one after the other
        crew.replace(worker, before[worker], RoleLost(before[worker].name, "killed"))
    assert [worker.life for worker in roles.newest("worker")] == [1, 1], "each once"
    assert [worker.acts_with for worker in roles.newest("worker")] == [1, 1]


@pytest.mark.parametrize("cluster", [RAY, PROCESS], ids=["ray", "process"])
@pytest.mark.parametrize("moment", ["make", "connect", "begin"])
def test_a_worker_that_dies_while_it_is_replaced_gets_another_life(moment: str, cluster: ClusterConfig, tmp_path: Path) -> None:
    crew, roles = crew_of(tmp_path, cluster)
    first = crew.workers[0]
    lose(first)
    roles.before["worker", 0, 1, moment] = lambda: lose(crew.workers[0])
    crew.replace(0, first, RoleLost(first.name, "killed"))
    assert [(worker.life, worker.acts_with) for worker in roles.newest("worker")] == [(2, 0), (0, 0)]


def test_the_other_worker_dies_while_one_is_replaced(tmp_path: Path) -> None:
    """In the middle of the group's new meeting, and in the push after it."""
    for moment in ("connect", "receive"):
        crew, roles = crew_of(tmp_path, RAY)
        first = crew.workers[0]
        lose(first)
        roles.before["worker", 1, 0, moment] = lambda crew=crew: lose(crew.workers[1])
        crew.replace(0, first, RoleLost(first.name, "killed"))
        assert [(worker.life, worker.acts_with) for worker in roles.newest("worker")] == [(1, 0), (1, 0)]


def test_a_worker_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    crew, roles = crew_of(tmp_path, RAY)
    first = crew.workers[0]
    lose(first)
    for life in range(1, MOST_LIVES + 1):
        roles.before["worker", 0, life, "make"] = lambda: lose(crew.workers[0])
    with pytest.raises(RoleLost, match="worker 0"):
        crew.replace(0, first, RoleLost(first.name, "killed"))
    assert roles.newest("worker")[0].life == MOST_LIVES - 1


def test_weights_that_are_pushed_while_a_worker_starts_again_reach_it_afterwards(tmp_path: Path) -> None:
    """The trainer goes on beside it; its push asked a worker that was not connected to take part, and ended the run."""
    crew, roles = crew_of(tmp_path, RAY)
    first = crew.workers[0]
    lose(first)
    roles.before["worker", 0, 1, "make"] = lambda: crew.push(1)
    crew.replace(0, first, RoleLost(first.name, "killed"))
    assert [worker.version for worker in roles.newest("worker")] == [1, 1]
    crew.begin()
    assert [worker.acts_with for worker in roles.newest("worker")] == [1, 1]


def test_a_worker_that_dies_in_a_push_gets_the_weights_when_the_next_rollout_begins(tmp_path: Path) -> None:
    crew, roles = crew_of(tmp_path, RAY)
    roles.before["worker", 1, 0, "receive"] = lambda: lose(crew.workers[1])
    assert crew.push(1) == {}
    crew.begin()
    assert [(worker.life, worker.acts_with) for worker in roles.newest("worker")] == [(0, 1), (1, 1)]


def test_a_push_that_breaks_off_while_a_rollout_begins_is_made_again(tmp_path: Path) -> None:
    crew, roles = crew_of(tmp_path, RAY)

    def push_and_lose() -> None:
        lose(crew.workers[1])
        crew.push(1)
        roles.newest("worker")[0].version = -1  # what came of it is not whole, and nobody may act with it

    roles.before["worker", 0, 0, "begin"] = push_and_lose
    crew.begin()
    assert [(worker.life, worker.acts_with) for worker in roles.newest("worker")] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("cluster", [RAY, PROCESS], ids=["ray", "process"])
def test_a_rollout_beside_a_push_that_lost_a_trainer_ends(cluster: ClusterConfig, tmp_path: Path) -> None:
    """It waited for ever for weights that nobody will send, and the run, whose error was raised elsewhere, for it."""
    crew, roles = crew_of(tmp_path, cluster)
    roles.before["trainer", 0, 0, "push"] = lambda: lose(crew.trainers[0])
    with pytest.raises(RoleLost, match="trainer 0"):
        crew.push(1)
    with pytest.raises(WeightSyncError, match="version 1 of the weights reached no worker"):
        crew.begin()


def test_a_worker_that_is_back_waits_for_the_end_of_an_update(tmp_path: Path) -> None:
    """Its connect would wait for the trainers, and give up after minutes, where they cannot answer before the update is over."""
    crew, roles = crew_of(tmp_path, RAY)
    first, started, opened = crew.workers[0], threading.Event(), threading.Event()
    lose(first)
    roles.before["worker", 0, 1, "make"] = started.set
    roles.before["trainer", 0, 0, "open_weights"] = opened.set
    replacing = threading.Thread(target=crew.replace, args=(0, first, RoleLost(first.name, "killed")))

    def update() -> None:
        replacing.start()
        assert started.wait(60)
        assert not opened.wait(0.2)

    roles.before["trainer", 0, 0, "update"] = update
    with pytest.raises(KeyError):  # this trainer has no numbers to tell
        crew.update()
    replacing.join(60)
    assert opened.is_set() and roles.newest("worker")[0].acts_with == 0
