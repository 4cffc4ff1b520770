"""What a run says of the code that ran it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vla_rl.telemetry import environment
from vla_rl.telemetry.environment import source_commit


@pytest.fixture
def asked_anew() -> None:
    source_commit.cache_clear()


def test_the_commit_is_that_of_the_source_tree(asked_anew: None) -> None:
    root = Path(environment.__file__).parents[2]
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert source_commit().removesuffix("-dirty") == head


def test_a_machine_without_git_runs_too(asked_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a slim container: every command that opens a run directory ended with a traceback."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert source_commit() == "unknown: git is not installed"
    source_commit.cache_clear()
