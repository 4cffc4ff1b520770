"""Workers that raise, hang, die or never start: a named fault, a new worker, and nobody else is disturbed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from equality import require_same
from faulty_envs import FaultyEnv, broken_second_worker, dies_holding_the_gl_turn, wrong_machine
from toy_envs import raise_at_start

from vla_rl.actors import no_op_actor
from vla_rl.episode import VIEWS, ActionChunk, EpisodeSpec, Outcome, StepProtocol
from vla_rl.errors import UserError
from vla_rl.rollout import ListSource, run_episodes
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvFault, EnvPool, EnvReply, Look, ResetReply
from vla_rl.sim.picture_slots import SLOTS
from vla_rl.sim.pool import PoolConfig, PoolStartError, make_pool
from vla_rl.sim.pool_state import MakeEnv

pytestmark = pytest.mark.faults
DEADLINE_S = 60.0
"""For what must happen (the machine may be busy); for what must not, `SHORT_DEADLINE_S`."""
SHORT_DEADLINE_S = 1.0
ENV = EnvConfig("reach", resolution=32)
CHUNK = ActionChunk(np.zeros((2, 7), np.float32))


def spec(number: int, prompt: str = "") -> EpisodeSpec:
    return EpisodeSpec("reach", number % 4, f"benchmark:{number}", "test", StepProtocol(max_steps=10), prompt=prompt)


@contextlib.contextmanager
def pool_of(workers: int, make_env: MakeEnv = FaultyEnv, **settings: Any) -> Iterator[EnvPool]:
    with contextlib.closing(make_pool(PoolConfig("process", workers, **settings), ENV, make_env)) as pool:
        yield pool


def next_reply(pool: EnvPool, env: int) -> EnvReply:
    """The next reply, which must be of `env`."""
    (reply,) = pool.ready(DEADLINE_S)
    assert reply.env == env
    return reply


def started(pool: EnvPool, env: int, episode: EpisodeSpec) -> ResetReply:
    pool.reset(env, episode, Look(VIEWS))
    reply = next_reply(pool, env)
    assert isinstance(reply, ResetReply), reply
    return reply


def stepped(pool: EnvPool, env: int) -> EnvReply:
    pool.step(env, CHUNK)
    return next_reply(pool, env)


FAULTS = {
    "raise in reset": ("raised", "ZeroDivisionError: the objects could not be placed"),
    "raise in step": ("raised", "FloatingPointError: the simulation became unstable"),
    "hang in reset": ("hung", "never_return"),
    "hang in step": ("hung", "never_return"),
    "killed in the middle of a chunk": ("died", "was killed by SIGKILL"),
    "exit": ("died", "exited with status 3 while stepping"),
}
"""Prompt -> kind of fault, and what its text must tell (for a hang, the function in which it hangs)."""


@pytest.mark.parametrize("prompt", FAULTS)
def test_a_fault_is_named_and_the_pool_goes_on(prompt: str) -> None:
    kind, text = FAULTS[prompt]
    with pool_of(2, reset_deadline_s=SHORT_DEADLINE_S, step_deadline_s=SHORT_DEADLINE_S) as pool:
        undisturbed = [started(pool, 1, spec(1))]
        pool.reset(0, spec(0, prompt), Look(VIEWS))
        reply = next_reply(pool, 0)
        if isinstance(reply, ResetReply):
            reply = stepped(pool, 0)
        assert isinstance(reply, EnvFault)
        assert (reply.kind, reply.spec) == (kind, spec(0, prompt))
        assert text in reply.message
        undisturbed.append(stepped(pool, 1))
        again = [started(pool, 0, spec(1)), stepped(pool, 0)]
        for reply in again:
            reply.env = 1
        require_same(undisturbed, again)


def test_a_worker_that_ignores_the_watchdogs_first_signal_is_killed() -> None:
    with pool_of(1, step_deadline_s=SHORT_DEADLINE_S) as pool:
        started(pool, 0, spec(0, "deaf"))
        reply = stepped(pool, 0)
        assert isinstance(reply, EnvFault) and reply.kind == "hung"
        started(pool, 0, spec(1))


def test_a_worker_that_dies_between_two_chunks_is_reported_once() -> None:
    with pool_of(1) as pool:
        pid = started(pool, 0, spec(0, "killed between episodes")).provenance["pid"]
        os.kill(pid, signal.SIGKILL)
        reply = next_reply(pool, 0)
        assert isinstance(reply, EnvFault) and reply.kind == "died" and "while observed" in reply.message
        started(pool, 0, spec(1))


def test_a_chunk_sent_to_a_worker_that_has_just_died_gives_the_fault() -> None:
    with pool_of(1) as pool:
        pid = started(pool, 0, spec(0, "killed between episodes")).provenance["pid"]
        os.kill(pid, signal.SIGKILL)
        _wait_for_end(pid)
        reply = stepped(pool, 0)
        assert isinstance(reply, EnvFault) and reply.kind == "died" and "while stepping" in reply.message


def test_pictures_that_are_held_survive_the_worker_that_drew_them() -> None:
    with pool_of(1) as pool:
        pid = started(pool, 0, spec(0, "killed between episodes")).provenance["pid"]
        held = stepped(pool, 0)
        assert isinstance(held, ChunkReply)
        kept = {view: picture.copy() for view, picture in held.observation.images.items()}
        os.kill(pid, signal.SIGKILL)
        next_reply(pool, 0)
        started(pool, 0, spec(1))
        for _ in range(SLOTS):
            pool.reset(0, spec(1), Look(VIEWS))
            next_reply(pool, 0)
            stepped(pool, 0)
        require_same(kept, dict(held.observation.images))


def test_a_worker_that_dies_with_no_episode_is_replaced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pool_of(1) as pool:
        pid = started(pool, 0, spec(0, "killed between episodes")).provenance["pid"]
        while isinstance(reply := stepped(pool, 0), ChunkReply) and not (reply.terminated or reply.truncated):
            pass
        os.kill(pid, signal.SIGKILL)
        _wait_for_end(pid)
        assert pool.ready(SHORT_DEADLINE_S) == []
        assert "env 0, between episodes: the worker, process" in caplog.text
        started(pool, 0, spec(1))


def test_the_first_worker_that_cannot_start_is_an_error_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PoolStartError, match=r"(?s)raise_at_start.*no GL on this machine"), pool_of(2, raise_at_start):
        pass
    assert not caplog.records, "the error says it all"


def test_an_error_for_the_user_in_the_first_worker_is_its_text_alone() -> None:
    with pytest.raises(UserError) as raised, pool_of(2, wrong_machine):
        pass
    assert str(raised.value) == "env 0 could not be made: the worker raised while starting:\nno GL here; install libegl1"


def test_another_worker_that_cannot_start_gives_a_fault_at_each_reset() -> None:
    with pool_of(2, broken_second_worker) as pool:
        for _ in range(2):
            pool.reset(1, spec(1), Look())
            reply = next_reply(pool, 1)
            assert isinstance(reply, EnvFault) and reply.kind == "raised" and "no GL for worker 1" in reply.message
        started(pool, 0, spec(0))


def test_a_worker_killed_in_its_gl_turn_does_not_block_the_others() -> None:
    with pool_of(3, dies_holding_the_gl_turn) as pool:
        started(pool, 0, spec(0))
        started(pool, 2, spec(2))
        pool.reset(1, spec(1), Look())
        reply = next_reply(pool, 1)
        assert isinstance(reply, EnvFault) and reply.kind == "died"


def test_the_loop_counts_a_crash_and_runs_every_other_spec() -> None:
    prompts = {3: "raise in reset", 5: "killed in the middle of a chunk", 8: "raise in step"}
    specs = [spec(number, prompts.get(number, "")) for number in range(12)]
    with pool_of(3) as pool:
        episodes = list(run_episodes(pool, no_op_actor(chunk_length=2), ListSource(specs), lambda _: Look(VIEWS)))
    outcomes = {episode.spec.key: episode.outcome for episode in episodes}
    assert sorted(outcomes) == sorted(s.key for s in specs) and len(episodes) == len(specs)
    assert {s.key for s in specs if s.prompt} == {key for key, outcome in outcomes.items() if outcome is Outcome.CRASH}


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended (it may still have to be reaped by its parent)."""
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(1000 * DEADLINE_S), f"process {pid} still runs after {DEADLINE_S:g} s"
    os.close(descriptor)


PARENT = """
from faulty_envs import FaultyEnv
from vla_rl.episode import EpisodeSpec
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.picture_slots import SLOTS
from vla_rl.sim.pool import PoolConfig, make_pool
from test_pool_faults import CHUNK, ENV, spec, started

pool = make_pool(PoolConfig("process", workers=3), ENV, FaultyEnv)
started(pool, 0, spec(0, "hang in step"))
pool.step(0, CHUNK)
started(pool, 1, spec(1))
started(pool, 2, spec(2))
print("running", flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["input()", "raise SystemExit(0)"], ids=["killed", "ends without close"])
def test_no_worker_and_no_segment_outlives_the_pools_process(then: str) -> None:
    before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then="workers = input()\n" + then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with parent:
        assert parent.stdout is not None and parent.stdin is not None
        assert parent.stdout.readline() == "running\n"
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) == 3
        mapped = {path for worker in workers for path in _mapped_files(worker.pid)}
        assert not {path for path in mapped if path.startswith("/dev/shm")}
        descriptors = [os.pidfd_open(worker.pid) for worker in workers]
        if then == "input()":
            parent.kill()
        else:
            parent.stdin.write("go on\n")
            parent.stdin.flush()
        parent.wait(DEADLINE_S)
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(1000 * DEADLINE_S), "a worker outlived its pool's process"
        os.close(descriptor)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "vla-rl" in name]


def _mapped_files(pid: int) -> list[str]:
    with open(f"/proc/{pid}/maps") as lines:
        return [line.split(maxsplit=5)[-1].strip() for line in lines if line.count("/")]
