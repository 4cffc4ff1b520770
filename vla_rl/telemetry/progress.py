"""Progress on standard error: a bar with a time estimate on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_LINES = 20
"""Lines that a log (no terminal) gets over a whole phase."""
ESTIMATE_WINDOW_S = 120.0
"""Span of time whose pace the bar's estimate uses."""


class CountProgress:
    """Counts what a phase consists of (`unit`: `updates`, `episodes`); a context manager."""

    def __init__(self, label: str, unit: str, total: int, done: int, show: bool) -> None:
        self._label, self._unit, self._total, self._resumed, self._show = label, unit, total, done, show
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        if self._show and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, speed_estimate_period=ESTIMATE_WINDOW_S)
            self._task = self._bar.add_task(self._label, total=self._total, completed=self._resumed)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, done: int, text: str) -> None:
        """`done` of all are complete; `text` says how it goes (`loss 0.123`)."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._label}: {text}")
        elif self._show and (done % max(1, self._total // LOG_LINES) == 0 or done == self._total):
            place = f"{done} of {self._total} {self._unit}"
            print(f"{self._label}: {place}, {text}, about {self._remaining_s(done):.0f} s left", file=sys.stderr, flush=True)

    def _remaining_s(self, done: int) -> float:
        """Time that the rest takes at the pace so far."""
        return (time.monotonic() - self._started) / max(1, done - self._resumed) * (self._total - done)


class EpisodeProgress(CountProgress):
    """Counts episodes, and how they ended since this start."""

    def __init__(self, label: str, total: int, done: int, show: bool) -> None:
        super().__init__(label, "episodes", total, done, show)
        self._done, self._ran, self._successes, self._crashes = done, 0, 0, 0

    def ended(self, success: bool, crashed: bool) -> None:
        """One more episode ended; a crashed one has no outcome and is not done."""
        self._done += not crashed
        self._ran += not crashed
        self._successes += success
        self._crashes += crashed
        crashes = f", {self._crashes} crashed" if self._crashes else ""
        self.advance(self._done, f"{self._successes}/{self._ran} succeeded{crashes}")
