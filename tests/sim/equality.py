"""Bit equality of replies, whatever they are nested in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def require_same(first: Any, second: Any, where: str = "", ignore: tuple[str, ...] = ()) -> None:
    """Assert equality to the bit, dtypes included; `ignore` names fields (such as `timing`) that may differ."""
    if dataclasses.is_dataclass(first):
        assert type(first) is type(second), where
        for field in dataclasses.fields(first):
            if field.name not in ignore:
                require_same(getattr(first, field.name), getattr(second, field.name), f"{where}.{field.name}", ignore)
    elif isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray) and first.dtype == second.dtype and first.shape == second.shape, where
        assert first.tobytes() == second.tobytes(), where
    elif isinstance(first, Mapping):
        assert first.keys() == second.keys(), where
        for key in first:
            require_same(first[key], second[key], f"{where}[{key!r}]", ignore)
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second)):
            require_same(one, other, f"{where}[{index}]", ignore)
    else:
        assert first == second, where
