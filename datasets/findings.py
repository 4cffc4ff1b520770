"""What a check of a dataset found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal[
    "misaligned-actions",
    "no-ops-only",
    "repeated-picture",
    "missing-picture",
    "gripper-sign",
    "gripper-range",
    "rotated-pictures",
    "not-finite",
    "timestamps",
    "statistics",
    "task-without-text",
    "dropped-tail",
    "unreadable",
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that could not be decided."""

    name: Name
    """Which kind."""
    where: str
    """The episode or file."""
    text: str
    """What was found, with numbers."""
    remedy: str
    """What to do about it."""
    level: Literal["fault", "note"] = "fault"
    """A note is something that could not be decided."""
