"""README and docs name only what exists: files, recipes, commands."""

import re
from pathlib import Path

import pytest

from vla_rl.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    dead = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not dead, f"{page_name(page)} links to {dead}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_recipes_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    assert [name for name in re.findall(r"\bconfigs/[\w/]+\.yaml", text) if not (ROOT / name).is_file()] == []
    assert {name for name in re.findall(r"(?m)(?:`|^    )vla-rl ([a-z]+)\b", text) if name not in COMMANDS} == set()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_folders_and_modules_exist(page: Path) -> None:
    """Paths in backticks that start with one of our folders, and the files that `docs/policies.md` lists for its own."""
    names = re.findall(r"`((?:sim|policies|datasets|collection|eval|vla_rl|tests|scripts)/[\w/.]*)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []
