"""How pictures lie: an episode's first pictures against what its suite's scenes look like (`scripts/orientation_reference.py`).

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from vla_rl.conventions import Orientation
from vla_rl.datasets.lerobot_format import PUBLISHED_SUITE
from vla_rl.datasets.schema import reorient
from vla_rl.episode import VIEWS, Float32, UInt8

SIZE = 16
"""Height and width of a thumbnail."""
CLEARLY = 0.1
"""By how much another orientation must fit better than the declared one (correlation, -1 to 1) to be named."""
ORIENTATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "as declared": lambda picture: picture,
    "upside down": lambda picture: picture[::-1],
    "mirrored": lambda picture: picture[:, ::-1],
    "turned by 180 degrees": lambda picture: picture[::-1, ::-1],
}


def thumbnail(picture_HWC: UInt8) -> Float32:
    """float32[16, 16], 0 to 255: means of grey blocks. Pictures of fewer pixels are repeated first."""
    repeat = -(-SIZE // min(picture_HWC.shape[:2]))
    grey = np.repeat(np.repeat(picture_HWC.mean(2), repeat, 0), repeat, 1)
    rows, columns = (np.linspace(0, size, SIZE + 1).astype(int) for size in grey.shape)
    sums = np.add.reduceat(np.add.reduceat(grey, rows[:-1], 0), columns[:-1], 1)
    return (sums / np.outer(np.diff(rows), np.diff(columns))).astype(np.float32)


@cache
def references() -> dict[str, Float32]:
    """`SUITE/VIEW` -> thumbnail in raw orientation."""
    with np.load(Path(__file__).parent / "orientation.npz") as stored:
        return dict(stored)


def fits(suite: str, images: Mapping[str, UInt8], declared: Orientation) -> dict[str, float] | None:
    """How well each of `ORIENTATIONS` fits the suite's scenes (mean correlation of both views), None for a suite without reference.

    LIBERO-PRO's variants look like their suite; published data, which does not say its suite, takes the suite that fits best.
    """
    suites = sorted({name.split("/")[0] for name in references()})
    likely = [name for name in suites if suite == name or suite.startswith(f"{name}_")]
    if suite == PUBLISHED_SUITE:
        likely = [name for name in suites if name.startswith("libero_")]
    if not likely or any(view not in images for view in VIEWS):
        return None
    raw = {view: thumbnail(reorient(images[view], declared)) for view in VIEWS}
    return {name: max(_fit(raw, turn, candidate) for candidate in likely) for name, turn in ORIENTATIONS.items()}


def _fit(raw: Mapping[str, Float32], turn: Callable[[np.ndarray], np.ndarray], suite: str) -> float:
    known = references()
    return float(np.mean([np.corrcoef(turn(raw[view]).ravel(), known[f"{suite}/{view}"].ravel())[0, 1] for view in VIEWS]))
