"""What a run says of the code that ran it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.telemetry import environment
from vla_rl.telemetry.environment import source_commit


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.invalid", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source tree of its own, from which the module seems to come; whoever asks, asks for the first time."""
    module = tmp_path / "vla_rl" / "telemetry" / "environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("first")
    monkeypatch.setattr(environment, "__file__", str(module))
    source_commit.cache_clear()
    yield tmp_path
    source_commit.cache_clear()


def test_the_commit_is_the_one_that_the_process_began_with(tree: Path) -> None:
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "first")
    first = git(tree, "rev-parse", "HEAD")
    assert source_commit() == first
    Path(environment.__file__).write_text("second")
    assert source_commit() == first, "it runs what it has read"
    source_commit.cache_clear()
    assert source_commit() == f"{first}-dirty"


def test_a_tree_without_git_is_said_to_be_none(tree: Path) -> None:
    assert source_commit() == "not a git checkout"


def test_a_machine_without_git_runs_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a slim container: every command that opens a run directory ended with a traceback."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tree))
        assert source_commit() == "unknown: git is not installed"
