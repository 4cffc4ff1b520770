"""Pictures as PNG, and where the PNG files lie inside a parquet file.

`LeRobotDataset` keeps pictures as a column of PNG files. Reading one row of such a column with a parquet reader means
decompressing the whole row group. This project's writer leaves the column uncompressed (a PNG file does not shrink any
further), so that every picture is a run of bytes in the file: found once, read with one `pread`.
"""

from __future__ import annotations

import io
import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import Int64, UInt8

PNG_EFFORT = 1
"""zlib's level. Higher ones take 3 to 6 times as long for 5 to 10 % of the bytes (docs/datasets.md)."""
OPEN_FILES, KEPT_GROUPS = 256, 4
"""Files that one process keeps open; row groups of compressed columns that it keeps."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LENGTH_BYTES = 4
"""Parquet's PLAIN encoding puts the number of bytes before each value, little-endian."""


def encode_png(picture_HWC: UInt8) -> bytes:
    """The PNG file of uint8[H, W, 3]."""
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture_HWC)).save(file, "PNG", compress_level=PNG_EFFORT)
    return file.getvalue()


def decode_png(content: bytes, where: str = "picture") -> UInt8:
    """uint8[H, W, 3] from a PNG (or JPEG) file. Raises DatasetError naming `where` for bytes that are no picture."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB") if image.mode != "RGB" else image)
    except (OSError, SyntaxError) as error:  # Pillow reports broken chunks as SyntaxError
        raise DatasetError(f"{where}: not a readable picture ({error}; {len(content)} bytes)") from error


def locate_pngs(path: Path, feature: str) -> Int64 | None:
    """int64[rows, 2], (offset, length) of every picture of a column, or None where the column is compressed.

    Walks the column's bytes: each value is its length and then the file, and page headers lie between some of them.
    """
    metadata = pq.read_metadata(path)
    column = next((i for i in range(metadata.num_columns) if metadata.schema.column(i).path == f"{feature}.bytes"), None)
    if column is None or not metadata.num_rows:
        return None
    chunks = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
    if any(chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page for chunk in chunks):
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        spans = [span for chunk in chunks for span in _walk(content, chunk.data_page_offset, chunk.total_compressed_size)]
    return np.array(spans, np.int64) if len(spans) == metadata.num_rows else None


def _walk(content: mmap.mmap, start: int, size: int) -> list[tuple[int, int]]:
    spans, end = [], start + size
    found = content.find(_SIGNATURE, start, end)
    while found >= 0:
        length = int.from_bytes(content[found - _LENGTH_BYTES : found], "little")
        spans.append((found, length))
        found = content.find(_SIGNATURE, found + length, end)
    return spans


class PngColumns:
    """PNG files of parquet columns by (file, feature, row): one `pread` each where the column is uncompressed.

    Compressed columns (LeRobot's own writer) are read a row group at a time, and the last groups are kept: in order that is
    fast, at random it is not; `vla-rl data convert` writes the same pictures uncompressed. Can be sent to a spawned worker.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[Path, str], Int64 | None] = {}
        self._descriptors: OrderedDict[Path, int] = OrderedDict()
        self._groups: OrderedDict[tuple[Path, str, int], list[bytes | None]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_spans": self._spans, "_descriptors": OrderedDict(), "_groups": OrderedDict()}

    def read(self, path: Path, feature: str, row: int) -> bytes:
        """The PNG file in a row. Raises DatasetError for a file that is missing or damaged, or a row that it has not."""
        key = (path, feature)
        try:
            if key not in self._spans:
                self._spans[key] = locate_pngs(path, feature)
            spans = self._spans[key]
            if spans is None:
                return self._from_group(path, feature, row)
            offset, length = spans[row].tolist()
            content = os.pread(self._descriptor(path), length, offset)
        except (OSError, pa.ArrowException, IndexError) as error:
            raise DatasetError(f"{path}: cannot read row {row} of {feature} ({error}); restore the file") from error
        return content

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        self._descriptors.move_to_end(path)
        return self._descriptors[path]

    def _from_group(self, path: Path, feature: str, row: int) -> bytes:
        metadata = pq.read_metadata(path)
        group = 0
        while row >= metadata.row_group(group).num_rows:
            row -= metadata.row_group(group).num_rows
            group += 1
        key = (path, feature, group)
        if key not in self._groups:
            if len(self._groups) >= KEPT_GROUPS:
                self._groups.popitem(last=False)
            column = pq.ParquetFile(path).read_row_group(group, columns=[feature])[feature]
            self._groups[key] = [None if value is None else value["bytes"] for value in column.to_pylist()]
        self._groups.move_to_end(key)
        content = self._groups[key][row]
        if content is None:
            raise DatasetError(f"{path}: row {row} of row group {group} has no picture in {feature}; restore it, or leave the episode out")
        return content

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
