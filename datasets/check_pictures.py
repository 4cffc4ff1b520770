"""Checks of pictures: repeated ones, and ones that lie upside down or mirrored.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from vla_rl.datasets.check_numbers import states_of
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.findings import Finding
from vla_rl.datasets.orientation import CLEARLY, fits
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST, Episode

MOVED_M = 2e-3
"""Motion between two pictures after which they must differ (m): more than a pixel of any view."""


def repeated(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """Pictures equal to the one before although the arm moved in between: a frame was duplicated, or a gap was filled with it."""
    states_NS = states_of(episode)
    if states_NS is None:
        return
    frames = sorted(episode.frames().items())
    for view in (VIEW_AGENT, VIEW_WRIST):
        again = [
            t
            for (before, earlier), (t, later) in pairwise(frames)
            if np.array_equal(earlier.images[view], later.images[view])
            and np.linalg.norm(states_NS[t, :3] - states_NS[before, :3]) > MOVED_M
        ]
        if again:
            text = (
                f"view {view!r}: {len(again)} pictures equal the one before them although the arm moved, first at control step {again[0]}"
            )
            yield Finding("repeated-picture", info.name, text, "re-simulate them: vla-rl replay DATASET --fill-into FOLDER")


class OrientationVotes:
    """How the first pictures of all episodes lie."""

    def __init__(self) -> None:
        self._wrong: list[tuple[EpisodeInfo, str, float, float]] = []
        self._unknown: Counter[str] = Counter()

    def add(self, info: EpisodeInfo, episode: Episode) -> None:
        """Take up one episode."""
        frames = episode.frames()
        scores = fits(info.spec.suite, frames[min(frames)].images, info.conventions.orientation) if frames else None
        if scores is None:
            self._unknown[info.spec.suite] += 1
            return
        best = max(scores, key=lambda name: scores[name])
        if scores[best] - scores["as declared"] > CLEARLY:
            self._wrong.append((info, best, scores[best], scores["as declared"]))

    def findings(self) -> Iterator[Finding]:
        """One for each episode whose pictures fit its suite better when they are turned."""
        for info, best, found, declared in self._wrong:
            text = f"pictures look {best}: {found:.2f} fit of {info.spec.suite}'s scenes so, {declared:.2f} as declared "
            text += f"({info.conventions.orientation.value})"
            yield Finding("rotated-pictures", info.name, text, "declare the true orientation, or leave the episode out")
        for suite, count in self._unknown.items():
            text = f"orientation of {count} episodes cannot be told: no reference pictures of suite {suite!r}"
            yield Finding("rotated-pictures", suite, text, "look at the page of vla-rl data inspect", level="note")
