"""The best policy of an RL run, chosen on validation scenes only."""

from __future__ import annotations

import shutil
from pathlib import Path

from vla_rl.phases.evaluation import evaluate_checkpoint
from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.checkpoint import atomic_folder
from vla_rl.telemetry.files import write_json
from vla_rl.telemetry.run_directory import RunDirectory


def evaluate_and_keep_best(config: RlConfig, run: RunDirectory, step: int, best: float) -> tuple[dict[str, float], float]:
    """Evaluate the checkpoint that was just written; returns its numbers, and the highest success rate so far.

    A policy that is better than all before it is copied to `best/`, with `selection.json` saying why.
    """
    folder = run.checkpoints / f"step_{step}" / "policy"
    values = evaluate_checkpoint(config.evaluation, folder, run.path / "evaluations" / f"step_{step}")
    rate = values["success_rate"]
    if rate > best:
        _keep(run.path / "best", folder, {"step": step, "split": "validation", **values})
    return {f"validation_{name}": value for name, value in values.items()}, max(rate, best)


def _keep(target: Path, policy: Path, selection: dict[str, object]) -> None:
    with atomic_folder(target) as temporary:
        shutil.copytree(policy, temporary / "policy")
        write_json(temporary / "selection.json", selection)
