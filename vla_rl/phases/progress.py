"""Progress of a training phase on standard error: a bar with a time estimate on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_LINES = 20
"""Lines that a log (no terminal) gets over a whole phase."""
ESTIMATE_WINDOW_S = 120.0
"""Span of time whose pace the bar's estimate uses."""


class UpdateProgress:
    """Counts updates; a context manager."""

    def __init__(self, label: str, total: int, done: int, show: bool) -> None:
        self._label, self._total, self._resumed, self._show = label, total, done, show
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> UpdateProgress:
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
        """`done` updates are complete; `text` says how it goes (`loss 0.123`)."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=f"{self._label}: {text}")
        elif self._show and (done % max(1, self._total // LOG_LINES) == 0 or done == self._total):
            print(
                f"{self._label}: {done} of {self._total} updates, {text}, about {self._remaining_s(done):.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def _remaining_s(self, done: int) -> float:
        return (time.monotonic() - self._started) / max(1, done - self._resumed) * (self._total - done)
