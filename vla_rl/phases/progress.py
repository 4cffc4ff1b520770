"""Progress of a training phase."""

from __future__ import annotations

from vla_rl.telemetry.progress import CountProgress


class UpdateProgress(CountProgress):
    """Counts updates; a context manager."""

    def __init__(self, label: str, total: int, done: int, show: bool) -> None:
        super().__init__(label, "updates", total, done, show)
