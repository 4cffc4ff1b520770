"""The tables of a LeRobot folder as bytes of parquet files, and numbers back out of their columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.lerobot_format import Place
from vla_rl.datasets.lerobot_parts import EpisodeParts, replay_schema
from vla_rl.datasets.tally import Tally
from vla_rl.episode import Int64


def parquet_bytes(tables: Sequence[pa.Table]) -> bytes:
    """A parquet file with one row group per table. Tables with pictures stay uncompressed, see `datasets/png.py`."""
    schema = tables[0].schema
    with_pictures = any(pa.types.is_struct(field.type) for field in schema)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="NONE" if with_pictures else "snappy", use_dictionary=not with_pictures) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    return sink.getvalue().to_pybytes()


def json_bytes(value: Any) -> bytes:
    """Indented JSON."""
    return (json.dumps(value, indent=1) + "\n").encode()


def tasks_table(texts: Sequence[str]) -> pa.Table:
    """`meta/tasks.parquet`: a pandas frame whose index is the instruction, rows in the order of `task_index`, as LeRobot reads it."""
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ]
    table = pa.table({"task_index": pa.array(range(len(texts)), pa.int64()), "task": pa.array(texts, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps({"index_columns": ["task"], "column_indexes": [], "columns": columns})})


def replay_table(rows: Sequence[Mapping[str, Any]], episodes: Sequence[EpisodeParts]) -> pa.Table:
    """Rows of `replay/`: what replays each episode, and the counts that statistics of its pictures come from."""
    counts = [{f"value_counts/{name}": values.reshape(-1).tolist() for name, values in parts.value_counts.items()} for parts in episodes]
    own = [{"episode_index": row["episode_index"], **parts.replay, **count} for row, parts, count in zip(rows, episodes, counts)]
    return pa.Table.from_pylist(own, schema=replay_schema(list(episodes[0].value_counts)))


def episode_table(rows: Sequence[Mapping[str, Any]], tables: Sequence[pa.Table], episodes: Sequence[EpisodeParts]) -> pa.Table:
    """Rows of `meta/episodes` with the statistics of each episode."""
    with_statistics = []
    for row, table, parts in zip(rows, tables, episodes):
        tally = Tally()
        for name in table.column_names:
            if not pa.types.is_struct(table.schema.field(name).type):
                tally.add_rows(name, rows_of_column(table[name]))
        for name, counts in parts.value_counts.items():
            tally.add_pictures(name, counts, parts.num_steps)
        statistics = {f"stats/{name}/{kind}": value for name, kinds in tally.statistics().items() for kind, value in kinds.items()}
        with_statistics.append({**row, **statistics})
    return pa.Table.from_pylist(with_statistics)


def rows_of_column(column: pa.ChunkedArray) -> np.ndarray:
    """Numbers [N, D] or [N] of a column of vectors or numbers."""
    combined = column.combine_chunks()
    if pa.types.is_fixed_size_list(combined.type) or pa.types.is_list(combined.type):
        return combined.flatten().to_numpy(zero_copy_only=False).reshape(len(combined), -1)
    return combined.to_numpy(zero_copy_only=False)


def as_counts(values: Sequence[int]) -> Int64:
    """int64[3, 256] of a row of `value_counts/...`."""
    return np.array(values, np.int64).reshape(3, 256)


def data_file_number(row: Mapping[str, Any]) -> int:
    """Which file of each family an episode of our own lies in."""
    return row["data/chunk_index"] * names.FILES_PER_CHUNK + row["data/file_index"]


def files_of(row: Mapping[str, Any]) -> list[str]:
    """Paths of the files that hold an episode of our own, below the folder."""
    place = Place(row["data/chunk_index"], row["data/file_index"])
    videos = [key.removeprefix("videos/").removesuffix("/file_index") for key in row if key.startswith("videos/") and "file_index" in key]
    own = [place.path(pattern) for pattern in (names.DATA_PATH, names.REPLAY_PATH, names.EPISODES_PATH)]
    return own + [place.path(names.VIDEO_PATH, video_key=feature) for feature in videos]
