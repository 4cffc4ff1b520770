"""`vla-rl bench rl_crashes`: SIGKILL at random moments of a reinforcement learning run on Reach.

A very small policy learns by PPO in one process (driver, trainer, rollouts and envs), with a checkpoint after every step. The run is
killed again and again: at a random moment of its steps (rollout, update, checkpoint, log), and every fourth time of its start, when it
resumes. Then it runs to its end. Every step must be in `metrics.jsonl` exactly once and in order, every episode of every step in
`episodes.jsonl`, and the weights must be, bit for bit, those of a run that nobody killed.

`ratio` is 1 if all of that held, else 0; the bar is 1.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vla_rl.algorithms.config import AlgorithmConfig, CriticSettings
from vla_rl.bench.common import benchmark_parser, finish
from vla_rl.engine.config import EngineConfig
from vla_rl.phases.rl import run_rl
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_dry_run import unit_statistics
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

PIXELS = 32
EPISODES = 4
"""Of one RL step."""
STEPS_AWAY = 2.5
"""A kill comes at most so many steps after the loop has begun."""
OF_THE_START = 4
"""Every so many-th kill comes while the run starts."""
_FORK = multiprocessing.get_context("fork")


def main(arguments: Sequence[str]) -> int:
    """Kill, finish, compare; 0 if nothing was lost, doubled or changed."""
    parser = benchmark_parser("rl_crashes", __doc__)
    parser.add_argument("--kills", type=int, default=20, help="lives that end by SIGKILL")
    parser.add_argument("--steps", type=int, default=40, help="RL steps of the run; enough that it does not end before the last kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, killed = (recipe(Path(folder), name, options.steps) for name in ("plain", "killed"))
        started = time.perf_counter()
        _run(plain).join()
        start_s = time.perf_counter() - started - sum(_step_seconds(plain))
        row = {
            "case": "Reach, PPO, one process",
            "steps": options.steps,
            **_kill_often(killed, options, start_s, max(_step_seconds(plain))),
        }
        _run(killed).join()
        row["problems"] = problems_of(killed, plain)
    print(row, flush=True)
    return finish("rl_crashes", float(not row["problems"] and row["kills"] == options.kills), 1.0, None, [row], options)


def recipe(folder: Path, name: str, steps: int) -> RlConfig:
    """A run of a policy so small that a step takes a fraction of a second."""
    initial = folder / "policy"
    if not initial.exists():
        transformer = TransformerConfig(width=16, depth=1, mlp_width=32, heads=2, kv_heads=1, head_width=8)
        vision = VisionConfig(image_size=PIXELS, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2)
        sizes = Pi0Config(chunk_length=4, executed_horizon=4, denoise_steps=3, vision=vision, language=transformer, expert=transformer)
        save_policy(make_policy(sizes, unit_statistics(), policy_spec(sizes, PIXELS)), initial)
    return RlConfig(
        run_dir=str(folder / name),
        initial_policy=str(initial),
        suite="reach",
        max_steps=10,
        steps=steps,
        algorithm=_ppo(),
        exploration=Exploration(noise_level=0.4),
        critic=CriticConfig(queries=2, hidden=(8,)),
        engine=EngineConfig(lr=1e-3, schedule="constant", warmup_fraction=0.0, device="cpu", shard_by="root"),
        env=EnvConfig(kind="reach", resolution=PIXELS),
        pool=PoolConfig(backend="serial", workers=EPISODES),
        checkpoint_every=1,
        show_progress=False,
    )


def _ppo() -> AlgorithmConfig:
    return AlgorithmConfig(episodes_per_step=EPISODES, critic=CriticSettings(), epochs=2, global_batch_size=8, micro_batch_size_per_rank=4)


def _run(config: RlConfig) -> BaseProcess:
    """The run in a process of its own, forked because that is quick: nothing here has touched GL or a process group."""
    child = _FORK.Process(target=_run_quietly, args=(config,))
    child.start()
    return child


def _run_quietly(config: RlConfig) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    run_rl(config)


def _kill_often(config: RlConfig, options: Any, start_s: float, step_s: float) -> dict[str, Any]:
    """End one life after the other; how often, how often while it started, and at which step each one was."""
    moments, spans = random.Random(options.seed), Path(config.run_dir) / "spans.jsonl"
    found: dict[str, Any] = {"kills": 0, "of_them_while_starting": 0, "steps_at_kills": []}
    for number in range(options.kills):
        starting = number % OF_THE_START == OF_THE_START - 1
        seen = _size(spans)
        child = _run(config)
        while not starting and child.is_alive() and _size(spans) == seen:  # its loop has not begun
            time.sleep(0.001)
        child.join(moments.uniform(0.0, start_s if starting else STEPS_AWAY * step_s))
        found["of_them_while_starting"] += starting and _size(spans) == seen
        found["kills"] += child.is_alive()
        child.kill()
        child.join()
        found["steps_at_kills"].append(max((row["update"] for row in _metrics(config)), default=0))
    return found


def problems_of(killed: RlConfig, plain: RlConfig) -> list[str]:
    """What does not hold of a run that was killed and has come to its end, beside one that nobody killed."""
    found: list[str] = []
    wanted = list(range(1, plain.steps + 1))
    steps = [row["update"] for row in _metrics(killed) if "success" in row]
    if steps != wanted:
        found.append(f"metrics.jsonl has the numbers of steps {steps}")
    reports = [row["update"] for row in _metrics(killed) if "step_s" in row]  # follow the checkpoint, so a kill in between leaves none
    if reports != sorted(set(reports)):
        found.append(f"metrics.jsonl has the times of steps {reports}")
    ours, theirs = (_episodes(config) for config in (killed, plain))
    if ours != theirs:
        found.append(f"episodes.jsonl has {len(ours)} rows, undisturbed {len(theirs)}, or they differ")
    first, second = (load_file(Path(config.run_dir) / "checkpoints/last/policy/model.safetensors") for config in (killed, plain))
    found += [f"{name} differs" for name, weight in first.items() if not torch.equal(weight, second[name])]
    return found


def _metrics(config: RlConfig) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def _episodes(config: RlConfig) -> list[dict[str, Any]]:
    """Rows of episodes without what depends on the clock."""
    rows = read_jsonl(Path(config.run_dir) / "episodes.jsonl")
    return [{name: value for name, value in row.items() if name in ("step", "task", "init", "steps", "success", "outcome")} for row in rows]


def _step_seconds(config: RlConfig) -> list[float]:
    return [row["step_s"] for row in _metrics(config) if "step_s" in row]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
