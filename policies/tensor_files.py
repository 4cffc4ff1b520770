"""The tensors of a checkpoint folder: one safetensors file, or several with an index, read by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vla_rl.errors import UserError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Hugging Face's index of sharded files: `{"weight_map": {tensor name: file name}}`."""


class CheckpointError(UserError):
    """A checkpoint that is absent, damaged, or of another policy."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor on disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: `F32`, `BF16`, ..."""


class TensorFiles:
    """The tensors of a folder (or of one file), known by their headers and read when asked for."""

    def __init__(self, infos: Mapping[str, TensorInfo], source: Path) -> None:
        self.infos, self.source = dict(infos), source

    @classmethod
    def open(cls, path: str | Path) -> TensorFiles:
        """Read the headers of `model.safetensors`, of the shards that its index names, or of the file given.

        Raises CheckpointError for what is absent, damaged, or where index and shards disagree.
        """
        path = Path(path)
        if path.is_file():
            return cls(_header(path), path)
        if (path / WEIGHTS_FILE).is_file():
            return cls(_header(path / WEIGHTS_FILE), path / WEIGHTS_FILE)
        if (path / INDEX_FILE).is_file():
            return cls(_sharded(path / INDEX_FILE), path / INDEX_FILE)
        raise CheckpointError(f"{path} does not exist, or holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.infos)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape by name."""
        return {name: list(info.shape) for name, info in self.infos.items()}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, one file after the other, on the CPU."""
        for file in dict.fromkeys(info.file for info in self.infos.values()):
            with safe_open(file, "pt") as tensors:
                for name, info in self.infos.items():
                    if info.file == file:
                        yield name, tensors.get_tensor(name)


def _header(path: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)
            return {name: TensorInfo(path, tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the file is damaged or truncated, restore the checkpoint") from error


def _sharded(index: Path) -> dict[str, TensorInfo]:
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise TypeError("weight_map does not name a file for every tensor")
    except (ValueError, KeyError, TypeError) as error:  # no JSON and no UTF-8 are ValueErrors
        raise CheckpointError(f"{index} is no index of tensors ({error}); it is damaged or truncated, restore the checkpoint") from error
    absent = sorted({name for name in places.values() if not (index.parent / name).is_file()})
    if absent:
        raise CheckpointError(f"{index.parent} lacks {', '.join(absent)}, which {index.name} names; fetch the missing shards")
    headers = {name: _header(index.parent / name) for name in sorted(set(places.values()))}
    lost = sorted(tensor for tensor, name in places.items() if tensor not in headers[name])
    if lost:
        raise CheckpointError(f"{index} names tensors that its shards do not hold: {', '.join(lost[:5])} ({len(lost)} in all)")
    return {tensor: headers[name][tensor] for tensor, name in places.items()}
