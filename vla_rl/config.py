"""Recipes: a YAML file fills frozen dataclasses, strictly.

A key that no dataclass has, a value of the wrong type and values that contradict each other are errors that name
the key path, the value, what is allowed, and the nearest valid name. A default lives in its dataclass and nowhere else.
Command-line overrides (`--engine.lr 1e-4`) go through tyro over the same dataclasses, so that `--help` documents every field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from vla_rl.errors import UserError


class ConfigError(UserError):
    """A recipe that cannot be run as written."""


class _RecipeLoader(yaml.SafeLoader):
    """YAML with `1e-4` as a number (YAML 1.2), duplicate keys refused, and `<<: *name` to share keys between mappings."""


_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _mapping_without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key.value for key, _ in node.value]
    twice = {str(key) for key in own if own.count(key) > 1}
    if twice:
        raise ConfigError(f"line {node.start_mark.line + 1}: key {', '.join(sorted(twice))} is given twice; keep one")
    nested = [key.start_mark.line + 1 for key, _ in node.value if not isinstance(key, yaml.ScalarNode)]
    if nested:
        raise ConfigError(f"line {nested[0]}: a key is a list or a mapping; it must be a name")
    loader.flatten_mapping(node)  # `<<: *other` brings another mapping's keys, which come first: the mapping's own ones win
    return {loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value}


_RecipeLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def load_recipe[T](config_class: type[T], path: str | Path, overrides: Sequence[str] = (), command: str = "vla-rl") -> T:
    """Read a recipe file into `config_class` and apply command-line overrides.

    Raises ConfigError for a missing file, bad YAML, unknown or misplaced keys, wrong types and contradictions.
    `overrides` such as `["--engine.lr", "1e-4"]` are parsed by tyro, which prints help or its own error, under the name of
    `command` and the recipe, and exits.
    """
    path = Path(path)
    config = build(config_class, read_yaml(path), where=str(path))
    return override(config, overrides, f"{command} {path}") if overrides else config


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises ConfigError if there is none."""
    if not path.is_file():
        nearby = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1) if path.parent.is_dir() else []
        hint = f"; did you mean {path.parent / nearby[0]}?" if nearby else ""
        raise ConfigError(f"no recipe at {path}{hint}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}); give a recipe, saved as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a recipe is a mapping of keys to values")
    return values


def override[T](config: T, arguments: Sequence[str], program: str) -> T:
    """`config` with command-line values in place of its own, through tyro; `program` is what help says to type."""
    import tyro

    try:
        changed = tyro.cli(type(config), default=config, args=list(arguments), prog=program, config=(tyro.conf.AvoidSubcommands,))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _require_finite(to_plain(changed), "", program)
    return changed


def build[T](config_class: type[T], values: Mapping[str, Any], where: str = "recipe") -> T:
    """Fill a dataclass from plain values. Raises ConfigError, see the module's docstring."""
    config = _build(config_class, values, "", config_class, where)
    _require_finite(to_plain(config), "", where)
    return config


def _require_finite(plain: Any, key_path: str, where: str) -> None:
    """No recipe means infinity or NaN, and both pass checks such as "above 0" or "at least 0"."""
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ConfigError(f"{where}: {key_path} is {plain}; it must be a finite number")
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            _require_finite(value, _join(key_path, str(key)), where)
    if isinstance(plain, list):
        for index, value in enumerate(plain):
            _require_finite(value, f"{key_path}[{index}]", where)


def _build(config_class: type, values: Mapping[str, Any], key_path: str, root: type, where: str) -> Any:
    hints = typing.get_type_hints(config_class)
    names = [field.name for field in dataclasses.fields(config_class)]
    for key in values:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {_join(key_path, str(key))!r}{_suggest(str(key), names, key_path, root)}")
    arguments = {key: _convert(hints[key], value, _join(key_path, key), root, where) for key, value in values.items()}
    missing = [f.name for f in dataclasses.fields(config_class) if _required(f) and f.name not in arguments]
    if missing:
        raise ConfigError(f"{where}: missing key {', '.join(repr(_join(key_path, name)) for name in missing)}")
    try:
        return config_class(**arguments)
    except ValueError as error:
        raise ConfigError(f"{where}: {key_path + ': ' if key_path else ''}{error}") from error


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(key_path: str, key: str) -> str:
    return f"{key_path}.{key}" if key_path else key


def _suggest(key: str, names: Sequence[str], key_path: str, root: type) -> str:
    elsewhere = [path for path in _all_paths(root) if path.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"; {key!r} belongs at {' or '.join(repr(path) for path in elsewhere)}"
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; did you mean {_join(key_path, nearest[0])!r}?" if nearest else ""
    return f"{hint} (allowed here: {', '.join(names)})"


def _all_paths(config_class: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        path = _join(prefix, field.name)
        yield path
        for inner in _dataclasses_in(hints[field.name]):
            yield from _all_paths(inner, path)


def _dataclasses_in(hint: Any) -> list[type]:
    if dataclasses.is_dataclass(hint):
        return [typing.cast(type, hint)]
    return [option for option in get_args(hint) if dataclasses.is_dataclass(option) and isinstance(option, type)]


def _convert(hint: Any, value: Any, path: str, root: type, where: str) -> Any:
    """One value to the type its field asks for."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, path, root, where)
    if origin is Literal:
        return _choice(value, get_args(hint), path, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_choice(value, [member.value for member in hint], path, where))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: {path} is {value!r}; it must be a mapping with keys {', '.join(f.name for f in dataclasses.fields(hint))}"
            )
        return _build(typing.cast(type, hint), value, path, root, where)
    if origin is tuple:
        return _convert_tuple(get_args(hint), value, path, root, where)
    return _scalar(hint, value, path, where)


def _convert_union(options: Sequence[Any], value: Any, path: str, root: type, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = [option for option in options if option is not type(None)]
    if len(options) == 1:
        return _convert(options[0], value, path, root, where)
    if isinstance(value, Mapping) and all(dataclasses.is_dataclass(option) for option in options):
        return _build(_tagged(options, value, path, where), value, path, root, where)
    for option in options:
        if isinstance(option, type) and type(value) is option:
            return value
    return _convert(options[-1], value, path, root, where)


def _tagged(options: Sequence[Any], value: Mapping[str, Any], path: str, where: str) -> type:
    """The dataclass of a union whose Literal tag field (`family`, `kind`) has the given value."""
    tags = {}
    tag_name = next(f.name for f in dataclasses.fields(options[0]) if get_origin(typing.get_type_hints(options[0])[f.name]) is Literal)
    for option in options:
        for tag in get_args(typing.get_type_hints(option)[tag_name]):
            tags[tag] = option
    if tag_name not in value:
        raise ConfigError(f"{where}: {path}.{tag_name} must say which one it is: {', '.join(map(repr, tags))}")
    return tags[_choice(value[tag_name], list(tags), f"{path}.{tag_name}", where)]


def _choice(value: Any, allowed: Iterable[Any], path: str, where: str) -> Any:
    allowed = list(allowed)
    if value in allowed and type(value) in {type(option) for option in allowed}:
        return value
    raise ConfigError(f"{where}: {path} is {value!r}{nearest_name(str(value), [str(option) for option in allowed])}")


def nearest_name(name: str, allowed: Sequence[str]) -> str:
    """The tail of an error message: `; did you mean 'x'? (allowed: ...)`."""
    nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    return (f"; did you mean {nearest[0]!r}?" if nearest else "") + f" (allowed: {', '.join(allowed)})"


def _convert_tuple(inner: Sequence[Any], value: Any, path: str, root: type, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: {path} is {value!r}; it must be a list")
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_convert(inner[0], item, f"{path}[{i}]", root, where) for i, item in enumerate(value))
    if len(value) != len(inner):
        raise ConfigError(f"{where}: {path} has {len(value)} values; it takes {len(inner)}")
    return tuple(_convert(hint, item, f"{path}[{i}]", root, where) for i, (hint, item) in enumerate(zip(inner, value)))


def _scalar(hint: Any, value: Any, path: str, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is hint:
        return value
    name = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where}: {path} is {value!r} ({type(value).__name__}); it must be a {name}")


def to_plain(config: Any) -> Any:
    """A config as plain YAML values, the inverse of `build`."""
    if dataclasses.is_dataclass(config):
        return {field.name: to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, tuple | list):
        return [to_plain(item) for item in config]
    return config


def with_defaults(config: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """`recorded`, the plain form of an older `config`, with the defaults of fields that did not exist when it was written.

    A new field's default is what the code did before it existed, so a run goes on with a newer version of the code.
    """
    filled = dict(recorded)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in filled:
            filled[field.name] = _filled_in(value, filled[field.name])
        elif not _required(field):
            factory = field.default_factory
            filled[field.name] = to_plain(field.default if factory is dataclasses.MISSING else factory())
    return filled


def _filled_in(value: Any, recorded: Any) -> Any:
    """`with_defaults` of a field's value: a dataclass, or several in a list."""
    if dataclasses.is_dataclass(value) and isinstance(recorded, Mapping):
        return with_defaults(value, recorded)
    if isinstance(value, tuple) and isinstance(recorded, list):
        return [*map(_filled_in, value, recorded), *recorded[len(value) :]]
    return recorded


def difference(first: Any, second: Any, path: str = "") -> list[str]:
    """`key.path: first -> second` for every value in which two plain configs differ; lists of mappings are compared item by item."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = list(dict.fromkeys([*first, *second]))
        return [line for key in keys for line in difference(first.get(key, ABSENT), second.get(key, ABSENT), _join(path, str(key)))]
    if _holds_mappings(first) and _holds_mappings(second):
        pairs = enumerate(zip_longest(first, second, fillvalue=ABSENT))
        return [line for number, (one, other) in pairs for line in difference(one, other, f"{path}[{number}]")]
    return [] if first == second else [f"{path}: {_shown(first)} -> {_shown(second)}"]


ABSENT = "(absent)"
"""In place of a value that one of two configs does not have."""
LONGEST_VALUE = 200
"""Characters of a value in a message; of a longer one the beginning says which it is."""


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + " ..."
