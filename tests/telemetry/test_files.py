"""Atomic writes and JSON lines that survive a crash."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.telemetry.files import DamagedFileError, append_jsonl, atomic_path, read_jsonl, write_json


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"old": 1})
    with pytest.raises(RuntimeError, match="half way"), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("half way")
    assert json.loads(target.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [target]


@given(rows=st.lists(st.dictionaries(st.text(), st.integers() | st.text()), min_size=1), cut=st.integers(min_value=1))
def test_a_cut_last_line_is_dropped_and_appending_goes_on(tmp_path_factory: pytest.TempPathFactory, rows: list[dict], cut: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    for row in rows:
        append_jsonl(path, row)
    assert read_jsonl(path) == rows
    content = path.read_bytes()
    last = len(content) - len(content[:-1].rpartition(b"\n")[2]) - 1
    path.write_bytes(content[: len(content) - 1 - cut % (len(content) - last)])
    assert read_jsonl(path) == rows[:-1]
    append_jsonl(path, {"next": 1})
    assert read_jsonl(path) == [*rows[:-1], {"next": 1}]


APPENDS, LONG = 12, 2_000_000
"""Rows of so many characters that the kernel takes a while to write one."""
APPENDER = f"""
import sys
from vla_rl.telemetry.files import append_jsonl
print("ready", flush=True)
sys.stdin.readline()
for number in range({APPENDS}):
    append_jsonl(sys.argv[1], {{"who": sys.argv[2], "number": number, "text": "x" * {LONG}}})
"""


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    """One took the beginning of the other's row for a line that a crash had cut, and removed it: a fifth of such rows were lost."""
    path = tmp_path / "rows.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", APPENDER, str(path), who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        with writer:
            assert writer.wait() == 0
    rows = [(row["who"], row["number"]) for row in read_jsonl(path) if len(row["text"]) == LONG]
    assert sorted(rows) == [(who, number) for who in "ab" for number in range(APPENDS)]


def test_damage_inside_the_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(DamagedFileError, match="line 2 is not JSON"):
        read_jsonl(path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []


@pytest.mark.faults
@pytest.mark.parametrize("write", [lambda path: append_jsonl(path, {"row": "x" * 9000}), lambda path: write_json(path, "x" * 9000)])
def test_a_write_that_the_kernel_refuses_names_its_file(
    tmp_path: Path, write: Callable[[Path], None], files_of_4_kib: Callable[[], AbstractContextManager[None]]
) -> None:
    """The error of a write alone does not know the file."""
    with files_of_4_kib(), pytest.raises(OSError, match=r"File too large: '.*rows\.jsonl'"):
        write(tmp_path / "rows.jsonl")
