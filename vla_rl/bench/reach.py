"""Reach control steps per second and core, both 64² views rendered in every step, in CPU time of one process.

`ratio` is that rate over the 600 steps per second that Reach promises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh
from vla_rl.bench.libero import cpu_seconds, load
from vla_rl.episode import ACTION_DIM, VIEWS, EpisodeSpec, StepProtocol
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.reach import ReachEnv

MODULE = "vla_rl.bench.reach"
PROMISED_STEPS_PER_S = 600
STEPS = 400
REST = np.zeros((1, ACTION_DIM), np.float32)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its closing JSON line; 0 if Reach is as fast as promised."""
    parser = benchmark_parser("reach", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="fresh processes")
    options = parser.parse_args(arguments)
    rates = [run_fresh(MODULE, "measure")["steps_per_s"] for _ in range(options.rounds)]
    rate, low, high = median_iqr(rates)
    print(f"{rate:,.0f} control steps/s and core ({low:,.0f} to {high:,.0f})", flush=True)
    row = {"steps_per_s": round(rate), "steps_per_s_iqr": [round(low), round(high)], "load": load()}
    return finish("reach", rate / PROMISED_STEPS_PER_S, 1.0, None, [row], options)


def measure() -> dict[str, float]:
    """One process: steps per CPU second, after a first step that warms up."""
    env = ReachEnv(EnvConfig("reach", 64), lambda: False)
    env.reset(EpisodeSpec("reach", 0, "sampled:0", "test", StepProtocol(max_steps=10_000, settle_steps=0)), Look(VIEWS))
    env.step_chunk(REST)
    seconds = cpu_seconds(lambda: [env.step_chunk(REST) for _ in range(STEPS)])
    env.close()
    return {"steps_per_s": STEPS / seconds}


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(json.dumps(measure()))
    else:
        raise SystemExit(main(sys.argv[1:]))
