"""Recorded hands: what an operator did, done again, step by step and by the same way.

It is how a dataset gets other pictures (another resolution, denser frames, another format) without anybody showing it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.collection.devices.base import Event, Reading
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.episodes import load_episode
from vla_rl.episode import Bool, EpisodeSpec, Float32, Observation, Outcome


@dataclass
class _Recorded:
    actions_NA: Float32
    labels_NA: Float32
    by_operator_N: Bool
    outcome: Outcome
    position: int = 0


class ReplayHand:
    """A `Device` that plays the episodes of a dataset, found by `EpisodeSpec.key`."""

    def __init__(self, infos: Mapping[str, EpisodeInfo]) -> None:
        self._infos = infos
        self._running: dict[int, _Recorded] = {}

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        """See `Device.take`. Raises KeyError for a scene that is not recorded."""
        episode = load_episode(self._infos[spec.key])
        by_operator_N = np.concatenate([step.intervention_E for step in episode.steps])
        self._running[env] = _Recorded(episode.actions_NA(), episode.labels_NA(), by_operator_N, episode.outcome)

    def read(self, env: int, observation: Observation) -> Reading:
        """See `Device.read`: the next recorded action."""
        recorded, row = self._running[env], self._running[env].position
        recorded.position += 1
        return Reading(recorded.actions_NA[row], recorded.labels_NA[row], by_operator=bool(recorded.by_operator_N[row]))

    def ended(self, env: int) -> Outcome | None:
        """The recorded outcome, when every action of the episode in `env` has been read; None before."""
        recorded = self._running.get(env)
        return recorded.outcome if recorded is not None and recorded.position == len(recorded.actions_NA) else None

    def events(self) -> Sequence[Event]:
        """None: the session asks `ended`."""
        return ()

    def close(self) -> None:
        """Forget all episodes."""
        self._running.clear()
