"""How much a process has got done, as a number that grows: who watches it from outside sees whether it gets on."""

from __future__ import annotations

_marks = 0


def mark_progress() -> None:
    """Something began or ended: a call, a span, a micro-batch. Safe from any thread: what two at once do counts at least once."""
    global _marks
    _marks += 1


def progress_marks() -> int:
    """How often this process has called `mark_progress`."""
    return _marks
