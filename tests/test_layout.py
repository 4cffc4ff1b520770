"""How the tree is cut: imports point one way, symlinks resolve, and `datasets/` shadows nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUBPACKAGES = ("sim", "policies", "datasets", "collection", "eval")
RANKS = {
    "errors": 0, "conventions": 0, "episode": 0, "config": 0, "telemetry": 1,
    "sim": 2, "policies": 2, "algorithms": 2,
    "datasets": 3,
    "actors": 4, "policy_actor": 4, "remote_actor": 4, "bell": 0, "rollout": 5, "engine": 5, "weights": 5, "cluster": 5,
    "collection": 6, "eval": 6, "phases": 7, "serving": 7, "replay": 7, "data_commands": 7, "bench": 8, "doctor": 8, "cli": 9,
}  # fmt: skip
"""A module may import modules of its own rank or below, with the exceptions in FORBIDDEN."""
FORBIDDEN = {
    "sim": ("torch", "transformers", "vla_rl.policies", "vla_rl.algorithms"),
    "policies": ("vla_rl.sim", "mujoco", "robosuite", "libero", "vla_rl.algorithms"),
    "algorithms": ("vla_rl.sim", "vla_rl.policies", "mujoco"),
    "datasets": ("vla_rl.sim", "mujoco"),
}


def sources() -> list[Path]:
    folders = [ROOT / name for name in SUBPACKAGES] + [ROOT / "vla_rl"]
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def part_of(path: Path) -> str:
    inside = path.relative_to(ROOT).parts
    inside = inside[1:] if inside[0] == "vla_rl" else inside
    return inside[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for name in imports(path):
        assert name.split(".")[0] not in SUBPACKAGES or name.startswith("datasets."), f"{path}: import {name} must start with vla_rl."
        assert not any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN.get(part, ())), (
            f"{path}: {part} may not import {name}"
        )
        if name.startswith("vla_rl.") and (other := name.split(".")[1]) in RANKS:
            assert RANKS[other] <= RANKS[part], f"{path}: {part} may not import {name}, which stands above it"


def test_subpackages_are_relative_symlinks() -> None:
    for name in SUBPACKAGES:
        link = ROOT / "vla_rl" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name


def test_datasets_folder_does_not_shadow_hugging_face() -> None:
    assert not (ROOT / "datasets" / "__init__.py").exists()
    code = "import datasets, vla_rl.datasets.loader; print(datasets.__file__); print(hasattr(datasets, 'load_dataset'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout and done.stdout.strip().endswith("True")


@pytest.mark.parametrize("module", ["vla_rl.sim.base", "vla_rl.sim.pool", "vla_rl.sim.libero.env", "vla_rl.rollout", "vla_rl.cli"])
def test_light_modules_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 450, f"{path}: {len(text.splitlines())} lines; cut it by subject"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 100, f"{path}: {node.name} has {length} lines"
