"""LIBERO control steps per second and core: chunks of 8 against the stock env, stepped and rendered per action.

Both play the same published state and actions in fresh processes that take turns; times are CPU time of the process.
Stock renders both cameras in every step, as the published evaluation scripts do; ours shows both views at each chunk's end.
Checked inside: the pictures at the ends of the chunks and the simulator's states there have the same digest.

Limit: the stock step over (one step of our physics + one pair of our pictures / chunk length), both probed in the process
that measures ours. `pictures_only_limit` is what skipping pictures alone could give with stock physics and stock rendering.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh
from vla_rl.bench.libero import CHUNK, cpu_seconds, digest, load, play_others, published, travelling_actions
from vla_rl.conventions import Orientation
from vla_rl.episode import VIEWS
from vla_rl.sim.base import ChunkReply, EnvConfig, Look
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.reference import IMAGE_KEYS, StockEnv

MODULE = "vla_rl.bench.sim"
BAR = 6.0
SUITES = ("libero_object", "libero_spatial")
TASK = 0
STATE = 3


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, print its table and closing JSON line; 0 if the bar is reached and everything was equal."""
    parser = benchmark_parser("sim", __doc__)
    parser.add_argument("--suites", nargs="+", default=list(SUITES), help="suites, task 0 of each")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of fresh processes per suite")
    parser.add_argument("--steps", type=int, default=64, help="control steps per measurement, a multiple of 8")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or options.steps < CHUNK or options.steps % CHUNK:
        parser.error(f"--pairs must be at least 1 and --steps a multiple of {CHUNK}, got {options.pairs} and {options.steps}")
    rows = [_row(suite, options.pairs, options.steps) for suite in options.suites]
    fraction = min(row["fraction_of_limit"] for row in rows)
    return finish("sim", min(row["ratio"] for row in rows), BAR, fraction, rows, options)


def _row(suite: str, pairs: int, steps: int) -> dict[str, Any]:
    measured = [tuple(run_fresh(MODULE, system, suite, str(steps)) for system in ("stock", "ours")) for _ in range(pairs)]
    for stock, ours in measured:
        if stock["digest"] != ours["digest"]:
            raise AssertionError(f"{suite}: pictures or states at chunk ends differ from stock LIBERO's")
    ratio, low, high = median_iqr([stock["step_ms"] / ours["step_ms"] for stock, ours in measured])
    limit = statistics.median(stock["step_ms"] / (ours["physics_ms"] + ours["pictures_ms"] / CHUNK) for stock, ours in measured)
    stock_limit = statistics.median(
        stock["step_ms"] / (stock["blind_ms"] + (stock["step_ms"] - stock["blind_ms"]) / CHUNK) for stock, _ in measured
    )
    middle = {
        f"{name}_{key}": round(statistics.median(pair[index][key] for pair in measured), 3)
        for index, name in enumerate(("stock", "ours"))
        for key in measured[0][index]
        if key.endswith("_ms")
    }
    print(
        f"{suite}: {ratio:.2f}x ({low:.2f} to {high:.2f}), {ratio / limit:.0%} of the limit, stock {middle['stock_step_ms']:.1f} ms a step",
        flush=True,
    )
    return {
        "suite": suite,
        "task": TASK,
        "chunk": CHUNK,
        "pairs": pairs,
        "ratio": ratio,
        "ratio_iqr": [low, high],
        "fraction_of_limit": ratio / limit,
        "limit": limit,
        "pictures_only_limit": stock_limit,
        "ours_steps_per_second": 1000 / middle["ours_step_ms"],
        "equal": True,
        **middle,
        "load": load(),
    }


def measure_stock(suite: str, steps: int) -> dict[str, Any]:
    """Step and render stock LIBERO; then step it without cameras (the probe of the limit)."""
    stock = StockEnv(suite, TASK)
    stock.reset(published(suite, TASK, STATE))
    actions, pictures, states = travelling_actions(0, steps), [], []

    def play() -> None:
        for number, action in enumerate(actions, 1):
            frame = stock.frame()
            states.extend((frame.sim_state, frame.robot_state))
            stock.step(action)
            if number % CHUNK == 0:
                pictures.append(stock.frame().images)

    seconds = cpu_seconds(play)
    for name in IMAGE_KEYS.values():
        stock.env.env._observables[name].set_enabled(False)
    blind = cpu_seconds(lambda: [stock.step(action) for action in actions])
    stock.close()
    return {"step_ms": 1000 * seconds / steps, "blind_ms": 1000 * blind / steps, "digest": digest(pictures, states)}


def measure_ours(suite: str, steps: int) -> dict[str, Any]:
    """Play chunks of 8; then probe the physics without pictures, and one pair of pictures per step."""
    env = LiberoEnv(EnvConfig(orientation=Orientation.RAW))
    play_others(env, suite, TASK, 1)
    actions, spec = travelling_actions(0, steps), published(suite, TASK, STATE)
    chunks = [actions[begin : begin + CHUNK] for begin in range(0, steps, CHUNK)]
    replies: list[ChunkReply] = []
    env.reset(spec, Look(views=VIEWS, record_states=True))
    seconds = cpu_seconds(lambda: replies.extend(env.step_chunk(chunk) for chunk in chunks))
    env.reset(spec, Look())
    blind = cpu_seconds(lambda: [env.step_chunk(chunk) for chunk in chunks])
    env.reset(spec, Look(views=VIEWS))
    pictures = []
    for chunk in chunks:
        env.step_chunk(chunk[:-1])
        began = time.process_time()
        env.step_chunk(chunk[-1:])
        pictures.append(time.process_time() - began - blind / steps)
    env.close()
    return {
        "step_ms": 1000 * seconds / steps,
        "physics_ms": 1000 * blind / steps,
        "pictures_ms": 1000 * statistics.median(pictures),
        "digest": digest([reply.observation.images for reply in replies], _states(replies)),
    }


def _states(replies: Sequence[ChunkReply]) -> Iterator[np.ndarray]:
    """Simulator and robot state before every action, in turn."""
    for reply in replies:
        assert reply.sim_states_ED is not None and reply.robot_states_ER is not None
        for pair in zip(reply.sim_states_ED, reply.robot_states_ER, strict=True):
            yield from pair


if __name__ == "__main__":
    if sys.argv[1:2] in (["stock"], ["ours"]):
        measure = {"stock": measure_stock, "ours": measure_ours}[sys.argv[1]]
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        raise SystemExit(main(sys.argv[1:]))
