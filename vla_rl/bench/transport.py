"""How fast observations and actions cross processes, without a simulator in the way.

An env that costs nothing hands out two 256 x 256 pictures and a state (`zero_cost.py`). Ours: `ProcessPool`. Peers:
gymnasium's AsyncVectorEnv with its default settings (shared memory, and a copy for the caller, as ours), with
`copy=False` (its arrays change under the caller's hands), and with `shared_memory=False` (everything pickled through
pipes, as in the vector envs of LIBERO and of RL systems built on it). Each measurement is a fresh process; the systems
take turns, so that what else the machine does hits all of them, and a ratio is one of neighbours. Each system's bytes
are checked before it is timed.

Limit: per env step, the observation is copied into and out of shared memory, and each wake-up of a process costs half
of a one-byte round trip; both are probed in the process that measures ours, and spread over the cores in use.
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
    row = {
        "envs": num_envs,
        "env_steps_per_s": {system: spread(values) for system, values in rates.items()},
        "ratio": {peer: spread([ours / theirs for ours, theirs in zip(rates["ours"], rates[peer])]) for peer in PEERS},
        "limit_env_steps_per_s": statistics.median(run["limit"] for run in runs["ours"]),
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
    return f"{row['envs']} envs: {rates}\n  {ratios}; {row['fraction_of_limit']:.0%} of the limit"


def measure(system: str, num_envs: int, seconds: float) -> dict[str, float]:
    """One measurement, in this process. Keys: `rate` (env steps per second), and for ours the probes and the limit."""
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
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        answered = [reply.env for reply in pool.ready(DEADLINE_S)]  # like the peers' loop, it drops what it gets
        wake_ups += 1
        for env in answered:
            pool.step(env, chunk)
        done += len(answered)
    rate = done / (time.perf_counter() - started)
    pool.close()
    return {"rate": rate, **_limit(num_envs, 1 + wake_ups / done)}


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
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        envs.step(actions)
        done += num_envs
    rate = done / (time.perf_counter() - started)
    envs.close()
    return {"rate": rate}


def _limit(num_envs: int, wake_ups: float) -> dict[str, float]:
    """The probes and `limit` (env steps per second): two copies and `wake_ups` wake-ups per env step, on all cores in use."""
    copy_s, round_trip_s = _probe_copy(), _probe_round_trip()
    cores = min(num_envs + 1, len(os.sched_getaffinity(0)))
    limit = cores / (2 * copy_s + wake_ups * round_trip_s / 2)
    return {"limit": limit, "copy_us": 1e6 * copy_s, "round_trip_us": 1e6 * round_trip_s, "wake_ups": wake_ups}


def _probe_copy(repeats: int = 300) -> float:
    """Median seconds to copy one observation's pictures into memory that is mapped already."""
    pictures = list(Frames().images.values())
    targets = [picture.copy() for picture in pictures]
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        for picture, target in zip(pictures, targets):
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
