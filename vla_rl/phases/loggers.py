"""Where metrics go: always to the run's `metrics.jsonl`, and to TensorBoard and W&B where a recipe asks for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vla_rl.config import ConfigError, to_plain
from vla_rl.telemetry.files import read_jsonl, write_text
from vla_rl.telemetry.run_directory import RunDirectory


@dataclass(frozen=True)
class LoggerConfig:
    """Further places for the metrics that `metrics.jsonl` always gets."""

    tensorboard: bool = False
    """Write TensorBoard event files into `RUN/tensorboard`."""
    wandb_project: str = ""
    """Weights & Biases project to log to; empty: none. Offline unless `WANDB_MODE` says otherwise."""


class MetricLog:
    """Appends rows of numbers under an update number; a context manager."""

    def __init__(self, run: RunDirectory, config: LoggerConfig, recipe: Any, resumed_at: int) -> None:
        """Rows beyond `resumed_at` come from updates that a crash undid; they are dropped, because they run again."""
        self._run = run
        drop_rows_after(run, resumed_at)
        self._tensorboard = _tensorboard(run, resumed_at) if config.tensorboard else None
        self._wandb = _wandb(run, config.wandb_project, recipe) if config.wandb_project else None

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """One row: `update` (from 1) and its numbers."""
        self._run.metrics({"update": update, **values})
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, update)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=update)


def drop_rows_after(run: RunDirectory, update: int) -> None:
    """Rewrite `metrics.jsonl` without the rows of later updates (atomically; untouched where there are none)."""
    rows = read_jsonl(run.metrics_file)
    kept = [row for row in rows if row.get("update", 0) <= update]
    if len(kept) < len(rows):
        write_text(run.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))


def owes_evaluation(run: RunDirectory, update: int, every: int) -> bool:
    """Whether the checkpoint of `update` is to be evaluated and was not: also where a run was killed before it could be."""
    if every == 0 or update == 0 or update % every:
        return False
    names = [name for row in read_jsonl(run.metrics_file) if row.get("update") == update for name in row]
    return not any(name.endswith("success_rate") for name in names)


def _tensorboard(run: RunDirectory, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "loggers.tensorboard is on and tensorboard is not installed; pip install 'vla-rl[loggers]' or turn it off"
        ) from error
    return SummaryWriter(str(run.path / "tensorboard"), purge_step=resumed_at + 1)


def _wandb(run: RunDirectory, project: str, recipe: Any) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"loggers.wandb_project is {project!r} and wandb is not installed; pip install 'vla-rl[loggers]' or leave it empty"
        ) from error
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    return wandb.init(project=project, name=run.path.name, dir=str(run.path), config=to_plain(recipe), mode=mode)
