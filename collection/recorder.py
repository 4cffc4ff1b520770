"""From finished episodes to files: what is kept, what is only counted, and pictures that were not rendered live.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.datasets.collected import Store
from vla_rl.datasets.files import require_room, storage_error
from vla_rl.episode import ChunkStep, Episode, Observation, Outcome
from vla_rl.errors import UserError
from vla_rl.eval.results import EpisodeRow, row_of
from vla_rl.sim.base import ChunkReply, Env, EnvSpec, Look, ResetReply
from vla_rl.telemetry.files import append_jsonl


class ReplayMismatch(UserError):
    """An episode that does not happen again bit for bit."""


@dataclass(frozen=True)
class Recorder:
    """Writes episodes into a store and a row for each of them, kept or not, into `episodes.jsonl`."""

    store: Store
    log: Path
    """`episodes.jsonl`: rows of `eval.results.EpisodeRow`, with `number`, `kept` and `bytes`."""
    env: EnvSpec
    """Where the episodes come from; its conventions and versions go into every file."""
    frame_every: int
    """Pictures before control steps 0, k, 2k, ...; see `datasets/schema.py`."""
    keep_failures: bool = False
    """Also write episodes that reached no goal."""

    def keeps(self, episode: Episode) -> bool:
        """Whether the episode is written: successes, failures if asked for, never a crash or a discarded take."""
        wanted = (Outcome.SUCCESS, Outcome.FAILURE) if self.keep_failures else (Outcome.SUCCESS,)
        return bool(episode.steps) and episode.outcome in wanted

    def record(self, number: int, episode: Episode, provenance: Mapping[str, Any]) -> tuple[EpisodeRow, int]:
        """Write the episode as `number` if it is kept, then append its row. Returns the row and the bytes written.

        provenance: JSON values about actor and task that join the episode's own. Raises DatasetError, and StorageError when it
        cannot be written; the same call again is then right.
        """
        kept = self.keeps(episode)
        size = self.store.write(number, self._with_provenance(episode, provenance), self.frame_every) if kept else 0
        row = row_of(episode, condition="collect")
        try:
            append_jsonl(self.log, {**asdict(row), "number": number, "kept": kept, "bytes": size})
        except OSError as error:
            raise storage_error(self.log, 0, error) from error
        return row, size

    def require_room(self, episode_bytes: int) -> None:
        """Raise StorageError when the disk is about to be full; everything recorded is then on it."""
        require_room(self.log.parent, episode_bytes)

    def _with_provenance(self, episode: Episode, more: Mapping[str, Any]) -> Episode:
        """Everything but wall times, so that an episode's file does not depend on how fast it ran."""
        own = {name: value for name, value in episode.provenance.items() if name != "reset_s"}
        env = {"conventions": self.env.conventions.to_dict(), "env": {"kind": self.env.kind, **self.env.provenance}}
        return replace(episode, provenance={**env, **more, **own})


def fill_frames(episode: Episode, env: Env, frame_every: int = 1) -> Episode:
    """The same episode with pictures before every `frame_every`-th action and all states, by executing its actions once more.

    Nothing is repeated or interpolated: the pictures are those that a recorder would have taken live. Raises ReplayMismatch
    naming spec, control step and quantity if anything that was recorded comes out different by a single bit.
    """
    look = Look(record_every=frame_every, record_states=True)
    _require_same_start(episode, env.reset(episode.spec, look))
    steps, control_step = [], 0
    for step in episode.steps:
        reply = env.step_chunk(step.executed_EA)
        _require_same_chunk(episode, step, reply, control_step)
        steps.append(replace(step, frames=dict(reply.frames), sim_states_ED=reply.sim_states_ED, robot_states_ER=reply.robot_states_ER))
        control_step += len(step.executed_EA)
    return replace(episode, steps=steps)


def _require_same_start(episode: Episode, reply: ResetReply) -> None:
    recorded, now = (provenance.get("initial_state_sha256") for provenance in (episode.provenance, reply.provenance))
    if recorded is not None and recorded != now:
        raise _mismatch(episode, 0, "initial state", f"sha256 {str(recorded)[:12]} recorded, {str(now)[:12]} now")
    if episode.steps:
        _require_equal(episode, 0, "observation.state", episode.steps[0].observation.state, reply.observation.state)


def _require_same_chunk(episode: Episode, step: ChunkStep, reply: ChunkReply, start: int) -> None:
    """Compare everything that was recorded of a chunk."""
    _require_equal(episode, start, "executed actions", step.executed_EA, reply.executed_EA)
    _require_equal(episode, start, "rewards", step.reward_E, reply.reward_E)
    for name in ("success", "terminated", "truncated"):
        if getattr(step, name) != getattr(reply, name):
            raise _mismatch(episode, start, name, f"{getattr(step, name)} recorded, {getattr(reply, name)} now")
    if step.sim_states_ED is not None and reply.sim_states_ED is not None:
        _require_equal(episode, start, "simulator states", step.sim_states_ED, reply.sim_states_ED)
    if step.robot_states_ER is not None and reply.robot_states_ER is not None:
        _require_equal(episode, start, "robot states", step.robot_states_ER, reply.robot_states_ER)
    for t, frame in step.frames.items():
        if t in reply.frames:
            _require_same_observation(episode, t, frame, reply.frames[t])


def _require_same_observation(episode: Episode, t: int, recorded: Observation, now: Observation) -> None:
    _require_equal(episode, t, "observation.state", recorded.state, now.state)
    for view, picture in recorded.images.items():
        _require_equal(episode, t, f"picture {view!r}", picture, now.images[view])


def _require_equal(episode: Episode, t: int, what: str, recorded: np.ndarray, now: np.ndarray) -> None:
    if recorded.shape != now.shape:
        raise _mismatch(episode, t, what, f"shape {recorded.shape} recorded, {now.shape} now")
    if not np.array_equal(recorded, now):
        difference = np.abs(recorded.astype(np.float64) - now.astype(np.float64)).max()
        raise _mismatch(episode, t, what, f"they differ by up to {difference:.3g}")


def _mismatch(episode: Episode, t: int, what: str, how: str) -> ReplayMismatch:
    return ReplayMismatch(
        f"{episode.spec.key}: re-simulation is not the recorded episode: {what} from control step {t}: {how}. "
        f"It was recorded with {episode.provenance.get('env', 'an unrecorded environment')}; use the same versions and renderer."
    )
