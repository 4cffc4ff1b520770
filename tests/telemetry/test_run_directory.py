"""A run directory belongs to one recipe."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from vla_rl.config import ConfigError
from vla_rl.telemetry.files import read_jsonl
from vla_rl.telemetry.run_directory import RunDirectory


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-3


@dataclass(frozen=True)
class Recipe:
    run_dir: str
    seed: int = 0
    inner: Inner = field(default_factory=Inner)
    show_progress: bool = True
    cluster: Inner = field(default_factory=Inner)


def test_reopening_with_the_same_recipe_resumes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDirectory.open(path, Recipe(str(path))).metrics({"loss": 1.0})
    RunDirectory.open(str(path) + "/", Recipe(str(path) + "/", show_progress=False)).metrics({"loss": 2.0})
    assert [row["loss"] for row in read_jsonl(path / "metrics.jsonl")] == [1.0, 2.0]
    assert yaml.safe_load((path / "config.yaml").read_text()) == {
        "run_dir": str(path),
        "seed": 0,
        "inner": {"lr": 1e-3},
        "show_progress": True,
        "cluster": {"lr": 1e-3},
    }
    assert {"packages", "machine", "commit"} <= set(yaml.safe_load((path / "environment.json").read_text()))


def test_a_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", Recipe("run"))
    RunDirectory.open(tmp_path / "run", Recipe("run", cluster=Inner(0.5)))


def test_another_recipe_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", Recipe("run"))
    with pytest.raises(ConfigError, match=r"another recipe .*\n  seed: 0 -> 3\n  inner.lr: 0.001 -> 0.5\nUse another run_dir"):
        RunDirectory.open(tmp_path / "run", Recipe("run", seed=3, inner=Inner(0.5)))


def test_a_run_goes_on_with_newer_code_where_new_fields_have_their_defaults(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", Recipe("run"))
    file = tmp_path / "run" / "config.yaml"
    file.write_text(yaml.safe_dump({"run_dir": "run", "inner": {}}))  # as written before seed, inner.lr and the others existed
    RunDirectory.open(tmp_path / "run", Recipe("run"))
    with pytest.raises(ConfigError, match=r"another recipe .*\n  inner.lr: 0.001 -> 0.5\nUse another run_dir"):
        RunDirectory.open(tmp_path / "run", Recipe("run", inner=Inner(0.5)))
