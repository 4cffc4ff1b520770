"""Files that survive a crash: atomic writes, append-only JSON lines, and reading them back; and one writer at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from vla_rl.errors import UserError

LOCK_FILE = ".lock"
"""In a folder that one process at a time writes to; says which one does."""


class DamagedFileError(UserError):
    """A file of a run that no longer holds what was written."""


class FolderInUseError(UserError):
    """A folder that another process is writing to."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success fsync it and rename it to `path`, on an exception remove it.

    A reader sees the old file or the whole new one, also after `kill -9` or a power cut.
    Raises OSError (disk full, permissions) with the old file untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield temporary
            fsync(temporary)
            os.replace(temporary, path)
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError say which file it is about: a write that fails (disk full, quota) does not know its file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Inside the block, no other process can be the writer of `folder` (`flock`; the kernel lets go however a process ends).

    Raises FolderInUseError naming the process that is, OSError where the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "a+") as lock:
        _take(lock, folder)
        yield


def _take(lock: TextIO, folder: Path) -> None:
    """Lock the file, and write into it whose it is now."""
    try:
        with naming(folder / LOCK_FILE):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        raise FolderInUseError(
            f"{folder} is being written to by {holder}; wait until it has ended, end it, or use another folder (run_dir)"
        ) from error
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    with naming(folder / LOCK_FILE):  # past Python's buffer, which would try again, without a name, when the file is closed
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()} ({command})".encode())


def write_text(path: str | Path, text: str) -> None:
    """Write `text` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1, default=_plain) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises DamagedFileError for a file that holds none, OSError for one that is missing."""
    try:
        value = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path}: not JSON ({error}); it was cut off or overwritten, restore it from a copy") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path}: holds a {type(value).__name__}, not a mapping; restore it from a copy")
    return value


def append_jsonl(path: str | Path, row: Mapping[str, Any]) -> None:
    """`append_rows` of one row."""
    append_rows(path, [row])


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows; processes that append to the same file take turns (`flock`), so that their rows never mix.

    If the file's last line was cut by a crash, the rest of it is removed first: otherwise the new row would be glued to it.
    """
    lines = "".join(json.dumps(row, default=_plain) + "\n" for row in rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a line that another process is still writing is not a cut one
        if (end := file.seek(0, os.SEEK_END)) and not _ends_whole(file, end):
            _drop_cut_line(file, end)
        file.write(lines.encode())


def _ends_whole(file: Any, end: int) -> bool:
    file.seek(end - 1)
    return file.read(1) == b"\n"


def _drop_cut_line(file: Any, end: int) -> None:
    file.seek(0)
    content = file.read(end)
    file.truncate(content.rfind(b"\n") + 1)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All whole rows; a last line that a crash cut is dropped. A missing file has no rows.

    Raises DamagedFileError naming the line for a damaged line that is not the last one.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DamagedFileError(f"{path}: line {number} is not JSON ({error}); delete that line or restore the file") from error
    return rows


def folder_digest(folder: str | Path) -> str:
    """The first 16 hex digits of the sha256 of a folder's files and their names: for a checkpoint, its weights, sizes, statistics
    and tokenizer."""
    folder, digest = Path(folder), hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """JSON values for what numpy, paths and enums bring along."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")
