"""A session with people: environments in real time, pages that show and command them, and takes that become episodes.

    page ── messages ──► inbox ──► Session.obey (before every look of the loop) ──► Control
    loop ── pictures, state ──► server ──► pages
    loop ── finished takes ──► TakeWriter (pictures filled in, files, rows) ──► cards on the pages

The control loop is `rollout.run_episodes`, as everywhere; people reach it only through the inbox.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from vla_rl.collection.browser.messages import Command, Finish, Forget, Gripper, Message, Push, Seen
from vla_rl.collection.browser.server import PageServer, require_port
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control, Driver, Refused
from vla_rl.collection.corrected import acting_policy
from vla_rl.collection.devices.base import Device, Event
from vla_rl.collection.devices.browser import BrowserDevice
from vla_rl.collection.devices.lerobot_teleoperator import open_teleoperator
from vla_rl.collection.devices.spacemouse import open_spacemouse
from vla_rl.collection.journal import Journal
from vla_rl.collection.operated_actor import OperatedActor, TakeLog
from vla_rl.collection.operators import PageOperator
from vla_rl.collection.plan import provenance_of
from vla_rl.collection.recorder import Recorder
from vla_rl.collection.session_state import Board
from vla_rl.collection.takes import PoolEnv, TakeSource, TakeWriter, chunks_of, counts
from vla_rl.collection.watched_pool import EnvMeter, WatchedPool
from vla_rl.datasets.collected import Store
from vla_rl.episode import Episode, EpisodeSpec, Outcome
from vla_rl.eval.results import EpisodeRow
from vla_rl.rollout import POLL_S, look_of, run_episodes
from vla_rl.sim.pool import MakeEnv, make_pool
from vla_rl.telemetry.run_directory import RunDirectory

OUTCOMES = {Event.SUCCESS: Outcome.SUCCESS, Event.FAILURE: Outcome.FAILURE, Event.DISCARD: Outcome.DISCARDED}


@dataclass(frozen=True)
class Joined:
    """A person opened the page, or came back."""

    operator: str


@dataclass(frozen=True)
class Left:
    """A page was closed."""

    operator: str


Said = Joined | Left | Message
Answer = Callable[[str], None]
"""Tells a person why a command was refused."""


class Session:
    """What people command and what becomes of it. All methods but `say` belong to the thread of the loop."""

    def __init__(self, config: CollectConfig, numbers: Mapping[str, int], source: TakeSource, control: Control, board: Board) -> None:
        assert isinstance(config.operator, PageOperator)
        self.config, self.operator = config, config.operator
        self.devices: dict[str, Device] = {}
        self.closing = False
        self._numbers, self._source, self._control, self._board = numbers, source, control, board
        self._inbox: queue.SimpleQueue[tuple[str, Said, Answer]] = queue.SimpleQueue()
        self._finished: dict[str, tuple[Episode, TakeLog]] = {}
        """Takes whose verdicts can be undone, one of each operator at the most."""
        self._local: Device | None = self._open_local_device()

    def attach(self, actor: OperatedActor, writer: TakeWriter, meters: Sequence[EnvMeter]) -> None:
        """What commands act on, and the meters of the pool."""
        self._actor, self._writer, self._meters = actor, writer, meters
        self._takes = [meter.take for meter in meters]

    def say(self, operator: str, said: Said, answer: Answer) -> None:
        """Something came from a page; from any thread."""
        self._inbox.put((operator, said, answer))
        self._actor.alarm.ring()

    def obey(self) -> None:
        """Carry out what has come, in order; then let time pass for absent operators."""
        self._notice_new_takes()
        while True:
            try:
                operator, said, answer = self._inbox.get_nowait()
            except queue.Empty:
                break
            try:
                self._carry_out(operator, said)
            except Refused as refusal:
                answer(str(refusal))
            self._board.changed |= not isinstance(said, Push | Seen)
        self._hear_local_device()
        self._heed_trouble()
        self._control.expire(time.perf_counter())
        self._board.publish(self._control, self._actor, self._writer.waiting)

    def ended(self, episode: Episode, log: TakeLog) -> None:
        """A take is over: remember it for an undo, and have it written if it counts."""
        self._board.ended(log.env, episode)
        # A take that succeeded just when its scene's earlier take came back is given up.
        given_up = self._writer.keeps(episode) and self._source.holds(episode.spec)
        if given_up or not counts(episode):
            return
        logged = replace(episode, provenance={**episode.provenance, **_log_values(log)})
        self._finished = {
            take: (kept, its_log)
            for take, (kept, its_log) in {**self._finished, log.take: (episode, log)}.items()
            if self._control.can_be_undone(take) and (take == log.take or kept.spec != episode.spec)
        }
        self._writer.write(self._numbers[episode.spec.key], logged, provenance_of(self.config, episode.spec))

    def _carry_out(self, operator: str, said: Said) -> None:
        device = self.devices.get(operator)
        match said:
            case Joined():
                self.devices.setdefault(operator, self._local or BrowserDevice(self.operator.shaping))
                self._control.join(operator)
            case Left():
                self._control.leave(operator, time.perf_counter())
            case Push() if isinstance(device, BrowserDevice):
                device.push(said.raw, _seconds(said.pressed_ms))
            case Gripper() if isinstance(device, BrowserDevice):
                device.toggle_gripper(_seconds(said.pressed_ms))
            case Seen() if isinstance(device, BrowserDevice):
                if said.env < len(self._takes) and said.take == self._takes[said.env]:
                    device.saw(said.env, said.step)
            case Command():
                self._command(operator, said.event, said.env)
            case Forget():
                self._forget(said.number)
            case Finish():
                self.finish()
            case _:  # a device at this machine moves the arm: the page's keys do not
                return

    def _heed_trouble(self) -> None:
        """While nothing can be written, running takes go on and no new one begins."""
        trouble = self._writer.trouble
        self._source.paused = bool(trouble)
        if bool(self._board.trouble) != bool(trouble):
            with suppress(OSError):  # what the terminal is told may itself go to a file on the full disk
                print(f"vla-rl collect: {trouble or 'there is room again; recording goes on'}", file=sys.stderr, flush=True)
            self._board.trouble, self._board.changed = trouble, True

    def _notice_new_takes(self) -> None:
        """Pictures of the take before say nothing about this one."""
        for env, meter in enumerate(self._meters):
            if meter.take != self._takes[env]:
                self._takes[env] = meter.take
                for device in self.devices.values():
                    if isinstance(device, BrowserDevice):
                        device.forget(env)

    def _command(self, operator: str, event: Event, env: int) -> None:
        match event:
            case Event.CONTROL:
                self._command(operator, Event.HAND_BACK if self._control.drives(env, operator) else Event.TAKE_OVER, env)
            case Event.TAKE_OVER:
                self._require_free_hand(operator, env)
                self._control.take_over(env, operator)
            case Event.HAND_BACK:
                self._control.hand_back(env, operator)
            case Event.NEXT:
                self._control.skip(env, operator)
            case Event.UNDO:
                self._undo(operator)
            case _:
                self._control.judge(env, operator, OUTCOMES[event])

    def finish(self) -> None:
        """End the session: running takes are given up, finished ones are written."""
        self.closing = True
        self._source.close()
        self._control.close()

    def require_writer(self) -> None:
        """Raise what ended the writer, once no take runs that would be lost by it."""
        self._writer.raise_failure()

    def _require_free_hand(self, operator: str, env: int) -> None:
        shared = self._local is not None  # the device of this machine is the hand of everybody
        for other, state in enumerate(self._control.envs):
            if other != env and state.driver is Driver.OPERATOR and (shared or state.holder == operator):
                who = "you are" if state.holder == operator else f"{state.holder} is"
                raise Refused(f"{who} driving env {other}; hand it back first, one hand drives one arm")

    def _undo(self, operator: str) -> None:
        env, take = self._control.last_judged(operator)
        if self._control.envs[env].take == take:  # it has not ended yet, and goes on
            self._control.undo(operator)
            return
        if take not in self._finished:
            raise Refused("the scene of that take has been shown again since, so the take cannot go on")
        spec = self._finished[take][0].spec
        elsewhere = [other for other, _ in enumerate(self._control.envs) if other != env and self._actor.spec_of(other) == spec]
        if elsewhere:
            raise Refused(f"the scene of that take is being shown again in env {elsewhere[0]}, so the take cannot go on")
        self._control.undo(operator)
        episode, log = self._finished.pop(take)
        self._writer.remove(self._numbers[episode.spec.key], discarded=False)
        self._actor.resume(episode.spec, chunks_of(episode), log)
        self._source.resume(episode.spec)

    def _forget(self, number: int) -> None:
        spec = self._board.spec_of(number)
        if spec is None:
            raise Refused(f"episode {number} is not recorded, so it cannot be discarded")
        if self._source.holds(spec):
            raise Refused(f"episode {number} was taken back already; its scene is shown again")
        self._writer.remove(number, discarded=True)
        self._source.later(spec)

    def _open_local_device(self) -> Device | None:
        if self.operator.device == "spacemouse":
            return open_spacemouse(self.operator.shaping)
        if self.operator.device == "lerobot":
            return open_teleoperator(self.operator.teleoperator, {}, self.operator.shaping, rate_hz=60.0)
        return None

    def _hear_local_device(self) -> None:
        """Buttons of a device at this machine count for the person who drives, or for env 0 and whoever came first and is here."""
        if self._local is None:
            return
        for event in self._local.events():
            here = [name for name in self.devices if name in self._control.present]
            held = [(env, state.holder) for env, state in enumerate(self._control.envs) if state.holder in here]
            held.sort(key=lambda place: self._control.driver(place[0]) is not Driver.OPERATOR)
            if not here:
                continue
            env, operator = held[0] if held else (0, here[0])
            try:
                self._command(operator, event, env)
            except Refused as refusal:
                self._board.note(str(refusal))

    def close_device(self) -> None:
        """Let the device at this machine go, which is nobody's until somebody opens the page."""
        if self._local is not None:
            self._local.close()


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _log_values(log: TakeLog) -> dict[str, Any]:
    """What an episode's provenance keeps: JSON values."""
    periods = sorted(log.periods_s)
    rate = {} if not periods else {"mean_s": sum(periods) / len(periods), "p95_s": periods[int(0.95 * (len(periods) - 1))]}
    return {"operators": log.operators, "seen_step": log.seen_step, "control_period": rate, "latency_s": log.latency_s}


def record_session(
    config: CollectConfig, run: RunDirectory, store: Store, specs: Sequence[EpisodeSpec], missing: Sequence[int], make_env: MakeEnv
) -> list[EpisodeRow]:
    """Open the page and record what people show until everything is there or somebody finishes; the rows of this start.

    Raises what `run_episodes` raises, DatasetError and StorageError for what cannot be written, PortTaken.
    """
    operator = config.operator
    assert isinstance(operator, PageOperator)
    require_port(operator)
    numbers = {spec.key: number for number, spec in enumerate(specs)}
    journal = Journal(run.path / "unfinished")
    unfinished = [number for number in journal.numbers() if number in set(missing)]
    to_show = [number for number in missing if number not in unfinished]
    source = TakeSource([specs[number] for number in to_show], again_after_failure=not config.keep_failures)
    control = Control(config.pool.workers, config.checkpoint is not None, operator.absence)
    with ExitStack() as stack:
        board = Board(config, specs, store, run.episodes_file, set(range(len(specs))) - set(missing))
        session = Session(config, numbers, source, control, board)
        stack.callback(session.close_device)
        server = PageServer(session.say, board, operator, Joined, Left)
        print(f"Starting the simulator ({2 * config.pool.workers} processes) ...", flush=True)
        pool = make_pool(config.pool, config.env, make_env)
        mirrors = make_pool(config.pool, replace(config.env, resolution=operator.resolution), make_env)
        watched = stack.enter_context(closing(WatchedPool(pool, mirrors, operator.views, server.show)))
        board.conventions = pool.spec.conventions
        recorder = Recorder(store, run.episodes_file, pool.spec, config.frame_every, config.keep_failures)
        filler = replace(config.pool, backend="process", workers=1)  # it is called from the writer's thread: no GL context of this one
        writer = TakeWriter(recorder, journal, lambda: PoolEnv(make_pool(filler, config.env, make_env)), board.written, board.forget)
        stack.callback(writer.close)
        stack.callback(lambda: print(f"Writing what was recorded last ({writer.waiting} left) ...", flush=True) if writer.waiting else None)
        for number in unfinished:
            writer.write(number, journal.load(number), provenance_of(config, specs[number]))
        period_s = 1.0 / pool.spec.conventions.control_rate_hz
        actor = OperatedActor(
            control, acting_policy(config), session.devices, period_s, watched.meters, watched.preempt, session.obey, operator.idle_steps
        )
        stack.enter_context(closing(actor))
        session.attach(actor, writer, watched.meters)
        stack.enter_context(server.serving())
        _play(session, watched, actor, source)
    return writer.rows


def _play(session: Session, watched: WatchedPool, actor: OperatedActor, source: TakeSource) -> None:
    """Takes until the session is finished; when every scene is recorded it stays open, for a last undo or discard."""
    look = look_of(actor.needs, record_states=True)
    while True:
        for episode in run_episodes(watched, actor, source, lambda spec: look):
            session.ended(episode, actor.logs.pop(episode.spec.key))
        while not session.closing and not source.waiting:
            wait([actor.alarm.waitable], POLL_S)  # takes are still being written, and people may be absent for too long
            actor.alarm.silence()
            session.obey()
            session.require_writer()
        if session.closing:
            return
