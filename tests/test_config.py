"""Strict recipes: every message names the key path, the value, what is allowed and the nearest name."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.config import ConfigError, build, difference, load_recipe, read_yaml, to_plain


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    """Learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Shape over time."""
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; it must be above 0")


@dataclass(frozen=True)
class Small:
    family: Literal["small"] = "small"
    width: int = 8


@dataclass(frozen=True)
class Large:
    family: Literal["large"] = "large"
    depth: int = 4


@dataclass(frozen=True)
class Recipe:
    run_dir: Path
    updates: int = 10
    colour: Colour = Colour.RED
    optimizer: Optimizer = field(default_factory=Optimizer)
    names: tuple[str, ...] = ()
    limit: float | None = None
    model: Small | Large = field(default_factory=Small)


def test_fills_nested_values_and_converts_only_what_is_safe() -> None:
    recipe = build(
        Recipe,
        {
            "run_dir": "runs/x",
            "colour": "blue",
            "optimizer": {"lr": 1, "betas": [0.5, 0.9]},
            "names": ["a"],
            "model": {"family": "large", "depth": 2},
        },
    )
    assert recipe == Recipe(
        Path("runs/x"), colour=Colour.BLUE, optimizer=Optimizer(lr=1.0, betas=(0.5, 0.9)), names=("a",), model=Large(depth=2)
    )
    assert isinstance(recipe.optimizer.lr, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run_dir": "x", "updatse": 3}, r"unknown key 'updatse'; did you mean 'updates'\? \(allowed here: run_dir, "),
        ({"run_dir": "x", "lr": 3.0}, r"unknown key 'lr'; 'lr' belongs at 'optimizer.lr'"),
        ({"run_dir": "x", "optimizer": {"schedul": "cosine"}}, r"unknown key 'optimizer.schedul'; did you mean 'optimizer.schedule'\?"),
        ({"run_dir": "x", "updates": "ten"}, r"updates is 'ten' \(str\); it must be a int"),
        ({"run_dir": "x", "updates": True}, r"updates is True \(bool\); it must be a int"),
        ({"run_dir": "x", "updates": 1.5}, r"updates is 1.5 \(float\); it must be a int"),
        ({"run_dir": "x", "colour": "bleu"}, r"colour is 'bleu'; did you mean 'blue'\? \(allowed: red, blue\)"),
        ({"run_dir": "x", "optimizer": {"lr": -1.0}}, r"optimizer: lr is -1.0; it must be above 0"),
        ({"run_dir": "x", "optimizer": {"betas": [0.9]}}, r"optimizer.betas has 1 values; it takes 2"),
        ({"run_dir": "x", "optimizer": 3}, r"optimizer is 3; it must be a mapping with keys lr, schedule, betas"),
        ({"run_dir": "x", "names": "abc"}, r"names is 'abc'; it must be a list"),
        ({"run_dir": "x", "limit": float("nan")}, r"limit is nan; it must be a finite number"),
        ({"run_dir": "x", "optimizer": {"lr": float("inf")}}, r"optimizer.lr is inf; it must be a finite number"),
        ({"run_dir": "x", "optimizer": {"betas": [0.9, float("nan")]}}, r"optimizer.betas\[1\] is nan; it must be a finite number"),
        ({"run_dir": "x", "limit": "no"}, r"limit is 'no' \(str\); it must be a float"),
        ({"run_dir": "x", "model": {"width": 3}}, r"model.family must say which one it is: 'small', 'large'"),
        ({"run_dir": "x", "model": {"family": "smal"}}, r"model.family is 'smal'; did you mean 'small'\?"),
        ({}, r"missing key 'run_dir'"),
    ],
)
def test_bad_values_are_named(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Recipe, values)


def test_yaml_file_reads_exponents_as_numbers_and_refuses_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("run_dir: x\noptimizer: {lr: 3e-4}\n")
    assert load_recipe(Recipe, path).optimizer.lr == 3e-4
    path.write_text("run_dir: x\nupdates: 1\nupdates: 2\n")
    with pytest.raises(ConfigError, match="key updates is given twice"):
        load_recipe(Recipe, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n", "is not text in UTF-8 .* at byte 0"),
        ("run_dir: café".encode("latin-1"), "is not text in UTF-8 .*saved as UTF-8"),
        (b"run_dir: x\n? [a, b]\n: c\n", "line 2: a key is a list or a mapping; it must be a name"),
        (b"run_dir: x\n\tupdates: 3\n", "is not YAML"),
        (b"- run_dir\n", "holds a list; a recipe is a mapping"),
    ],
)
def test_files_that_are_no_recipe_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"recipe\.yaml:? {message}"):
        load_recipe(Recipe, path)


def test_mappings_can_share_keys(tmp_path: Path) -> None:
    """YAML's merge key: what a mapping says itself wins, also when the shared one is used twice."""
    path = tmp_path / "recipe.yaml"
    path.write_text("first: &shared {a: 1, b: [2]}\nsecond: {<<: *shared, a: 3}\nthird: {b: 4, <<: *shared}\n")
    assert read_yaml(path) == {"first": {"a": 1, "b": [2]}, "second": {"a": 3, "b": [2]}, "third": {"a": 1, "b": 4}}
    path.write_text("first: &shared {a: 1}\nsecond: {<<: *shared, b: 1, b: 2}\n")
    with pytest.raises(ConfigError, match="key b is given twice"):
        read_yaml(path)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sft_tiny.yaml").write_text("run_dir: x\n")
    with pytest.raises(ConfigError, match=r"no recipe at .*sft_tny.yaml; did you mean .*sft_tiny.yaml\?"):
        load_recipe(Recipe, tmp_path / "sft_tny.yaml")


def test_overrides_replace_values_of_the_file_and_leave_the_others(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("run_dir: x\nupdates: 7\noptimizer: {lr: 0.5, schedule: cosine}\nmodel: {family: large, depth: 9}\n")
    recipe = load_recipe(Recipe, path, ["--optimizer.lr", "1e-4", "--model.depth", "3"])
    assert recipe == Recipe(Path("x"), updates=7, optimizer=Optimizer(lr=1e-4, schedule="cosine"), model=Large(depth=3))


def test_override_that_contradicts_is_a_config_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("run_dir: x\n")
    with pytest.raises((ConfigError, SystemExit)):
        load_recipe(Recipe, path, ["--optimizer.lr", "-1"])
    with pytest.raises(SystemExit):
        load_recipe(Recipe, path, ["--optimizer.lrr", "1"])
    with pytest.raises(ConfigError, match=r"optimizer\.lr is inf; it must be a finite number"):
        load_recipe(Recipe, path, ["--optimizer.lr", "inf"])
    assert "--optimizer.lr" in capsys.readouterr().err


recipes = st.builds(
    Recipe,
    run_dir=st.just(Path("runs/a")),
    updates=st.integers(),
    colour=st.sampled_from(Colour),
    optimizer=st.builds(Optimizer, lr=st.floats(min_value=1e-9, max_value=1e9), betas=st.tuples(st.floats(0, 1), st.floats(0, 1))),
    names=st.lists(st.text()).map(tuple),
    limit=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    model=st.builds(Small, width=st.integers()) | st.builds(Large, depth=st.integers()),
)


@given(recipes)
def test_plain_values_build_the_same_recipe(recipe: Recipe) -> None:
    assert build(Recipe, to_plain(recipe)) == recipe


@given(recipes, recipes)
def test_difference_is_empty_exactly_for_equal_recipes(first: Recipe, second: Recipe) -> None:
    assert (difference(to_plain(first), to_plain(second)) == []) == (to_plain(first) == to_plain(second))


def test_lists_of_mappings_are_compared_item_by_item() -> None:
    first = {"phases": [{"command": "sft", "seed": 0}, {"command": "eval"}], "tasks": [0, 1]}
    second = {"phases": [{"command": "sft", "seed": 1}], "tasks": [0]}
    assert difference(first, second) == [
        "phases[0].seed: 0 -> 1",
        "phases[1]: {'command': 'eval'} -> '(absent)'",
        "tasks: [0, 1] -> [0]",
    ]
    assert difference({"note": "a"}, {"note": "b" * 1000}) == [f"note: 'a' -> '{'b' * 199} ..."]
