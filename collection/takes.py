"""The takes of a session: which scene comes next, and how a finished take becomes an episode file.

Pictures are filled in by exact re-simulation in a worker of its own, so that neither control nor the next take waits for them.
Until a take's file is written, what it did is kept in `unfinished/`, so that a killed session loses at most the running take.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_rl.collection.control import BY_OPERATOR, CLOSED, SKIPPED, UNDONE
from vla_rl.collection.journal import Journal
from vla_rl.collection.recorder import Recorder, fill_frames
from vla_rl.datasets.schema import StorageError
from vla_rl.episode import ActionChunk, Episode, EpisodeSpec, Float32, Outcome, UInt8
from vla_rl.errors import UserError
from vla_rl.eval.results import EpisodeRow
from vla_rl.sim.base import ChunkReply, EnvFault, EnvPool, EnvReply, EnvSpec, Look, ResetReply
from vla_rl.telemetry.files import read_jsonl, write_text

RETRY_S = 2.0
"""Between two tries to write on a full disk (s)."""


class TakeSource:
    """A `SpecSource` of scenes that a person records: what is discarded comes again, what is skipped or fails comes later."""

    def __init__(self, specs: Iterable[EpisodeSpec], again_after_failure: bool) -> None:
        self.paused = False
        """No new scene begins; a take that was undone may go on."""
        self._queue = deque(specs)
        self._again_after_failure = again_after_failure
        self._running: list[EpisodeSpec] = []
        self._resumed: list[EpisodeSpec] = []
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether there are scenes to come."""
        return not self._closed and (bool(self._resumed) or (bool(self._queue) and not self.paused))

    def next(self) -> EpisodeSpec | None:
        """See `SpecSource.next`."""
        if self._closed:
            return None
        spec = next((spec for spec in self._resumed if spec not in self._running), None)
        if spec is not None:
            self._resumed.remove(spec)
        elif self._queue and not self.paused:
            spec = self._queue.popleft()
        if spec is not None:
            self._running.append(spec)
        return spec

    def report(self, episode: Episode) -> None:
        """See `SpecSource.report`."""
        spec = episode.spec
        self._running.remove(spec)
        if spec in self._resumed:  # however this one ended, it is given up for the take that comes back
            return
        if episode.outcome is Outcome.DISCARDED:
            if episode.reason == SKIPPED:
                self._queue.append(spec)
            elif episode.reason != CLOSED:
                self._queue.appendleft(spec)
        elif episode.outcome is Outcome.FAILURE and self._again_after_failure:
            self._queue.append(spec)

    def resume(self, spec: EpisodeSpec) -> None:
        """The take of this scene goes on: it comes before every new scene, when it does not run already."""
        if spec in self._queue:
            self._queue.remove(spec)
        self._resumed.append(spec)

    def later(self, spec: EpisodeSpec) -> None:
        """Show this scene after all others."""
        self._queue.append(spec)

    def holds(self, spec: EpisodeSpec) -> bool:
        """Whether this scene runs or is still to come."""
        return spec in self._running or spec in self._resumed or spec in self._queue

    def close(self) -> None:
        """Hand out no more scenes."""
        self._closed = True


def counts(episode: Episode) -> bool:
    """Whether a take is worth a row: not one that was given up without a word about how it went."""
    return not (episode.outcome is Outcome.DISCARDED and episode.reason in (SKIPPED, UNDONE, CLOSED))


def chunks_of(episode: Episode) -> list[ActionChunk]:
    """What a take executed, to be executed again, chunk by chunk."""
    plain = {"finished": False, "verdict": None, "continues": False, "views": ()}
    return [replace(step.proposed, actions_CA=step.executed_EA, labels_CA=step.labels_EA, **plain) for step in episode.steps]


class FillFault(UserError):
    """The worker that fills in pictures failed."""


class PoolEnv:
    """The one env of a pool as an `Env`: calls wait for their replies. For threads other than the one that runs the session."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool
        self.spec: EnvSpec = pool.spec

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        """See `Env.reset`. Raises FillFault with the worker's text if it fails."""
        self._pool.reset(0, spec, look)
        reply = self._reply()
        assert isinstance(reply, ResetReply)
        return reply

    def step_chunk(self, actions_CA: Float32, views: tuple[str, ...] | None = None) -> ChunkReply:
        """See `Env.step_chunk`."""
        self._pool.step(0, ActionChunk(actions_CA, views=views))
        reply = self._reply()
        assert isinstance(reply, ChunkReply)
        return reply

    def close(self) -> None:
        """Stop the worker."""
        self._pool.close()

    def _reply(self) -> EnvReply:
        replies: list[EnvReply] = []
        while not replies:
            replies = self._pool.ready(1.0)
        if isinstance(replies[0], EnvFault):
            raise FillFault(
                f"the worker that fills in pictures {replies[0].kind}: {replies[0].message}\n"
                "What was shown is kept in unfinished/; the same command again writes it."
            )
        return replies[0]


@dataclass(frozen=True)
class Written:
    """A take that has become a row, and a file if it is kept."""

    number: int
    spec: EpisodeSpec
    row: EpisodeRow
    kept: bool
    film: list[UInt8]
    """Pictures of the first view, in time order, for a thumbnail and for playing it back."""


class TakeWriter:
    """A thread that fills in pictures and writes, in the order of what it is told.

    What a person showed cannot be had again, so a full disk ends nothing: the writer says so in `trouble` and tries again until there
    is room, or until it is closed.
    """

    def __init__(
        self,
        recorder: Recorder,
        journal: Journal,
        make_env: Callable[[], PoolEnv],
        on_written: Callable[[Written], None],
        on_removed: Callable[[int], None],
    ) -> None:
        self._recorder, self._journal, self._make_env = recorder, journal, make_env
        self._on_written, self._on_removed = on_written, on_removed
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._env: PoolEnv | None = None
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._waiting = 0
        self._largest = 0
        self._journaled: dict[int, Episode] = {}
        """Whose takes the journal keeps: of a scene that was undone and shown again, the newer one."""
        self._journal_lock = threading.Lock()
        self.rows: list[EpisodeRow] = []
        self.trouble = ""
        """Why nothing new should be shown now: the disk is full or about to be, or writing has failed; empty: all is well."""
        self._thread = threading.Thread(target=self._run, name="take writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Takes that are not written yet."""
        return self._waiting

    def keeps(self, episode: Episode) -> bool:
        """See `Recorder.keeps`."""
        return self._recorder.keeps(episode)

    def write(self, number: int, episode: Episode, provenance: dict[str, Any]) -> None:
        """Write a take as episode `number` when those before it are done; from now on it survives whatever happens to this process.

        On a full disk it survives as long as this process does. Raises what writing an earlier one raised.
        """
        if self.keeps(episode):
            try:
                with self._journal_lock:
                    self._journaled[number] = episode
                    self._journal.keep(number, episode)
            except StorageError as error:
                self.trouble = str(error)
        self._submit(lambda: self._write(number, episode, provenance))

    def remove(self, number: int, discarded: bool) -> None:
        """Take back episode `number`: its file goes; its row too, or it stays as a discarded one."""
        with self._journal_lock:
            self._journaled.pop(number, None)
            self._journal.drop(number)
        self._submit(lambda: self._remove(number, discarded))

    def close(self) -> None:
        """Wait until everything is written. Raises what writing raised: on a full disk StorageError, after a last try."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()
        if self._env is not None:
            self._env.close()
        self.raise_failure()

    def _submit(self, job: Callable[[], None]) -> None:
        self.raise_failure()
        self._waiting += 1
        self._jobs.put(job)

    def raise_failure(self) -> None:
        """Raise what writing raised."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=RETRY_S if self.trouble else None)
            except queue.Empty:
                self._look_for_room()
                continue
            if job is None:
                return
            if self._failure is None:
                try:
                    job()
                    self._look_for_room()
                except BaseException as error:  # noqa: BLE001 - the thread's boundary: the session raises it
                    self._failure, self.trouble = error, str(error)
            self._waiting -= 1

    def _look_for_room(self) -> None:
        if self._failure is not None:
            return
        try:
            self._recorder.require_room(self._largest)
            self.trouble = ""
        except StorageError as error:
            self.trouble = str(error)

    def _remove(self, number: int, discarded: bool) -> None:
        remove_take(self._recorder, number, discarded)
        self._on_removed(number)

    def _write(self, number: int, episode: Episode, provenance: dict[str, Any]) -> None:
        kept, filled = self._recorder.keeps(episode), episode
        if kept:
            if self._env is None:
                self._env = self._make_env()
            filled = fill_frames(episode, self._env, self._recorder.frame_every)
        row, size = self._record(number, filled, provenance)
        self._largest = max(self._largest, size)
        with self._journal_lock:
            if self._journaled.get(number) is episode:
                del self._journaled[number]
                self._journal.drop(number)
        self.rows.append(row)
        self._on_written(Written(number, episode.spec, row, kept, film_of(filled)))

    def _record(self, number: int, episode: Episode, provenance: dict[str, Any]) -> tuple[EpisodeRow, int]:
        """Write, as often as it takes."""
        while True:
            last_try = self._closing.is_set()
            try:
                return self._recorder.record(number, episode, provenance)
            except StorageError as error:
                if last_try:
                    raise
                self.trouble = str(error)
            self._closing.wait(RETRY_S)


def film_of(episode: Episode) -> list[UInt8]:
    """The pictures of the first view that a filled episode has, in time order."""
    frames = [frame for _, frame in sorted(episode.frames().items())]
    if episode.final_observation is not None:
        frames.append(episode.final_observation)
    return [np.asarray(next(iter(frame.images.values()))) for frame in frames if frame.images]


def remove_take(recorder: Recorder, number: int, discarded: bool) -> None:
    """Delete the file of episode `number`; its newest row goes too, or says that a person discarded it."""
    recorder.store.remove(number)
    rows = read_jsonl(recorder.log)
    newest = max((place for place, row in enumerate(rows) if row["number"] == number), default=None)
    if newest is None:
        return
    row = rows.pop(newest)
    if discarded:
        changed = {"outcome": Outcome.DISCARDED.value, "reason": BY_OPERATOR, "success": False, "kept": False, "bytes": 0}
        rows.insert(newest, row | changed)
    write_text(recorder.log, "".join(json.dumps(row) + "\n" for row in rows))
