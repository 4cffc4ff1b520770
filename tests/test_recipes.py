"""Every shipped recipe loads into the dataclasses of its command."""

from pathlib import Path

import pytest

from vla_rl.cli import RECIPES, recipe_class
from vla_rl.config import load_recipe, read_yaml

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "configs").rglob("*.yaml"))


def command_of(path: Path) -> str:
    """The command in the recipe's own comment: `#   vla-rl COMMAND configs/...`."""
    wanted = f"configs/{path.relative_to(ROOT / 'configs')}"
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith("#") and wanted in line]
    assert lines, f"{path}: the first comment must show the command that runs it"
    return lines[0][lines[0].index("vla-rl") + 1]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_loads(path: Path) -> None:
    command = command_of(path)
    assert command in RECIPES
    config = load_recipe(recipe_class(command), path)
    assert str(config.run_dir).startswith("runs/"), "recipes write below runs/, which git ignores"
    assert read_yaml(path), "a recipe says something"


def test_there_are_recipes() -> None:
    assert PATHS
