"""What a session makes of commands in orders that people find: undo after the scene was shown again, two undos, a local device."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_rl.collection.browser.messages import Command, Forget
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control, Driver
from vla_rl.collection.devices.base import Event
from vla_rl.collection.operated_actor import TakeLog
from vla_rl.collection.operators import PageOperator
from vla_rl.collection.session import Joined, Left, Session
from vla_rl.collection.takes import TakeSource, TakeWriter
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome
from vla_rl.sim.base import EnvConfig

SPECS = [EpisodeSpec("reach", 0, f"sampled:{seed}", "demonstrations") for seed in range(3)]


class Buttons:
    """A device at this machine; `pressed` is what its buttons have said."""

    def __init__(self) -> None:
        self.pressed: list[Event] = []
        self.closed = False

    def events(self) -> list[Event]:
        pressed, self.pressed = self.pressed, []
        return pressed

    def close(self) -> None:
        self.closed = True


class Table:
    """A session without simulator, page and files: takes begin and end when the test says so."""

    def __init__(
        self, envs: int, policy: bool = False, device: Buttons | None = None, monkeypatch: pytest.MonkeyPatch | None = None
    ) -> None:
        config = CollectConfig(
            "unused",
            suite="reach",
            env=EnvConfig(kind="reach"),
            operator=PageOperator("page", device="spacemouse" if device else "browser"),
        )
        if device is not None and monkeypatch is not None:
            monkeypatch.setattr("vla_rl.collection.session.open_spacemouse", lambda shaping: device)
        self.source = TakeSource(SPECS, again_after_failure=True)
        self.control = Control(envs, policy)
        self.notes: list[str] = []
        board: Any = SimpleNamespace(
            changed=False, trouble="", note=self.notes.append, ended=lambda *a: None, publish=lambda *a: None, spec_of=self._recorded
        )
        self.session = Session(config, {spec.key: number for number, spec in enumerate(SPECS)}, self.source, self.control, board)
        self.written: list[int] = []
        self.removed: list[int] = []
        self.resumed: list[tuple[EpisodeSpec, TakeLog]] = []
        self.running: dict[int, tuple[EpisodeSpec, TakeLog]] = {}
        self.recorded: set[int] = set()
        self._takes = 0
        alarm = SimpleNamespace(ring=lambda: None)
        actor: Any = SimpleNamespace(alarm=alarm, spec_of=lambda env: self.running.get(env, (None,))[0], resume=self._resume)
        writer: Any = SimpleNamespace(
            trouble="", waiting=0, write=self._write, remove=self._remove, keeps=lambda episode: episode.outcome is Outcome.SUCCESS
        )
        self.session.attach(actor, writer, [SimpleNamespace(take=0) for _ in range(envs)])  # type: ignore[arg-type]

    def _recorded(self, number: int) -> EpisodeSpec | None:
        return SPECS[number] if number in self.recorded else None

    def _resume(self, spec: EpisodeSpec, chunks: Any, log: TakeLog) -> None:
        self.resumed.append((spec, log))

    def _write(self, number: int, episode: Episode, provenance: Any) -> None:
        self.written.append(number)

    def _remove(self, number: int, discarded: bool) -> None:
        self.removed.append(number)

    def say(self, operator: str, said: Any) -> str:
        """The session's refusal; empty if it does as told."""
        refusals: list[str] = []
        self.session.say(operator, said, refusals.append)
        self.session.obey()
        return " ".join(refusals)

    def command(self, operator: str, event: Event, env: int = 0) -> str:
        return self.say(operator, Command(event, env))

    def begin(self, env: int) -> EpisodeSpec | None:
        """The next take, one step old."""
        spec = self.source.next()
        if spec is not None:
            again = next((entry for entry in self.resumed if entry[0] == spec), None)
            if again is not None:
                self.resumed.remove(again)
            self._takes += 1
            log = again[1] if again else TakeLog(take=f"{spec.key}#{self._takes}")
            self.running[env] = spec, log
            self.control.started(env, log.take)
            self.control.stepped(env, 1)
        return spec

    def end(self, env: int, outcome: Outcome | None = None) -> None:
        """The loop carries out the verdict, or the simulator ends the take with `outcome`."""
        verdict = self.control.verdict(env)
        assert outcome is not None or verdict is not None
        spec, log = self.running.pop(env)
        self.control.ended(env)
        action = np.zeros((1, 7), np.float32)
        seen = Observation({}, np.zeros(8, np.float32), "reach")
        step = ChunkStep(seen, ActionChunk(action), action, action, np.zeros(1, np.float32), np.ones(1, np.bool_), False, False, False)
        if outcome is not None or verdict is None:
            episode = Episode(spec, [step], None, outcome or Outcome.FAILURE, "predicate")
        else:
            episode = Episode(spec, [step], None, verdict.outcome, verdict.reason)
        self.source.report(episode)
        return self.session.ended(episode, replace(log, env=env))


def shown_and_judged(table: Table, operator: str, env: int, event: Event) -> None:
    table.begin(env)
    assert not table.command(operator, Event.TAKE_OVER, env) and not table.command(operator, event, env)
    table.end(env)


def test_two_people_undo_at_the_same_time_and_both_takes_come_back() -> None:
    table = Table(2)
    for env, name in enumerate(("ada", "bob")):
        table.say(name, Joined(name))
        shown_and_judged(table, name, env, Event.SUCCESS)
    assert table.written == [0, 1]
    table.begin(0)
    assert not table.command("ada", Event.UNDO) and not table.command("bob", Event.UNDO)
    table.end(0)
    assert table.removed == [0, 1] and [table.begin(env) for env in range(2)] == [SPECS[0], SPECS[1]]
    assert [table.control.envs[env].holder for env in range(2)] == ["ada", "bob"]


def test_a_verdict_can_be_undone_however_many_other_takes_have_ended_since() -> None:
    """The policy's takes in other environments end all the time; they push nobody's take out of reach."""
    table = Table(2, policy=True)
    table.say("ada", Joined("ada"))
    shown_and_judged(table, "ada", 0, Event.SUCCESS)
    for _ in range(8):
        table.begin(1)
        table.end(1, Outcome.FAILURE)
    assert not table.command("ada", Event.UNDO) and table.begin(0) == SPECS[0]


def test_an_undo_never_takes_a_newer_recording_away() -> None:
    """The failed take's scene was shown again and succeeded: there is nothing to go back to."""
    table = Table(1)
    table.say("ada", Joined("ada"))
    shown_and_judged(table, "ada", 0, Event.FAILURE)
    for _ in range(2):
        table.begin(0)
        table.end(0, Outcome.SUCCESS)
    assert table.begin(0) == SPECS[0], "failed takes come after all others"
    table.end(0, Outcome.SUCCESS)
    assert "the scene of that take has been shown again since" in table.command("ada", Event.UNDO)
    assert table.removed == [] and not table.source.holds(SPECS[0])


def test_an_undo_waits_for_nobody_who_shows_the_scene_elsewhere() -> None:
    table = Table(2)
    table.say("ada", Joined("ada"))
    table.begin(1)
    shown_and_judged(table, "ada", 0, Event.FAILURE)  # scene 1; scene 0 runs in env 1
    table.end(1, Outcome.SUCCESS)
    table.begin(0)
    table.end(0, Outcome.SUCCESS)
    assert table.begin(1) == SPECS[1]
    assert "is being shown again in env 1" in table.command("ada", Event.UNDO)
    assert table.control.verdict(1) is None and table.removed == []


def test_a_take_that_succeeds_just_when_the_earlier_one_comes_back_is_given_up() -> None:
    """One recording of a scene: a discarded take's scene begins again at once, and the undo finds it one step before its success."""
    table = Table(1)
    table.say("ada", Joined("ada"))
    shown_and_judged(table, "ada", 0, Event.DISCARD)
    assert table.begin(0) == SPECS[0] and not table.command("ada", Event.UNDO)
    spec = table.running[0][0]
    table.end(0, Outcome.SUCCESS)
    assert spec == SPECS[0] and table.written == [0], "the discarded one's row, and no second recording"
    assert table.begin(0) == SPECS[0] and table.control.envs[0].holder == "ada"
    assert table.source.next() != SPECS[0], "it does not come twice"


def test_an_episode_is_discarded_once() -> None:
    table = Table(1)
    table.say("ada", Joined("ada"))
    shown_and_judged(table, "ada", 0, Event.SUCCESS)
    table.recorded.add(0)
    assert not table.say("ada", Forget(0)), "its card stays until the writer has got there"
    assert "episode 0 was taken back already" in table.say("ada", Forget(0))
    assert table.removed == [0] and [table.begin(0) for _ in range(4)] == [SPECS[1], SPECS[2], SPECS[0], None]


class Journaled:
    """What would be on the disk."""

    def __init__(self) -> None:
        self.kept: dict[int, Episode] = {}

    def keep(self, number: int, episode: Episode) -> None:
        self.kept[number] = episode

    def drop(self, number: int) -> None:
        self.kept.pop(number, None)


def test_the_journal_keeps_the_newer_take_of_a_scene(tmp_path: Path) -> None:
    """A take was undone while it was being written, and judged again: writing the first one must not forget the second."""
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    first, second = (Episode(SPECS[0], [], None, Outcome.SUCCESS) for _ in range(2))

    def record(number: int, episode: Episode, provenance: Any) -> tuple[Any, int]:
        begun.release()
        assert go_on.acquire(timeout=60)
        return SimpleNamespace(), 1

    store = SimpleNamespace(remove=lambda number: None)
    recorder: Any = SimpleNamespace(keeps=lambda episode: True, record=record, frame_every=1, store=store, log=tmp_path / "episodes.jsonl")
    recorder.require_room = lambda size: None
    env: Any = SimpleNamespace(reset=lambda spec, look: SimpleNamespace(provenance={}), close=lambda: None)
    journal: Any = Journaled()
    writer = TakeWriter(recorder, journal, lambda: env, lambda written: None, lambda number: None)
    writer.write(0, first, {})
    assert begun.acquire(timeout=60)
    writer.remove(0, discarded=False)
    assert not journal.kept
    writer.write(0, second, {})
    go_on.release()
    assert begun.acquire(timeout=60), "the first one is written and taken out, and the second one's turn has come"
    assert journal.kept[0] is second
    go_on.release()
    writer.close()
    assert not journal.kept


def test_buttons_of_a_local_device_belong_to_who_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One button takes over and hands back, whatever happened to the take in between; what was pressed before anybody came is nothing."""
    buttons = Buttons()
    table = Table(2, device=buttons, monkeypatch=monkeypatch)
    buttons.pressed = [Event.SUCCESS]
    table.session.obey()
    table.say("ada", Joined("ada"))
    table.say("ada", Left("ada"))
    table.say("eve", Joined("eve"))
    table.begin(0)
    table.begin(1)
    for driver in (Driver.OPERATOR, Driver.WAITING, Driver.OPERATOR):
        buttons.pressed = [Event.CONTROL]
        table.session.obey()
        assert (table.control.driver(0), table.notes) == (driver, [])
    assert table.control.envs[0].holder == "eve"
    table.end(0, Outcome.SUCCESS)
    table.begin(0)
    buttons.pressed = [Event.CONTROL]
    table.session.obey()
    assert table.control.driver(0) is Driver.OPERATOR, "the take ended by itself: the next press takes over, not back"
    table.say("bob", Joined("bob"))
    assert table.command("bob", Event.TAKE_OVER, 1) == "eve is driving env 0; hand it back first, one hand drives one arm"
    table.session.close_device()
    assert buttons.closed
