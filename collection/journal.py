"""Takes that have ended and are not written yet, on the disk: a killed session loses at most the running take.

    unfinished/000012.npz    what episode 12 executed, without pictures; removed when the episode is written

Only plain arrays and JSON are stored, nothing that is unpickled.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.datasets import schema
from vla_rl.datasets.episode_rows import Ending, EpisodeRows, build_steps, chunk_columns, prompt_of, rows_of
from vla_rl.datasets.files import write_bytes
from vla_rl.episode import Episode, EpisodeSpec, Observation, Outcome

_NAME = re.compile(r"(\d{6,})\.npz")


@dataclass(frozen=True)
class Journal:
    """A folder of unfinished takes."""

    folder: Path

    def keep(self, number: int, episode: Episode) -> None:
        """Put a take on the disk, whole or not at all. Raises DatasetError without recorded states, StorageError on a full disk."""
        lengths_T, versions_T = chunk_columns(episode)
        arrays: dict[str, np.ndarray] = {
            "executed_NA": episode.actions_NA(),
            "labels_NA": episode.labels_NA(),
            "reward_N": rows_of(episode, "reward_E"),
            "intervention_N": rows_of(episode, "intervention_E"),
            "sim_states_ND": rows_of(episode, "sim_states_ED"),
            "robot_states_NR": rows_of(episode, "robot_states_ER"),
            "chunk_lengths_T": lengths_T,
            "weights_version_T": versions_T,
        }
        if episode.final_observation is not None:
            arrays["final_state"] = episode.final_observation.state
            arrays |= {f"final_view_{view}": picture for view, picture in episode.final_observation.images.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, about=np.array(json.dumps(_about(episode))), **arrays)  # type: ignore[arg-type]
        write_bytes(self._path(number), buffer.getvalue())

    def numbers(self) -> list[int]:
        """Episodes that are kept here, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("*.npz"))
        return sorted(int(match[1]) for match in matches if match)

    def load(self, number: int) -> Episode:
        """A kept take, without pictures but the last observation's."""
        with np.load(self._path(number), allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("about")))
        views = {name.removeprefix("final_view_"): arrays.pop(name) for name in list(arrays) if name.startswith("final_view_")}
        final_state = arrays.pop("final_state", None)
        observed_NS = schema.observed_states(schema.robot_observations(arrays["robot_states_NR"]))
        rows = EpisodeRows(observed_NS=observed_NS, **arrays)
        return Episode(
            spec=EpisodeSpec.from_dict(about["spec"]),
            steps=build_steps(rows, {}, about["prompt"], Ending(*about["ending"])),
            final_observation=None if final_state is None else Observation(views, final_state, about["prompt"]),
            outcome=Outcome(about["outcome"]),
            reason=about["reason"],
            provenance=about["provenance"],
            wall_s=about["wall_s"],
        )

    def drop(self, number: int) -> None:
        """The take is written, or taken back."""
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"


def _about(episode: Episode) -> dict[str, Any]:
    last = episode.steps[-1]
    return {
        "spec": episode.spec.to_dict(),
        "prompt": prompt_of(episode),
        "ending": [last.success, last.terminated, last.truncated],
        "outcome": episode.outcome.value,
        "reason": episode.reason,
        "provenance": dict(episode.provenance),
        "wall_s": episode.wall_s,
    }
