"""Nested spans of wall time: one JSON line each, and shares of a step's time.

A span is a named `with` block. Spans of one thread nest; a *leaf* is a span without spans inside it.
What a parent's leaves do not cover is `unaccounted`.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.telemetry.files import append_rows
from vla_rl.telemetry.pulse import mark_progress

WRITE_S = 1.0
"""Seconds between two writes of a thread that is not the main one."""


@dataclass
class _Open:
    name: str
    start_s: float
    children: int = 0


class SpanLog:
    """Collects the spans of this process and, if given a path, appends them to a JSONL file.

    Inside a span of the main thread nothing is written, because writing takes time that no span would explain.
    """

    def __init__(self, path: Path | None, role: str) -> None:
        self.path = path
        self.role = role
        self.rows: list[dict[str, Any]] = []
        self._threads = threading.local()
        self._unwritten: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._written_s = 0.0

    def stack(self) -> list[_Open]:
        """The open spans of the calling thread, outermost first."""
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack

    def close_span(self, entry: _Open, depth: int, duration_s: float) -> None:
        """Record one ended span."""
        mark_progress()
        row = {
            "name": entry.name,
            "start": entry.start_s,
            "s": duration_s,
            "depth": depth,
            "leaf": entry.children == 0,
            "thread": threading.current_thread().name,
            "role": self.role,
            "pid": os.getpid(),
        }
        self.rows.append(row)
        if self.path is not None:
            with self._lock:
                self._unwritten.append(row)
            if depth == 0 and (threading.current_thread() is threading.main_thread() or time.monotonic() - self._written_s > WRITE_S):
                self.write()

    def write(self) -> None:
        """Append what has not been written yet."""
        with self._lock:
            rows, self._unwritten = self._unwritten, []
            if rows and self.path is not None:
                append_rows(self.path, rows)
                self._written_s = time.monotonic()


_log: SpanLog | None = None


def open_span_log(path: Path | None, role: str = "driver") -> SpanLog:
    """Make `span` record from now on, in this process. Returns the log; the previous one, if any, is replaced."""
    global _log
    write_spans()
    _log = SpanLog(path, role)
    return _log


def close_span_log() -> None:
    """Make `span` do nothing again."""
    global _log
    write_spans()
    _log = None


def write_spans() -> None:
    """Write what the open log, if there is one, holds back: before the file is read, or where the process may be ended from outside."""
    if _log is not None:
        _log.write()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Time a block under `name`. Costs nothing while no log is open."""
    log = _log
    if log is None:
        yield
        return
    stack = log.stack()
    if stack:
        stack[-1].children += 1
    entry = _Open(name, time.time())
    mark_progress()
    started = time.perf_counter()
    stack.append(entry)
    try:
        yield
    finally:
        stack.pop()
        log.close_span(entry, len(stack), time.perf_counter() - started)


def add_span(name: str, duration_s: float) -> None:
    """Record time measured elsewhere (a worker's render, say) as a leaf ending now, inside the open span."""
    log = _log
    if log is None:
        return
    stack = log.stack()
    if stack:
        stack[-1].children += 1
    log.close_span(_Open(name, time.time() - duration_s), len(stack), duration_s)


class SpanTotals:
    """Adds up blocks that are too short and too many for a row each; `flush` records one leaf per name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add a block's wall time to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def flush(self) -> None:
        """Record what was added up since the last flush, inside the open span."""
        for name, seconds in self._seconds.items():
            add_span(name, seconds)
        self._seconds.clear()


def as_leaf(rows: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The rows with every span `name` taken whole: a leaf, without what ran inside it in its thread."""
    rows = list(rows)
    whole = [row for row in rows if row["name"] == name]

    def is_part(row: Mapping[str, Any]) -> bool:
        return any(
            (row["pid"], row["thread"]) == (one["pid"], one["thread"])
            and row["depth"] > one["depth"]
            and one["start"] <= row["start"] <= one["start"] + one["s"]
            for one in whole
        )

    return [{**row, "leaf": True} if row["name"] == name else row for row in rows if not is_part(row)]


def leaf_shares(rows: Iterable[Mapping[str, Any]], root: str) -> dict[str, float]:
    """Share of the `root` spans' wall time by leaf name, largest first, with `unaccounted` (all sums to 1).

    Looks at the thread in which the roots ran; leaves of other threads overlap and have no share of the step.
    """
    rows = list(rows)
    roots = [row for row in rows if row["name"] == root]
    total = sum(row["s"] for row in roots)
    if not total:
        return {}
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for row in sorted(roots, key=lambda row: row["start"]):
        lanes[row["pid"], row["thread"]].append((row["start"] - 1e-3, row["start"] + row["s"]))
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["leaf"] and row["name"] != root and _inside(row["start"], lanes.get((row["pid"], row["thread"]), [])):
            seconds[row["name"]] += row["s"]
    shares = {name: value / total for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
    return shares | {"unaccounted": 1.0 - sum(shares.values())}


def _inside(moment: float, stretches: list[tuple[float, float]]) -> bool:
    """Whether a moment lies in one of the stretches (start, end), which are sorted and do not overlap."""
    last = bisect_right(stretches, moment, key=lambda stretch: stretch[0]) - 1
    return last >= 0 and moment <= stretches[last][1]
