"""Host memory over real LIBERO episodes: proportional set size (PSS) of this process and its workers.

Episodes of random actions with both views, in blocks of one task each, so that workers change scenes too. Memory is sampled after
every tenth episode; a level is the median of ten samples. `ratio` is the level right after the warm-up over the highest level later:
0.98 is the bar of "flat within 2 %".
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import closing

import psutil

from vla_rl.actors import random_actor
from vla_rl.bench.common import benchmark_parser, finish
from vla_rl.bench.libero import load
from vla_rl.episode import VIEWS, EpisodeSpec, Outcome, StepProtocol
from vla_rl.rollout import ListSource, run_episodes
from vla_rl.sim.base import EnvConfig, Look
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import make_pool
from vla_rl.sim.pool_state import PoolConfig

BAR = 0.98
STEPS = 16
"""Control steps of an episode: two chunks."""
SAMPLE_EVERY = 10
"""Episodes between two samples of memory."""
LEVEL_SAMPLES = 10
"""Samples whose median is a level."""


def main(arguments: Sequence[str]) -> int:
    """Run the episodes, print the levels and the closing JSON line; 0 if memory stays flat."""
    parser = benchmark_parser("memory", __doc__)
    parser.add_argument("--episodes", type=int, default=1000, help="episodes after the warm-up, a multiple of 100")
    parser.add_argument("--warm-up", type=int, default=100, help="episodes before the first level is taken")
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--tasks", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--block", type=int, default=25, help="episodes of one task in a row")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.episodes < 200 or options.episodes % (SAMPLE_EVERY * LEVEL_SAMPLES):
        parser.error(f"--episodes must be a multiple of {SAMPLE_EVERY * LEVEL_SAMPLES} and at least 200, got {options.episodes}")
    specs = planned(options.suite, options.tasks, options.block, options.warm_up + options.episodes)
    samples_mib: list[float] = []
    with closing(make_pool(PoolConfig(workers=options.workers), EnvConfig(), make_env)) as pool:
        for number, episode in enumerate(run_episodes(pool, random_actor(), ListSource(specs), lambda spec: Look(VIEWS)), 1):
            if episode.outcome is Outcome.CRASH:
                raise RuntimeError(f"{episode.spec.key} crashed: {episode.reason}")
            if number > options.warm_up and number % SAMPLE_EVERY == 0:
                samples_mib.append(pss_mib())
    levels_mib = levels(samples_mib)
    print("levels (MiB): " + ", ".join(f"{level:,.0f}" for level in levels_mib), flush=True)
    row = {
        "levels_mib": [round(level, 1) for level in levels_mib],
        "least_mib": min(samples_mib),
        "most_mib": max(samples_mib),
        "load": load(),
    }
    return finish("memory", levels_mib[0] / max(levels_mib[1:]), BAR, None, [row], options)


def planned(suite: str, tasks: Sequence[int], block: int, count: int) -> list[EpisodeSpec]:
    """`count` sampled scenes, `block` of a task in a row, round and round."""
    protocol = StepProtocol(max_steps=STEPS)
    return [EpisodeSpec(suite, tasks[n // block % len(tasks)], f"sampled:{1_000_000 + n}", "train", protocol) for n in range(count)]


def pss_mib() -> float:
    """PSS of this process and of all its descendants (MiB): shared pages are divided among those who share them."""
    here = psutil.Process()
    return sum(process.memory_full_info().pss for process in [here, *here.children(recursive=True)]) / 2**20


def levels(samples: Sequence[float]) -> list[float]:
    """Medians of consecutive groups of `LEVEL_SAMPLES`."""
    return [statistics.median(samples[start : start + LEVEL_SAMPLES]) for start in range(0, len(samples), LEVEL_SAMPLES)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
