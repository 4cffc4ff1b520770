"""Signs of life: when a role counts as hung, and roles that are stopped or dead-locked for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from small_roles import Echo

from vla_rl.cluster.backend import gather
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleHung
from vla_rl.cluster.liveness import Counts, Vigil, look_at
from vla_rl.cluster.process import ProcessBackend
from vla_rl.config import ConfigError
from vla_rl.phases.rl_crew import ROLES

ONE_BEAT = Counts(1, 0)
CONFIG = ClusterConfig(backend="process", rollout_workers=2, trainer_ranks=2, torch_threads=1, heartbeat_deadline_s=10.0)


@dataclass
class Scripted:
    """A role whose counts are set by hand."""

    now: Counts = ONE_BEAT
    is_busy: bool = True
    vigil: Vigil = field(default_factory=Vigil)
    causes: list[str] = field(default_factory=list[str])

    def counts(self) -> Counts:
        return self.now

    def end_hung(self, cause: str) -> None:
        self.causes.append(cause)


def test_silence_and_stillness_end_with_the_next_sign() -> None:
    vigil = Vigil()
    seen: list[tuple[float, float]] = []
    for counts in (ONE_BEAT, ONE_BEAT, ONE_BEAT, Counts(2, 0), Counts(2, 1)):
        vigil.look(counts, is_busy=True, elapsed_s=4.0)
        seen.append((vigil.silent_s, vigil.still_s))
    assert seen == [(0, 4), (4, 8), (8, 12), (0, 16), (4, 0)]


def test_a_role_that_is_not_up_or_not_asked_is_never_still() -> None:
    starting, idle = Vigil(), Vigil()
    for beats in range(1, 100):
        starting.look(Counts(0, 0), is_busy=True, elapsed_s=100.0)
        idle.look(Counts(beats, 0), is_busy=False, elapsed_s=100.0)
    assert starting == Vigil() and (idle.silent_s, idle.still_s) == (0.0, 0.0)


def test_one_role_at_a_look_is_ended_and_it_is_the_worst() -> None:
    """Both stand still, as ranks of one collective would; the one that is silent too is the cause."""
    stopped, waiting = Scripted(), Scripted()
    look_at(CONFIG, [waiting, stopped], 1.0)
    for beat in range(2, 14):
        waiting.now = Counts(beat, 0)
        look_at(replace(CONFIG, progress_deadline_s=5.0), [waiting, stopped], 1.0)
        if stopped.causes:
            break
    assert stopped.causes and "got nothing done for 6 s (a dead-lock?)" in stopped.causes[0] and not waiting.causes
    look_at(CONFIG, [waiting], 1.0)
    assert not waiting.causes, "by the larger deadline it is fine"


def test_silence_has_a_cause_of_its_own() -> None:
    role = Scripted(is_busy=False)
    for _ in range(12):
        look_at(CONFIG, [role], 1.0)
    assert role.causes[0].startswith("hung: no sign of life for 11 s (its process is stopped, or its machine stuck)")
    assert role.causes[0].endswith("cluster.heartbeat_deadline_s is 10; it was killed")


def test_a_deadline_below_a_few_beats_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.heartbeat_deadline_s is 1\.0; allowed: at least 3 seconds"):
        ClusterConfig(backend="process", heartbeat_deadline_s=1.0)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ProcessBackend]:
    opened = ProcessBackend(CONFIG, tmp_path, None, ROLES)
    yield opened
    opened.close()


@pytest.mark.faults
def test_a_stopped_role_is_killed_and_named_while_its_peer_waits(backend: ProcessBackend) -> None:
    members = [backend.start("trainer", rank, Echo, "hello") for rank in range(2)]
    gather(backend, members, [member.ready for member in members])
    stopped = members[1].process.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RoleHung, match=r"trainer 1 on .*trainer_1\.log\) was lost: hung: no sign of life for 1\d s") as caught:
        gather(backend, members, [members[0].call("sleep_for_ever"), members[1].call("greet", "Ada")])
    assert (caught.value.name.role, caught.value.name.rank) == ("trainer", 1)
    assert not psutil.pid_exists(stopped)
    members[0].process.kill()


@pytest.mark.faults
def test_a_hung_role_that_can_shows_where_it_hangs(backend: ProcessBackend) -> None:
    """What the watch does to a role that is still; that it notices is tested above, without waiting."""
    member = backend.start("worker", 0, Echo, "hello")
    member.ready.result()
    call, before = member.call("sleep_for_ever"), member.counts()
    while member.counts().marks <= before.marks:  # it has taken the call
        os.sched_yield()
    assert member.is_busy and not member.is_over
    member.end_hung("hung: it was told so")
    with pytest.raises(RoleHung, match=r"worker 0 on .* was lost: hung: it was told so\. Start the same") as caught:
        call.result()
    assert "in _serve_one" in Path(caught.value.name.log).read_text(), "the role wrote its stack before it ended"
    again = backend.start("worker", 0, Echo, "hello again")
    assert again.call("greet", "Ada").result() == "hello again, Ada"
