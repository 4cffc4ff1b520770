"""The two pools: twins to the bit, legal and illegal calls, ownership of what they hand out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np
import pytest
from equality import require_same
from toy_envs import CountingEnv, PatientEnv

from vla_rl.actors import random_actor
from vla_rl.episode import VIEWS, ActionChunk, EpisodeSpec, Outcome, StepProtocol
from vla_rl.rollout import ListSource, run_episodes
from vla_rl.sim.base import ChunkReply, EnvConfig, EnvPool, EnvReply, Look, ResetReply
from vla_rl.sim.libero import egl
from vla_rl.sim.pool import PoolConfig, PoolStateError, make_pool
from vla_rl.sim.pool_state import MakeEnv

Backend = Literal["process", "serial"]
BACKENDS: tuple[Backend, ...] = ("process", "serial")
DEADLINE_S = 60.0
LOOKS = {
    "nothing": Look(),
    "both views": Look(VIEWS),
    "everything": Look(VIEWS, privileged=True, record_every=2, record_states=True),
}


def spec(number: int, **other: Any) -> EpisodeSpec:
    return EpisodeSpec("reach", number % 4, f"benchmark:{number}", "test", StepProtocol(max_steps=12, settle_steps=1), **other)


def chunk(rows: int = 4, seed: int = 0) -> ActionChunk:
    return ActionChunk(np.random.default_rng(seed).uniform(-1.5, 1.5, (rows, 7)).astype(np.float32))


@contextlib.contextmanager
def pool_of(backend: Backend, workers: int = 1, make_env: MakeEnv | None = CountingEnv, **settings: Any) -> Iterator[EnvPool]:
    config = PoolConfig(backend, workers, debug_poison=True, **settings)
    env = EnvConfig("reach", resolution=64)
    with contextlib.closing(make_pool(config, env, make_env) if make_env else make_pool(config, env)) as pool:
        yield pool


def one_reply(pool: EnvPool) -> EnvReply:
    (reply,) = pool.ready(DEADLINE_S)
    return reply


def play(pool: EnvPool, look: Look, numbers: range) -> dict[str, list[EnvReply]]:
    """Run one episode per number, as many at once as there are envs; all replies by spec."""
    waiting, replies = list(numbers), {spec(number).key: [] for number in numbers}
    running: dict[int, EpisodeSpec] = {}

    def begin(env: int) -> None:
        if waiting:
            running[env] = spec(waiting.pop(0))
            pool.reset(env, running[env], look)

    for env in range(pool.num_envs):
        begin(env)
    while running:
        for reply in pool.ready(DEADLINE_S):
            env, episode = reply.env, replies[running[reply.env].key]
            reply.env = 0  # which env runs an episode depends on who is ready first
            episode.append(reply)
            if isinstance(reply, ChunkReply) and (reply.terminated or reply.truncated):
                del running[env]
                begin(env)
            else:
                pool.step(env, chunk(4, seed=len(episode)))
    return replies


@pytest.mark.parametrize("make_env", [CountingEnv, None], ids=["counting", "reach"])
def test_twins_give_the_same_bits(make_env: MakeEnv | None) -> None:
    with pool_of("serial", 1, make_env) as serial, pool_of("process", 2, make_env) as process:
        require_same(serial.spec, process.spec)
        for name, look in LOOKS.items():
            expected, received = play(serial, look, range(5)), play(process, look, range(5))
            assert sum(len(replies) for replies in expected.values()) >= 10
            require_same(expected, received, name, ignore=("timing",))


def test_every_spec_runs_exactly_once_however_episodes_end() -> None:
    specs = [spec(number) for number in range(20)]
    lengths = {s.key: min(s.scene_seed % 13 + 3, 12) for s in specs}
    assert len(set(lengths.values())) > 5
    with pool_of("process", 7) as pool:
        episodes = list(run_episodes(pool, random_actor(chunk_length=4), ListSource(specs), lambda _: Look(VIEWS)))
    assert sorted(e.spec.key for e in episodes) == sorted(lengths)
    assert {e.spec.key: e.num_steps for e in episodes} == lengths
    assert {e.outcome for e in episodes} == {Outcome.SUCCESS, Outcome.FAILURE}


@pytest.mark.parametrize("backend", BACKENDS)
def test_replies_are_not_overwritten_while_they_are_held(backend: Backend) -> None:
    with pool_of(backend) as pool:
        pool.reset(0, spec(1), Look(VIEWS))
        first = one_reply(pool)
        assert isinstance(first, ResetReply)
        before = {view: picture.copy() for view, picture in first.observation.images.items()}
        pool.step(0, chunk(2))
        second = one_reply(pool)
        assert isinstance(second, ChunkReply)
        kept = second.observation.images["image"].copy()
        pool.step(0, chunk(1))
        one_reply(pool)
        require_same(before, dict(first.observation.images))
        assert np.array_equal(kept, second.observation.images["image"])
    assert np.array_equal(kept, second.observation.images["image"]), "also after close"


@pytest.mark.parametrize("backend", BACKENDS)
def test_waitables_become_readable_for_multiprocessing_wait(backend: Backend) -> None:
    with pool_of(backend) as pool:
        assert not wait(pool.waitables(), 0)
        pool.reset(0, spec(1), Look())
        assert wait(pool.waitables(), DEADLINE_S)
        assert pool.ready(0)
        assert not wait(pool.waitables(), 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_illegal_calls_name_env_state_and_episode(backend: Backend) -> None:
    with pool_of(backend, 2) as pool:
        with pytest.raises(IndexError, match="env 2 must be in 0 to 1"):
            pool.reset(2, spec(1), Look())
        with pytest.raises(PoolStateError, match=r"step of env 1 \(state (starting|idle), episode none\): allowed only when observed"):
            pool.step(1, chunk())
        pool.reset(0, spec(1), Look())
        with pytest.raises(PoolStateError, match=r"step of env 0 \(state resetting, episode reach/1/benchmark:1/s0\)"):
            pool.step(0, chunk())
        with pytest.raises(PoolStateError, match="reset of env 0"):
            pool.reset(0, spec(2), Look())
        one_reply(pool)
        pool.step(0, chunk())
        with pytest.raises(PoolStateError, match=r"reset of env 0 \(state stepping"):
            pool.reset(0, spec(2), Look())
        reply = one_reply(pool)
        while not (isinstance(reply, ChunkReply) and (reply.terminated or reply.truncated)):
            pool.step(0, chunk())
            reply = one_reply(pool)
        with pytest.raises(PoolStateError, match=r"step of env 0 \(state ended"):
            pool.step(0, chunk())
        pool.reset(0, spec(2), Look())
        assert isinstance(one_reply(pool), ResetReply)
        pool.reset(0, spec(3), Look())
        assert isinstance(one_reply(pool), ResetReply), "an episode may be given up"


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_is_idempotent_and_final(backend: Backend) -> None:
    with pool_of(backend, 2) as pool:
        pool.reset(0, spec(1), Look())
        pool.close()
        pool.close()
        assert pool.ready(0) == []
        with pytest.raises(PoolStateError, match="state closed"):
            pool.reset(0, spec(1), Look())
    with pool_of(backend) as again:
        again.reset(0, spec(1), Look())
        assert isinstance(one_reply(again), ResetReply), "a second pool in one process"


def test_a_reset_before_the_worker_is_up_waits_for_it() -> None:
    with pool_of("process", 4) as pool:
        for env in range(4):
            pool.reset(env, spec(env), Look())
        received: list[EnvReply] = []
        while len(received) < 4:
            received += pool.ready(DEADLINE_S)
        assert {reply.env: reply.spec.key for reply in received if isinstance(reply, ResetReply)} == {n: spec(n).key for n in range(4)}


def test_preempt_stops_a_running_chunk_and_only_that_one() -> None:
    with pool_of("process", make_env=PatientEnv) as pool:
        pool.preempt(0)  # nothing runs: no effect
        pool.reset(0, spec(1), Look())
        one_reply(pool)
        pool.step(0, chunk(4))
        threading.Thread(target=pool.preempt, args=(0,)).start()
        reply = one_reply(pool)
        assert isinstance(reply, ChunkReply) and reply.preempted and len(reply.executed_EA) <= 1
        pool.reset(0, spec(1, prompt="run"), Look())
        one_reply(pool)
        pool.step(0, chunk(2))
        reply = one_reply(pool)
        assert isinstance(reply, ChunkReply) and not reply.preempted and len(reply.executed_EA) == 2


def test_preempt_of_a_chunk_that_the_serial_pool_has_not_begun() -> None:
    with pool_of("serial") as pool:
        pool.reset(0, spec(1), Look())
        one_reply(pool)
        pool.step(0, chunk(4))
        pool.preempt(0)
        reply = one_reply(pool)
        assert isinstance(reply, ChunkReply) and reply.preempted and reply.executed_EA.shape == (0, 7)
        pool.step(0, chunk(1))
        reply = one_reply(pool)
        assert isinstance(reply, ChunkReply) and not reply.preempted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "threads"}, "backend 'threads' must be 'process' or 'serial'"),
        ({"workers": 0}, "workers 0 must be at least 1"),
        ({"threads_per_worker": 0}, "threads_per_worker 0 must be at least 1"),
        ({"step_deadline_s": 0.0}, "step_deadline_s 0.0 must be above 0 seconds"),
        ({"start_deadline_s": float("nan")}, "start_deadline_s nan must be above 0 seconds"),
    ],
)
def test_a_bad_configuration_says_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolConfig(**settings)


def test_an_env_that_workers_cannot_import_is_refused_at_once() -> None:
    def of_the_main_script() -> None: ...

    of_the_main_script.__module__ = "__main__"
    with pytest.raises(TypeError, match="defined in the main script, which workers do not import: move it into a module"):
        make_pool(PoolConfig(workers=1), EnvConfig("reach"), of_the_main_script)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_may_ask_for_other_views(backend: Backend) -> None:
    """In place of the look's; an empty chunk asks for nothing but the observation, which is the one that was there."""
    with pool_of(backend) as pool:
        pool.reset(0, spec(1), Look(VIEWS[:1]))
        one_reply(pool)
        seen = []
        for chunk_views in ((), VIEWS, None):
            pool.step(0, replace(chunk(1), views=chunk_views))
            reply = one_reply(pool)
            assert isinstance(reply, ChunkReply)
            seen.append(tuple(reply.observation.images))
        assert seen == [(), VIEWS, VIEWS[:1]]
        pool.step(0, ActionChunk(np.zeros((0, 7), np.float32), views=VIEWS))
        again = one_reply(pool)
        assert isinstance(again, ChunkReply) and len(again.executed_EA) == 0
        assert tuple(again.observation.images) == VIEWS
        require_same(reply.observation.images["image"], again.observation.images["image"])


class DrawingEnv(CountingEnv):
    """Says that it draws on the CPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        provenance = {"renderer": "llvmpipe (LLVM 15.0.6)", "software_rendering": True}
        self.spec = replace(self.spec, provenance=provenance)


@pytest.mark.parametrize("gpus", [0, 2])
def test_software_beside_a_gpu_is_never_silent(gpus: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(egl, "num_gpus", lambda: gpus)
    with pool_of("serial", 2, DrawingEnv):
        pass
    said = [record.getMessage() for record in caplog.records if record.name == "vla_rl.sim.pool"]
    assert said == ([f"envs draw in software (llvmpipe (LLVM 15.0.6)) beside a GPU: {egl.SOFTWARE_REMEDY}"] if gpus else [])
