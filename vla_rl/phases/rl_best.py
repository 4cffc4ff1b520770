"""The best policy of an RL run, chosen on validation scenes only."""

from __future__ import annotations

import shutil
from pathlib import Path

from vla_rl.phases.evaluation import evaluate_checkpoint
from vla_rl.phases.rl_config import RlConfig
from vla_rl.policies.checkpoint import atomic_folder
from vla_rl.telemetry.files import read_json, write_json
from vla_rl.telemetry.run_directory import RunDirectory

SELECTION_FILE = "selection.json"
"""In `best/`: which step's policy this is, and its numbers."""


def evaluate_and_keep_best(config: RlConfig, run: RunDirectory, step: int) -> dict[str, float]:
    """Evaluate the checkpoint that was just written; returns its numbers.

    A policy that is better than the one in `best/` takes its place, with `selection.json` saying why.
    """
    folder = run.checkpoints / f"step_{step}" / "policy"
    values = evaluate_checkpoint(config.evaluation, folder, run.path / "evaluations" / f"step_{step}")
    if values["success_rate"] > _best_rate(run.path / "best"):
        _keep(run.path / "best", folder, {"step": step, "split": "validation", **values})
    return {f"validation_{name}": value for name, value in values.items()}


def _best_rate(best: Path) -> float:
    """Success rate of the policy that is kept; -1 without one. What lies there counts, whatever a checkpoint of before remembers."""
    file = best / SELECTION_FILE
    return float(read_json(file)["success_rate"]) if file.exists() else -1.0


def _keep(target: Path, policy: Path, selection: dict[str, object]) -> None:
    with atomic_folder(target) as temporary:
        shutil.copytree(policy, temporary / "policy")
        write_json(temporary / SELECTION_FILE, selection)
