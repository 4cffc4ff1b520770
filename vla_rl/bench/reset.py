"""From the end of an episode to the first observation of the next: exact resets against stock LIBERO's hard reset.

Stock: hard reset (the model is compiled again), published state, ten settle steps, each rendered, as published evaluation
scripts and LeRobot do. Ours: the compiled model is kept, and only the first observation is rendered. Fresh processes take
turns; times are CPU time of the process. Checked inside: pictures and state of the first observation have the same digest
as those of a fresh stock env.

Limit: ten settle steps of our physics and one pair of pictures, probed in the process that measures ours.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh
from vla_rl.bench.libero import CHUNK, cpu_seconds, digest, load, play_others, published, travelling_actions
from vla_rl.conventions import Orientation
from vla_rl.episode import VIEWS
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.reference import StockEnv

MODULE = "vla_rl.bench.reset"
BAR = 12.0
TASKS = (("libero_object", 0), ("libero_spatial", 0), ("libero_goal", 7))
STATES = (3, 8, 21)
"""Published states that are reset to, in turn."""
PROBE_STEPS = 40


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, print its table and closing JSON line; 0 if the bar is reached and everything was equal."""
    parser = benchmark_parser("reset", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of fresh processes per task")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {options.pairs}")
    rows = [_row(suite, task, options.pairs) for suite, task in TASKS]
    return finish("reset", min(row["ratio"] for row in rows), BAR, min(row["fraction_of_limit"] for row in rows), rows, options)


def _row(suite: str, task: int, pairs: int) -> dict[str, Any]:
    measured = [tuple(run_fresh(MODULE, system, suite, str(task)) for system in ("stock", "ours")) for _ in range(pairs)]
    for stock, ours in measured:
        if stock["digest"] != ours["digests"][0]:
            raise AssertionError(f"{suite} task {task}: the first observation differs from a fresh stock env's")
    ratio, low, high = median_iqr([stock["reset_ms"] / ours["reset_ms"] for stock, ours in measured])
    fraction = statistics.median(ours["limit_ms"] / ours["reset_ms"] for _, ours in measured)
    stock_ms, ours_ms, limit_ms = (
        statistics.median(pair[index][key] for pair in measured) for index, key in ((0, "reset_ms"), (1, "reset_ms"), (1, "limit_ms"))
    )
    print(
        f"{suite} {task}: {ratio:.1f}x ({low:.1f} to {high:.1f}), {fraction:.0%} of the limit, {stock_ms:.0f} -> {ours_ms:.0f} ms",
        flush=True,
    )
    return {
        "suite": suite,
        "task": task,
        "pairs": pairs,
        "ratio": ratio,
        "ratio_iqr": [low, high],
        "fraction_of_limit": fraction,
        "stock_ms": stock_ms,
        "ours_ms": ours_ms,
        "limit_ms": limit_ms,
        "equal": True,
        "load": load(),
    }


def measure_stock(suite: str, task: int) -> dict[str, Any]:
    """The first reset is the fresh env's, whose observation counts; the later ones are timed."""
    stock = StockEnv(suite, task)
    first, *later = (published(suite, task, number) for number in STATES)
    stock.reset(first)
    frame = stock.frame()
    seconds = [cpu_seconds(lambda spec=spec: stock.reset(spec)) for spec in later]
    stock.close()
    return {"reset_ms": 1000 * statistics.median(seconds), "digest": digest([frame.images], [frame.sim_state, frame.robot_state])}


def measure_ours(suite: str, task: int) -> dict[str, Any]:
    """Every reset follows an episode; the limit's parts are probed last."""
    env = LiberoEnv(EnvConfig(orientation=Orientation.RAW))
    play_others(env, suite, task, 2)
    seconds, digests = [], []
    look = Look(views=VIEWS, record_states=True)
    for number in STATES:
        replies: list[Any] = []
        spec = published(suite, task, number)
        seconds.append(cpu_seconds(lambda spec=spec, replies=replies: replies.append(env.reset(spec, look))))
        chunk = env.step_chunk(travelling_actions(number, CHUNK))
        assert chunk.sim_states_ED is not None and chunk.robot_states_ER is not None
        digests.append(digest([replies[0].observation.images], [chunk.sim_states_ED[0], chunk.robot_states_ER[0]]))
    limit = _limit_seconds(env, suite, task)
    env.close()
    return {"reset_ms": 1000 * statistics.median(seconds), "digests": digests, "limit_ms": 1000 * limit}


def _limit_seconds(env: LiberoEnv, suite: str, task: int) -> float:
    """Settle steps of physics, and one pair of pictures drawn from nothing but what is visible."""
    spec = published(suite, task, STATES[0])
    still = np.tile(np.array(spec.protocol.settle_action, np.float32), (PROBE_STEPS, 1))
    env.reset(spec, Look())
    physics = cpu_seconds(lambda: env.step_chunk(still)) / PROBE_STEPS
    env.reset(published(suite, task, STATES[1]), Look(views=VIEWS))
    with_pictures = cpu_seconds(lambda: env.reset(spec, Look(views=VIEWS)))
    pictures = with_pictures - cpu_seconds(lambda: env.reset(spec, Look()))
    return spec.protocol.settle_steps * physics + pictures


if __name__ == "__main__":
    if sys.argv[1:2] in (["stock"], ["ours"]):
        measure = {"stock": measure_stock, "ours": measure_ours}[sys.argv[1]]
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        raise SystemExit(main(sys.argv[1:]))
