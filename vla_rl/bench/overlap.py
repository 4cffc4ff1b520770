"""Parallel efficiency with an EMULATED accelerator: rollouts with 1 and 2 env processes, and RL steps with and without overlap.

What an accelerator would compute is a wait of a fixed length, which leaves the CPU alone: the machine has none. All else is real.

Rollouts: LIBERO, and Reach, in env processes, a policy whose forward is a wait, through the actor and the loop that every phase uses.
Limit: as many episodes at once as there are env processes (and cores), each as long as its resets, chunks and forwards take with one env
process. A chunk of Reach takes a tenth of a forward, so that two env processes have to ask at the same moment: the hand-over itself, which
is measured and not bound to the bar.

RL steps: the update is a wait; episodes of Reach by the tiny pi0 on a rollout worker of the process backend, parcels, weights through
shared memory. The two schedules take turns. Limit: rollout + update where they take turns, the longer of both where they overlap.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.corrections import Correction
from vla_rl.bench.common import benchmark_parser, finish, measure_in_turns, spread
from vla_rl.cluster.config import ClusterConfig
from vla_rl.episode import ACTION_DIM, EpisodeSpec, Float32, Observation, StepProtocol
from vla_rl.phases.rl import run_rl
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_dry_run import unit_statistics
from vla_rl.phases.rl_trainer import TrainerRank
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policy_actor import PolicyActor
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig, make_pool
from vla_rl.telemetry.files import read_jsonl

BAR_LIMIT = 0.9
"""Of the schedule's limit."""
STEPS = 8
"""RL steps of one run; the first fills the pipeline and the last writes a checkpoint, so both are left out."""
RESOLUTION = 64
CHUNK = 8
ENVS = {"libero": ("libero_object", EnvConfig()), "reach": ("reach", EnvConfig(kind="reach", resolution=RESOLUTION))}
"""By name: suite and env of the rollouts."""
HAND_OVER = "reach"
"""Measured without a bar: where a chunk is ten times as fast as a forward, what is lost is the wait for each other."""
WORKERS = (1, 2)
EPISODE_STEPS = 160
"""Control steps of an episode of the rollouts: standing still, none succeeds."""
EPISODES_EACH = 6
"""Timed episodes per env process."""


class EmulatedPolicy:
    """Waits as long as an accelerator would compute a batch, and stands still."""

    def __init__(self, forward_s: float, resolution: int) -> None:
        self.spec = PolicySpec(CHUNK, CHUNK, resolution=resolution)
        self._forward_s = forward_s

    def preprocess(self, observations: Sequence[Observation]) -> Tensor:
        """One row of nothing for each."""
        return torch.zeros(len(observations), CHUNK, ACTION_DIM)

    def act(self, batch: Tensor, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """Zeros, after a while."""
        time.sleep(self._forward_s)
        return PolicyOutput(batch)

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """The same zeros."""
        return actions_BCA.numpy()


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
    parser.add_argument("--rounds", type=int, default=3, help="runs of each schedule, and of each number of env processes")
    parser.add_argument("--forward-s", type=float, default=0.01, help="length of the policy's emulated forward (s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rates = [row for env in ENVS for row in _rollout_rows(env, options.rounds, options.forward_s)]
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for staleness, measured in runs.items():
                measured += _steps(_recipe(Path(folder), number, staleness, options.episodes), options.update_s)
    steps = [_row(staleness, measured) for staleness, measured in runs.items()]
    for row in steps:
        print(row, flush=True)
    faster = steps[0]["step_s"]["median"] / steps[1]["step_s"]["median"]
    bound = [row for row in (*rates, *steps) if row.get("env") != HAND_OVER]
    fraction = min(row["fraction_of_limit"]["median"] for row in bound)
    hand_over = min(row["fraction_of_limit"]["median"] for row in rates if row["env"] == HAND_OVER)
    print(f"emulated accelerator: a step takes {faster:.2f} times as long without overlap; {fraction:.0%} of the limit", flush=True)
    print(f"env processes of Reach, whose chunks are far shorter than a forward: {hand_over:.0%} (no bar)", flush=True)
    rows = [*rates, *steps, {"accelerator": "emulated", "synchronous_over_overlapped": faster}]
    return finish("overlap", fraction, BAR_LIMIT, fraction, rows, options)


def _rollout_rows(env: str, rounds: int, forward_s: float) -> list[dict[str, Any]]:
    """Control steps per second with 1 and 2 env processes, in fresh processes that take turns."""
    runs = measure_in_turns("vla_rl.bench.overlap", [str(workers) for workers in WORKERS], rounds, env, str(forward_s))
    alone_s = [run["episode_s"] for run in runs[str(WORKERS[0])]]
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        at_once = min(workers, len(os.sched_getaffinity(0)))
        rates = [run["steps_per_s"] for run in runs[str(workers)]]
        fractions = [rate * one_s / (at_once * EPISODE_STEPS) for rate, one_s in zip(rates, alone_s)]
        rows.append({"env": env, "env_processes": workers, "steps_per_s": spread(rates), "fraction_of_limit": spread(fractions)})
        print(rows[-1], flush=True)
    return rows


def measure(workers: int, env: str, forward_s: float) -> dict[str, float]:
    """Rollouts in this process. Keys: `steps_per_s`, and `episode_s`, what an episode's reset, chunks and forwards take by themselves."""
    suite, env_config = ENVS[env]
    protocol = StepProtocol(max_steps=EPISODE_STEPS)
    specs = [EpisodeSpec(suite, 0, f"sampled:{1_000_000 + n}", "train", protocol) for n in range(workers * (1 + EPISODES_EACH))]
    actor = PolicyActor(EmulatedPolicy(forward_s, env_config.resolution), workers)
    look = look_of(actor.needs)
    with closing(make_pool(PoolConfig(workers=workers), env_config)) as pool, closing(actor):
        episodes = run_episodes(pool, actor, ListSource(specs), lambda spec: look)
        for _ in range(workers):  # they warm up
            next(episodes)
        started = time.perf_counter()
        timed = list(episodes)
        seconds = time.perf_counter() - started
    busy = [episode.provenance["reset_s"]["reset"] + sum(step.timing["step"] + forward_s for step in episode.steps) for episode in timed]
    return {"steps_per_s": sum(episode.num_steps for episode in timed) / seconds, "episode_s": statistics.median(busy)}


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


if __name__ == "__main__":
    # Only `main` starts this, in fresh processes: measure WORKERS ENV FORWARD_S.
    print(json.dumps(measure(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))))
