"""Progress of an evaluation on standard error: a bar with a time estimate on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vla_rl.eval.results import EpisodeRow

LOG_LINES = 10
"""Lines that a log (no terminal) gets over a whole evaluation."""


class EpisodeProgress:
    """Counts episodes and their successes; a context manager."""

    def __init__(self, label: str, planned: int, done: int, show: bool) -> None:
        self._label, self._planned, self._resumed, self._show = label, planned, done, show
        self._done, self._successes, self._crashes = done, 0, 0
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> EpisodeProgress:
        console = Console(stderr=True)
        if self._show and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(self._label, total=self._planned, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, row: EpisodeRow) -> None:
        """One more episode ended."""
        self._done += not row.crashed
        self._crashes += row.crashed
        self._successes += row.success
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif self._show and self._done % max(1, self._planned // LOG_LINES) == 0:
            place = f"{self._done} of {self._planned} episodes, about {self._remaining_s():.0f} s left"
            print(f"{self._text()}, {place}", file=sys.stderr, flush=True)

    def _text(self) -> str:
        ran = self._done - self._resumed
        crashes = f", {self._crashes} crashed" if self._crashes else ""
        return f"{self._label}: {self._successes}/{ran} succeeded{crashes}"

    def _remaining_s(self) -> float:
        """Time that the rest takes at the pace so far."""
        ran = self._done - self._resumed
        return (time.monotonic() - self._started) / max(1, ran) * (self._planned - self._done)
