"""`vla-rl data check`: what is wrong with a dataset, by name and place, before it is trained on.

Each check is a function of one episode, or of all of them, that gives `Finding`s. A fault names what is wrong; a note says what
could not be decided (an arm that never moves tells nothing about alignment). Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.datasets import check_numbers as numbers
from vla_rl.datasets import check_pictures as pictures
from vla_rl.datasets.check_files import file_findings, statistics_findings
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.findings import Finding
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import Episode


@dataclass(frozen=True)
class Report:
    """Everything a check found."""

    episodes: int
    steps: int
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        """What must be mended."""
        return [finding for finding in self.findings if finding.level == "fault"]

    def text(self) -> str:
        """For a person: faults first, equal ones of many episodes together."""
        lines = [f"{self.episodes} episodes, {self.steps} control steps"]
        for level in ("fault", "note"):
            found = [finding for finding in self.findings if finding.level == level]
            for name, count in Counter(finding.name for finding in found).items():
                lines.append(f"{level} {name} ({count})")
                same = [finding for finding in found if finding.name == name]
                lines += [f"  {finding.where}: {finding.text}" for finding in same[:SHOWN]]
                lines += [f"  ... and {count - SHOWN} more"] if count > SHOWN else []
                lines.append(f"  -> {same[0].remedy}")
        return "\n".join(lines if self.findings else [*lines, "nothing is wrong with them"])


SHOWN = 5
"""Findings of one name that are printed."""


def check(paths: Sequence[str | Path]) -> Report:
    """All checks over all episodes of `paths`, one episode in memory at a time."""
    infos = list_episodes(paths)
    findings = [*file_findings(infos), *statistics_findings(infos)]
    broken = {finding.where for finding in findings if finding.level == "fault" and finding.name in ("dropped-tail", "missing-picture")}
    motion = numbers.Motion()
    orientation = pictures.OrientationVotes()
    for info in infos:
        if info.name in broken:
            continue
        try:
            episode = load_episode(info)
        except DatasetError as error:
            findings.append(Finding("unreadable", info.name, str(error), "restore the file, or leave the episode out (data filter)"))
            continue
        findings += episode_findings(info, episode)
        motion.add(info, episode)
        orientation.add(info, episode)
    findings += [*motion.findings(), *orientation.findings()]
    return Report(len(infos), sum(info.num_steps for info in infos), tuple(findings))


def episode_findings(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """The checks of one episode alone."""
    yield from numbers.finite(info, episode)
    yield from numbers.no_ops_only(info, episode)
    yield from numbers.gripper_range(info, episode)
    yield from numbers.simulated_time(info, episode)
    yield from numbers.ends_whole(info, episode)
    yield from pictures.repeated(info, episode)
    if not info.prompt.strip():
        yield Finding("task-without-text", info.name, "its instruction is empty", "a policy cannot be told what to do; record it again")
