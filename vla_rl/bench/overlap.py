"""Step time of reinforcement learning, synchronous and with max_staleness 1, with an EMULATED accelerator.

The trainer's update is a wait of a fixed length, as on an accelerator that leaves the CPU alone: the machine has none. All else is real:
episodes of Reach by the tiny pi0 on a rollout worker of the process backend, parcels, weights through shared memory. The two schedules take
turns. Limit of the schedule: rollout + update where they take turns, the longer of both where they overlap.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.corrections import Correction
from vla_rl.bench.common import benchmark_parser, finish, spread
from vla_rl.cluster.config import ClusterConfig
from vla_rl.phases.rl import run_rl
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_dry_run import unit_statistics
from vla_rl.phases.rl_trainer import TrainerRank
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

BAR_LIMIT = 0.9
"""Of the schedule's limit."""
STEPS = 8
"""RL steps of one run; the first fills the pipeline and the last writes a checkpoint, so both are left out."""
RESOLUTION = 64


class EmulatedTrainer(TrainerRank):
    """Waits as long as an accelerator would compute; the weights stay as they are, and are handed out as ever."""

    def __init__(self, update_s: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._update_s = update_s

    def update(self, *arguments: Any) -> dict[str, float]:
        """See the class."""
        time.sleep(self._update_s)
        return {"log_prob_gap_largest": 0.0}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its closing JSON line; 0 if both schedules reach the bar."""
    parser = benchmark_parser("overlap", __doc__)
    parser.add_argument("--update-s", type=float, default=1.0, help="length of the emulated update (s)")
    parser.add_argument("--episodes", type=int, default=12, help="episodes of one RL step")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each schedule")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for staleness, measured in runs.items():
                measured += _steps(_recipe(Path(folder), number, staleness, options.episodes), options.update_s)
    rows = [_row(staleness, measured) for staleness, measured in runs.items()]
    for row in rows:
        print(row, flush=True)
    faster = rows[0]["step_s"]["median"] / rows[1]["step_s"]["median"]
    fraction = min(row["fraction_of_limit"]["median"] for row in rows)
    print(f"emulated accelerator: a step takes {faster:.2f} times as long without overlap; {fraction:.0%} of the limit", flush=True)
    return finish(
        "overlap", fraction, BAR_LIMIT, fraction, [*rows, {"accelerator": "emulated", "synchronous_over_overlapped": faster}], options
    )


def _steps(config: RlConfig, update_s: float) -> list[dict[str, float]]:
    """Seconds of the steps of one run: `step_s`, the rollout that was trained on, and the schedule's limit."""
    if run_rl(config, make_trainer=partial(EmulatedTrainer, update_s)):
        raise RuntimeError("the run was interrupted")
    rows = [row for row in read_jsonl(Path(config.run_dir) / "metrics.jsonl") if "step_s" in row][1:-1]
    stale = config.algorithm.max_staleness
    walls = [row["busy_s/wall"] for row in rows]
    limits = [max(wall, update_s) if stale else wall + update_s for wall in (walls[1:] + walls[-1:] if stale else walls)]
    return [{"step_s": row["step_s"], "rollout_s": wall, "limit_s": limit} for row, wall, limit in zip(rows, walls, limits)]


def _row(staleness: int, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"max_staleness": staleness, "steps": len(measured)}
    for name in ("step_s", "rollout_s", "limit_s"):
        row[name] = spread([step[name] for step in measured])
    row["fraction_of_limit"] = spread([step["limit_s"] / step["step_s"] for step in measured])
    row["mean_step_s"] = round(statistics.fmean(step["step_s"] for step in measured), 4)
    return row


def _recipe(folder: Path, number: int, staleness: int, episodes: int) -> RlConfig:
    """A short run on Reach from random weights, which fail every episode at the same step."""
    initial = folder / "policy"
    if not initial.exists():
        sizes = PI0_PRESETS["tiny"]
        save_policy(make_policy(sizes, unit_statistics(), policy_spec(sizes, RESOLUTION)), initial)
    algorithm = AlgorithmConfig(episodes_per_step=episodes, micro_batch_size_per_rank=64)
    if staleness:
        algorithm = replace(algorithm, max_staleness=staleness, correction=Correction("behaviour_clip"))
    return RlConfig(
        run_dir=str(folder / f"run_{number}_{staleness}"),
        initial_policy=str(initial),
        suite="reach",
        steps=STEPS,
        algorithm=algorithm,
        env=EnvConfig(kind="reach", resolution=RESOLUTION),
        pool=PoolConfig(backend="serial", workers=episodes),
        cluster=ClusterConfig(backend="process", torch_threads=1),
        checkpoint_every=STEPS,
        show_progress=False,
    )
