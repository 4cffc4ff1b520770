"""A run directory belongs to one recipe."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_rl.config import ConfigError
from vla_rl.telemetry import run_directory
from vla_rl.telemetry.files import FolderInUseError, read_json, read_jsonl
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


def opened(path: str | Path, recipe: Recipe, free: Sequence[str] = ()) -> RunDirectory:
    """The directory of a run that has ended again."""
    with RunDirectory.open(path, recipe, free) as run:
        return run


def test_reopening_with_the_same_recipe_resumes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    opened(path, Recipe(str(path))).metrics({"loss": 1.0})
    opened(str(path) + "/", Recipe(str(path) + "/", show_progress=False)).metrics({"loss": 2.0})
    assert [row["loss"] for row in read_jsonl(path / "metrics.jsonl")] == [1.0, 2.0]
    assert yaml.safe_load((path / "config.yaml").read_text()) == {
        "run_dir": str(path),
        "seed": 0,
        "inner": {"lr": 1e-3},
        "show_progress": True,
        "cluster": {"lr": 1e-3},
    }
    assert {"packages", "machine", "commit"} <= set(yaml.safe_load((path / "environment.json").read_text()))


def test_the_environment_of_every_start_that_differs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a finished run again once made it a run of the newest commit."""

    def start(commit: str, mujoco: str = "3.3.2") -> dict[str, Any]:
        now = {"packages": {"mujoco": mujoco}, "machine": {}, "commit": commit}
        monkeypatch.setattr(run_directory, "environment", lambda: now)
        opened(tmp_path / "run", Recipe("run"))
        return now

    start("a start that recorded nothing")
    first = start("1")
    RunDirectory(tmp_path / "run").metrics({"loss": 1.0})
    start("1")
    second, third = start("2"), start("2", mujoco="3.4.0")
    start("1")
    assert read_json(tmp_path / "run" / "environment.json") == first | {"resumed": [second, third]}


def test_a_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    opened(tmp_path / "run", Recipe("run"))
    opened(tmp_path / "run", Recipe("run", cluster=Inner(0.5)))


def test_another_recipe_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    opened(tmp_path / "run", Recipe("run")).metrics({"loss": 1.0})
    with pytest.raises(ConfigError, match=r"another recipe .*\n  seed: 0 -> 3\n  inner.lr: 0.001 -> 0.5\nUse another run_dir"):
        opened(tmp_path / "run", Recipe("run", seed=3, inner=Inner(0.5)))


def test_a_run_goes_on_with_newer_code_where_new_fields_have_their_defaults(tmp_path: Path) -> None:
    opened(tmp_path / "run", Recipe("run")).metrics({"loss": 1.0})
    file = tmp_path / "run" / "config.yaml"
    file.write_text(yaml.safe_dump({"run_dir": "run", "inner": {}}))  # as written before seed, inner.lr and the others existed
    opened(tmp_path / "run", Recipe("run"))
    with pytest.raises(ConfigError, match=r"another recipe .*\n  inner.lr: 0.001 -> 0.5\nUse another run_dir"):
        opened(tmp_path / "run", Recipe("run", inner=Inner(0.5)))


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_refused_and_leaves_nothing(empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run_dir is empty, which would be the folder that"), RunDirectory.open(empty, Recipe(empty)):
        pass
    assert not list(tmp_path.iterdir())


def test_a_start_that_recorded_nothing_binds_nobody(tmp_path: Path) -> None:
    """As when a checkpoint was misspelt: the corrected recipe runs in the same directory, also of a pipeline with phases in it."""
    for folder in (tmp_path / "run", tmp_path / "run" / "phase"):
        opened(folder, Recipe("run"))
        for name in ("spans.jsonl", "trainer_0.log", ".lock"):
            (folder / name).write_text("{}\n")
    opened(tmp_path / "run", Recipe("run", seed=3))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 3
    RunDirectory(tmp_path / "run" / "phase").metrics({"loss": 1.0})
    with pytest.raises(ConfigError, match="another recipe"):
        opened(tmp_path / "run", Recipe("run", seed=4))


def test_keys_that_a_command_lets_change_are_kept_as_set_last(tmp_path: Path) -> None:
    opened(tmp_path / "run", Recipe("run")).metrics({"loss": 1.0})
    opened(tmp_path / "run", Recipe("run", inner=Inner(0.5)), free=("inner",))
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["inner"] == {"lr": 0.5}
    with pytest.raises(ConfigError, match=r"another recipe .*\n  seed: 0 -> 1\nUse"):
        opened(tmp_path / "run", Recipe("run", seed=1, inner=Inner(0.25)), free=("inner", "see"))


@pytest.mark.parametrize("text", ["run_dir: [", "- run\n", "run_dir: run\nrun_dir: run\n", "\0"])
def test_a_damaged_recipe_in_a_run_is_named(tmp_path: Path, text: str) -> None:
    opened(tmp_path / "run", Recipe("run")).metrics({"loss": 1.0})
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run/config\.yaml"):
        opened(tmp_path / "run", Recipe("run"))


HOLD = """
import sys
from dataclasses import dataclass
from vla_rl.telemetry.run_directory import RunDirectory

@dataclass(frozen=True)
class Recipe:
    run_dir: str

with RunDirectory.open(sys.argv[1], Recipe("run")):
    print("running", flush=True)
    sys.stdin.read()
"""


@pytest.mark.faults
def test_a_run_has_one_writer_until_that_is_killed(tmp_path: Path) -> None:
    """The second process changes nothing, and says who is there; after kill -9 it goes on at once."""
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"running\n"
        before = {file.name: file.stat().st_mtime_ns for file in run.iterdir()}
        with pytest.raises(FolderInUseError, match=rf"run is being written to by process {other.pid} on .* \(-c .*run\); wait until"):
            opened(run, Recipe("run", seed=3))
        assert {file.name: file.stat().st_mtime_ns for file in run.iterdir()} == before
        other.kill()
    opened(run, Recipe("run", seed=3)).metrics({"loss": 1.0})
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 3


def test_a_run_that_ended_or_failed_is_free_again(tmp_path: Path) -> None:
    opened(tmp_path / "run", Recipe("run"))
    with pytest.raises(OSError, match=r"^disk full$"), RunDirectory.open(tmp_path / "run", Recipe("run")):
        raise OSError("disk full")
    with (
        RunDirectory.open(tmp_path / "run", Recipe("run")),
        pytest.raises(FolderInUseError),
        RunDirectory.open(tmp_path / "run", Recipe("run")),
    ):
        pass
    opened(tmp_path / "run", Recipe("run"))
