"""A run directory: the resolved recipe, the environment, metrics, spans, checkpoints and videos of one run.

config.yaml  environment.json  metrics.jsonl  spans.jsonl  episodes.jsonl  videos/  checkpoints/  report.html
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vla_rl.config import ConfigError, difference, read_yaml, to_plain, with_defaults
from vla_rl.telemetry.environment import environment
from vla_rl.telemetry.files import append_jsonl, only_writer, read_json, write_json, write_text

FREE_TO_CHANGE = ("run_dir", "show_progress", "cluster")
"""Top-level recipe fields that do not make a run another run: also where it runs, so that it can go on elsewhere."""
BEFORE_RESULTS = ("config.yaml", "environment.json", "spans.jsonl")
"""What a start leaves before anything is recorded, beside logs of roles (`*.log`) and hidden files (locks, temporary names)."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run, and appending to its logs."""

    path: Path

    @classmethod
    @contextmanager
    def open(cls, path: str | Path, config: Any, free: Sequence[str] = ()) -> Iterator[RunDirectory]:
        """Create the directory of a recipe, or reopen it to resume; inside the block this process is the only one that does.

        Writes `config.yaml` (resolved) and `environment.json` (what the first start ran with, and, under `resumed`, every later start
        that differs from it and from the others). free: key paths of this recipe that may change when it goes on, beside
        `FREE_TO_CHANGE`; `config.yaml` then says what was set last. A start that recorded nothing (a missing checkpoint, a port in
        use) binds nobody: the corrected recipe takes its place.
        Raises ConfigError naming every differing key if the directory holds a run of another recipe, and for an empty path;
        FolderInUseError naming the process that is running there.
        """
        if not str(path).strip():
            raise ConfigError("run_dir is empty, which would be the folder that this command was started in; name one for the run")
        run = cls(Path(path))
        with only_writer(run.path):
            _keep_recipe(run.path, config, free)
            _keep_environment(run.path)
            yield run

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/step_N/`, `checkpoints/last`."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Videos of episodes."""
        return self.path / "videos"

    @property
    def episodes_file(self) -> Path:
        """One row per episode."""
        return self.path / "episodes.jsonl"

    @property
    def metrics_file(self) -> Path:
        """One row per update or step."""
        return self.path / "metrics.jsonl"

    @property
    def spans_file(self) -> Path:
        """One row per span of wall time."""
        return self.path / "spans.jsonl"

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row to `metrics.jsonl`, with the wall-clock `time` (s since 1970)."""
        append_jsonl(self.metrics_file, {"time": time.time(), **row})


def _keep_recipe(path: Path, config: Any, free: Sequence[str]) -> None:
    """Write `config.yaml`, or compare with the one that is there; see `RunDirectory.open`."""
    require_same_recipe(path, config, free)
    if free or not _is_bound(path):
        write_text(path / "config.yaml", yaml.safe_dump(to_plain(config), sort_keys=False))


def require_same_recipe(path: Path, config: Any, free: Sequence[str] = ()) -> None:
    """Raise ConfigError naming every differing key if the directory holds a run of another recipe; `free` as in `RunDirectory.open`."""
    if _is_bound(path):
        recorded = with_defaults(config, read_yaml(path / "config.yaml"))
        _require_same(path, recorded, to_plain(config), (*FREE_TO_CHANGE, *free))


def _is_bound(path: Path) -> bool:
    """Whether the directory belongs to the recipe in it."""
    return (path / "config.yaml").exists() and _has_results(path)


def _keep_environment(path: Path) -> None:
    """Write `environment.json`, or add this start to it; see `RunDirectory.open`."""
    file, now = path / "environment.json", environment()
    if not (file.exists() and _has_results(path)):
        write_json(file, now)
        return
    first = read_json(file)
    starts = [first, *first.get("resumed", [])]
    if not any(start["commit"] == now["commit"] and start["packages"] == now["packages"] for start in starts):
        write_json(file, first | {"resumed": [*starts[1:], now]})


def _has_results(path: Path) -> bool:
    """Whether anything was recorded, in the folder or, for a pipeline, in its phases' folders."""
    files = (file for file in path.rglob("*") if file.is_file())
    return any(file.name not in BEFORE_RESULTS and file.suffix != ".log" and not file.name.startswith(".") for file in files)


def _require_same(path: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any], free: Sequence[str]) -> None:
    unlike = [line for line in difference(recorded, wanted) if not _is_free(line.partition(":")[0], free)]
    if unlike:
        raise ConfigError(
            f"{path} holds a run of another recipe (recorded -> now):\n  "
            + "\n  ".join(unlike)
            + "\nUse another run_dir, or the recorded recipe."
        )


def _is_free(key_path: str, free: Sequence[str]) -> bool:
    return any(key_path == name or key_path.startswith(name + ".") for name in free)
