"""How fast observations and actions cross processes, without a simulator in the way.

An env that costs nothing hands out two 256 x 256 pictures and a state (`zero_cost.py`). Ours: `ProcessPool`. Peers:
gymnasium's AsyncVectorEnv with its default settings (shared memory, and a copy for the caller, as ours), with
`copy=False` (its arrays change under the caller's hands), and with `shared_memory=False` (everything pickled through
pipes, as in the vector envs of LIBERO and of RL systems built on it). Each measurement is a fresh process; the systems
take turns, so that what else the machine does hits all of them, and a ratio is one of neighbours. Each system's bytes
are checked before it is timed.

Limit: per env step, the observation is copied once, into shared memory, and each wake-up of a process costs half of a
one-byte round trip; both are probed in the process that measures ours, and spread over the cores in use. The copy is
probed over the memory of all envs in turn, because that is what caches see. `limit_ratio` is what a system that costs
nothing else would reach against each peer.

On a machine that does other things, rates depend on the scheduler; the CPU time per env step of all processes of a
system (`cpu_us_per_env_step`) does so much less, and is what the same ratio would be with every core saturated.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import psutil

from vla_rl.bench.common import benchmark_parser, finish, measure_in_turns, spread
from vla_rl.bench.zero_cost import RESOLUTION, Frames, ZeroCostEnv, ZeroCostGymnasium
from vla_rl.episode import ACTION_DIM, VIEWS, ActionChunk, EpisodeSpec
from vla_rl.sim.base import EnvConfig, EnvFault, EnvReply, Look
from vla_rl.sim.pool import PoolConfig, ProcessPool

BAR_GYMNASIUM = 3.0
BAR_PICKLED = 10.0
PEERS: dict[str, dict[str, Any]] = {"gymnasium": {}, "gymnasium copy=False": {"copy": False}, "pickled": {"shared_memory": False}}
"""Name -> what differs from AsyncVectorEnv's default settings."""
CHECKED_STEPS = 16
"""Steps per env whose bytes are compared, which also warm up."""
DEADLINE_S = 60.0


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, print its table and closing JSON line; 0 if both bars are reached."""
    parser = benchmark_parser("transport", __doc__)
    parser.add_argument("--envs", type=int, nargs="+", default=[2, 4, 8], help="numbers of envs")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each system and number of envs")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    options = parser.parse_args(arguments)
    rows = [_row(num_envs, options.rounds, options.seconds) for num_envs in options.envs]
    slowest = {peer: min(row["ratio"][peer]["median"] for row in rows) for peer in PEERS}
    for peer, bar in (("gymnasium", BAR_GYMNASIUM), ("pickled", BAR_PICKLED)):
        print(f"smallest ratio to {peer}: {slowest[peer]:.2f} (bar {bar:g})", flush=True)
    fraction = min(row["fraction_of_limit"] for row in rows)
    pickled = {"pickled": slowest["pickled"], "bar": BAR_PICKLED}
    status = finish("transport", slowest["gymnasium"], BAR_GYMNASIUM, fraction, [*rows, pickled], options)
    return status if slowest["pickled"] >= BAR_PICKLED else 1


def _row(num_envs: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All systems at one number of envs, in turns."""
    runs = measure_in_turns("vla_rl.bench.transport", ("ours", *PEERS), rounds, str(num_envs), str(seconds))
    rates = {system: [run["rate"] for run in measured] for system, measured in runs.items()}
    cpu_us = {system: [run["cpu_us"] for run in measured] for system, measured in runs.items()}
    limit = statistics.median(run["limit"] for run in runs["ours"])
    row = {
        "envs": num_envs,
        "env_steps_per_s": {system: spread(values) for system, values in rates.items()},
        "ratio": {peer: spread([ours / theirs for ours, theirs in zip(rates["ours"], rates[peer])]) for peer in PEERS},
        "limit_ratio": {peer: limit / statistics.median(rates[peer]) for peer in PEERS},
        "cpu_us_per_env_step": {system: spread(values) for system, values in cpu_us.items()},
        "cpu_ratio": {peer: spread([theirs / ours for ours, theirs in zip(cpu_us["ours"], cpu_us[peer])]) for peer in PEERS},
        "limit_env_steps_per_s": limit,
        "fraction_of_limit": statistics.median(run["rate"] / run["limit"] for run in runs["ours"]),
        "probes": {name: statistics.median(run[name] for run in runs["ours"]) for name in ("copy_us", "round_trip_us", "wake_ups")},
        "load_average": os.getloadavg()[0],
    }
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    rates = ", ".join(f"{system} {spread['median']:,.0f}/s" for system, spread in row["env_steps_per_s"].items())
    ratios = ", ".join(
        f"{spread['median']:.2f} ({spread['q25']:.2f} to {spread['q75']:.2f}) x {peer}" for peer, spread in row["ratio"].items()
    )
    at_limit = ", ".join(f"{row['limit_ratio'][peer]:.1f}" for peer in PEERS)
    cpu = ", ".join(f"{row['cpu_ratio'][peer]['median']:.1f}" for peer in PEERS)
    return (
        f"{row['envs']} envs: {rates}\n  {ratios}\n  {row['fraction_of_limit']:.0%} of the limit, which is at ratios {at_limit}; "
        f"CPU per step {row['cpu_us_per_env_step']['ours']['median']:.0f} us, ratios {cpu}"
    )


def measure(system: str, num_envs: int, seconds: float) -> dict[str, float]:
    """One measurement, in this process. Keys: `rate` (env steps per second), `cpu_us` (of all processes, per env step), and for ours
    the probes and the limit."""
    return _measure_ours(num_envs, seconds) if system == "ours" else _measure_peer(num_envs, seconds, PEERS[system])


def _measure_ours(num_envs: int, seconds: float) -> dict[str, float]:
    pool = ProcessPool(PoolConfig(workers=num_envs), EnvConfig("reach", RESOLUTION), ZeroCostEnv)
    chunk = ActionChunk(np.zeros((1, ACTION_DIM), np.float32))
    for env in range(num_envs):
        pool.reset(env, EpisodeSpec("zero_cost", 0, f"benchmark:{env}", "test"), Look(VIEWS))
    expected, steps = Frames(), [-1] * num_envs
    while min(steps) < CHECKED_STEPS:
        for reply in pool.ready(DEADLINE_S):
            steps[reply.env] += 1
            _check_reply(expected, steps[reply.env], reply)
            pool.step(reply.env, chunk)
    done = wake_ups = 0
    cpu_s, started = _cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        answered = [reply.env for reply in pool.ready(DEADLINE_S)]  # like the peers' loop, it drops what it gets
        wake_ups += 1
        for env in answered:
            pool.step(env, chunk)
        done += len(answered)
    measured = _measured(done, started, cpu_s)
    pool.close()
    return {**measured, **_limit(num_envs, 1 + wake_ups / done)}


def _cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children())]
    return sum(used.user + used.system for used in times)


def _measured(done: int, started: float, cpu_s: float) -> dict[str, float]:
    """Rate and CPU time of `done` env steps since `started`, when `_cpu_s` was `cpu_s`."""
    return {"rate": done / (time.perf_counter() - started), "cpu_us": 1e6 * (_cpu_s() - cpu_s) / done}


def _check_reply(expected: Frames, step: int, reply: EnvReply) -> None:
    if isinstance(reply, EnvFault):
        raise RuntimeError(f"env {reply.env}: {reply.message}")
    expected.stamp(step)
    for name, picture in expected.images.items():
        if not np.array_equal(reply.observation.images[name], picture):
            raise AssertionError(f"env {reply.env} step {step}: {name} is not what the env handed out")
    if not np.array_equal(reply.observation.state, expected.state):
        raise AssertionError(f"env {reply.env} step {step}: the state is not what the env handed out")


def _measure_peer(num_envs: int, seconds: float, settings: dict[str, Any]) -> dict[str, float]:
    envs = gymnasium.vector.AsyncVectorEnv([ZeroCostGymnasium] * num_envs, **settings)
    actions = np.zeros((num_envs, ACTION_DIM), np.float32)
    envs.reset()
    expected = Frames()
    for step in range(1, CHECKED_STEPS + 1):
        expected.stamp(step)
        observation = envs.step(actions)[0]
        for name, value in {**expected.images, "state": expected.state}.items():
            if not all(np.array_equal(row, value) for row in observation[name]):
                raise AssertionError(f"step {step}: {name} is not what the envs handed out")
    done, cpu_s, started = 0, _cpu_s(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        envs.step(actions)
        done += num_envs
    measured = _measured(done, started, cpu_s)
    envs.close()
    return measured


def _limit(num_envs: int, wake_ups: float) -> dict[str, float]:
    """The probes and `limit` (env steps per second): one copy and `wake_ups` wake-ups per env step, on all cores in use."""
    copy_s, round_trip_s = _probe_copy(num_envs), _probe_round_trip()
    cores = min(num_envs + 1, len(os.sched_getaffinity(0)))
    limit = cores / (copy_s + wake_ups * round_trip_s / 2)
    return {"limit": limit, "copy_us": 1e6 * copy_s, "round_trip_us": 1e6 * round_trip_s, "wake_ups": wake_ups}


def _probe_copy(num_envs: int, repeats: int = 300) -> float:
    """Median seconds to copy one observation's pictures into memory that is mapped already, the envs taking turns."""
    sources = [list(Frames().images.values()) for _ in range(num_envs)]
    targets = [[picture.copy() for picture in pictures] for pictures in sources]
    times: list[float] = []
    for turn in range(repeats):
        started = time.perf_counter()
        for picture, target in zip(sources[turn % num_envs], targets[turn % num_envs]):
            target[:] = picture
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _probe_round_trip(repeats: int = 300) -> float:
    """Median seconds for one byte to another process and back, through two pipes."""
    echo = "import os\nwhile byte := os.read(0, 1): os.write(1, byte)"
    times: list[float] = []
    with subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as other:
        assert other.stdin is not None and other.stdout is not None
        for _ in range(repeats):
            started = time.perf_counter()
            other.stdin.write(b"!")
            other.stdout.read(1)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    # Only `main` starts this, in fresh processes: measure SYSTEM ENVS SECONDS.
    print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
