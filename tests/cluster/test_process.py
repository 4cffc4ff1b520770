"""Roles in processes: answers, parcels, errors, and what becomes of them when somebody is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_roles import Echo

from vla_rl.cluster.backend import Sealed, call_all, gather
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleFailed, RoleLost
from vla_rl.cluster.process import ProcessBackend
from vla_rl.config import ConfigError
from vla_rl.phases.rl_crew import ROLES

CONFIG = ClusterConfig(backend="process", rollout_workers=2, torch_threads=1)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ProcessBackend]:
    opened = ProcessBackend(CONFIG, tmp_path, None, ROLES)
    yield opened
    opened.close()


def test_calls_are_answered_in_order_and_roles_have_their_own_process(backend: ProcessBackend) -> None:
    members = [backend.start("worker", rank, Echo, f"hello {rank}") for rank in range(2)]
    gather(backend, members, [member.ready for member in members])
    assert call_all(backend, members, "greet", "Ada") == ["hello 0, Ada", "hello 1, Ada"]
    calls = [members[0].call("greet", name) for name in "abc"]
    assert [call.result() for call in reversed(calls)] == ["hello 0, c", "hello 0, b", "hello 0, a"]
    processes = {os.getpid(), *call_all(backend, members, "process")}
    assert len(processes) == 3
    backend.close()
    assert not any(psutil.pid_exists(process) for process in processes - {os.getpid()})


def test_a_payload_goes_from_role_to_role_and_outlives_its_maker(backend: ProcessBackend) -> None:
    maker, reader = (backend.start("worker", rank, Echo, "hello") for rank in range(2))
    sealed = maker.call("picture", 100_000).result()
    assert isinstance(sealed, Sealed) and sealed.value == sum(range(100_000))
    assert maker.received_bytes < 1000, "800 kB of pixels did not come here"
    maker.process.kill()
    assert backend.loss_of(maker) is not None
    assert reader.call("add_up", [sealed.payload, sealed.payload]).result() == [sealed.value] * 2
    sealed.payload.release()


def test_what_a_role_raises_is_raised_here(backend: ProcessBackend) -> None:
    member = backend.start("worker", 0, Echo, "hello")
    with pytest.raises(ConfigError, match="this was asked for") as caught:
        member.call("fail").result()
    assert "worker 0 on" in caught.value.__notes__[0]
    with pytest.raises(RoleFailed, match="no pickle"):
        member.call("fail_in_a_way_that_does_not_travel").result()
    assert member.call("greet", "still here").result() == "hello, still here"


def test_a_role_that_can_not_be_made_says_why(backend: ProcessBackend) -> None:
    members = [backend.start("worker", 0, Echo, ""), backend.start("worker", 1, Echo, "hello")]
    with pytest.raises(ConfigError, match="greeting is empty"):
        gather(backend, members, [member.ready for member in members])


@pytest.mark.faults
def test_a_killed_role_is_a_typed_error_with_its_last_words(backend: ProcessBackend) -> None:
    members = [backend.start("worker", rank, Echo, "hello") for rank in range(2)]
    with pytest.raises(RoleLost, match=r"worker 0 on .* was lost: killed by SIGKILL[\s\S]*the last words") as caught:
        gather(backend, members, [members[0].call("shout"), members[1].call("sleep_for_ever")])
    assert (caught.value.name.role, caught.value.name.rank) == ("worker", 0) and Path(caught.value.name.log).name == "worker_0.log"
    with pytest.raises(RoleLost):
        members[0].call("greet", "anybody").result()
    again = backend.start("worker", 0, Echo, "hello again")
    assert again.call("greet", "Ada").result() == "hello again, Ada"
    members[1].process.kill()


@pytest.mark.faults
def test_roles_end_with_a_killed_driver(tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from small_roles import Echo
from vla_rl.cluster import process_role
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.process import ProcessBackend
if __name__ == "__main__":
    backend = ProcessBackend(ClusterConfig(backend="process"), Path({str(tmp_path)!r}), None)
    idle, busy = backend.start("worker", 0, Echo, "hello"), backend.start("trainer", 0, Echo, "hello")
    print(idle.call("process").result(), busy.call("process").result(), flush=True)
    busy.call("sleep_for_ever")
    time.sleep(10_000)
"""
    script = tmp_path / "driver.py"
    script.write_text(code)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    roles = [psutil.Process(int(number)) for number in driver.stdout.readline().split()]
    assert len(roles) == 2
    family = [*roles, *psutil.Process(driver.pid).children(recursive=True)]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive and set(roles) <= set(gone)
