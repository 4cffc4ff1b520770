"""What every page is shown: environments, progress, recorded episodes. Written by the loop, read by the server's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.collection.browser.pictures import FILM_QUALITY, encode, film_sheet
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control
from vla_rl.collection.operated_actor import OperatedActor
from vla_rl.collection.plan import instruction
from vla_rl.collection.takes import Written, counts, film_of
from vla_rl.conventions import Conventions, Orientation
from vla_rl.datasets.collected import Store
from vla_rl.datasets.schema import reorient
from vla_rl.episode import Episode, EpisodeSpec, UInt8
from vla_rl.telemetry.files import read_jsonl

PUBLISH_PERIOD_S = 0.1
"""Pages hear about the state at most this often, unless somebody changed it."""
SLOW_RATIO = 0.9
"""Below this share of the control rate the page says that the machine is too slow."""
KEPT_FILMS = 16
"""Films that stay in memory; others are read from their files again."""


@dataclass(frozen=True)
class Card:
    """A recorded episode in the page's list."""

    number: int
    task: int
    outcome: str
    reason: str
    steps: int
    kept: bool


class Board:
    """The state that pages see."""

    def __init__(self, config: CollectConfig, specs: Sequence[EpisodeSpec], store: Store, log: Path, done: Iterable[int]) -> None:
        self.changed = True
        self.snapshot: dict[str, Any] = {}
        """Newest state, replaced as a whole."""
        self.conventions = Conventions()
        """Of the environments; set before anything is published."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is a new snapshot, in the loop's thread."""
        self.has_policy = config.checkpoint is not None
        self.title = config.suite
        self._config, self._specs, self._store = config, specs, store
        self._lock = threading.Lock()
        self._recorded = set(done)
        self._cards = [_card_of_row(row) for row in read_jsonl(log) if row["outcome"] != "crash"]
        self._films: dict[int, list[UInt8]] = {}
        self._last: dict[int, dict[str, str]] = {}
        self._prompts = {spec.task: instruction(config, spec) for spec in specs}
        self.trouble = ""
        """Why no take can begin; empty: one can."""
        self._note = ""
        self._published_s = 0.0

    def publish(self, control: Control, actor: OperatedActor, writing: int) -> None:
        """Make a new snapshot if it is time for one."""
        now_s = time.perf_counter()
        if not self.changed and now_s - self._published_s < PUBLISH_PERIOD_S:
            return
        self.changed, self._published_s = False, now_s
        with self._lock:
            self.snapshot = {
                "kind": "state",
                "envs": [self._env_view(env, control, actor) for env in range(control.num_envs)],
                "progress": self._progress(),
                "episodes": [card.__dict__ for card in self._cards[-60:][::-1]],
                "writing": writing,
                "note": self._note,
                "trouble": self.trouble,
                "operators": sorted(control.present),
                "complete": len(self._recorded) == len(self._specs),
            }
        self.on_change()

    def ended(self, env: int, episode: Episode) -> None:
        """A take ended in `env`. One that was given up without a word about it (skipped, undone) says nothing about success."""
        if counts(episode):
            self._last[env] = {"outcome": episode.outcome.value, "reason": episode.reason}
        else:
            self._last.pop(env, None)
        self.changed = True

    def note(self, text: str) -> None:
        """A line for everybody."""
        self._note, self.changed = text, True

    def written(self, written: Written) -> None:
        """A take has become an episode; in the writer's thread."""
        row = written.row
        with self._lock:
            self._cards = [card for card in self._cards if card.number != written.number or not card.kept]
            self._cards.append(Card(written.number, row.task, row.outcome, row.reason, row.steps, written.kept))
            if written.kept:
                self._recorded.add(written.number)
                self._films[written.number] = written.film
                for old in list(self._films)[:-KEPT_FILMS]:
                    del self._films[old]
        self.changed = True

    def forget(self, number: int) -> None:
        """An episode was taken back: its newest card goes, whether it was kept or had failed; in the writer's thread."""
        with self._lock:
            self._recorded.discard(number)
            self._films.pop(number, None)
            newest = max((place for place, card in enumerate(self._cards) if card.number == number), default=None)
            self._cards = [card for place, card in enumerate(self._cards) if place != newest]
        self.changed = True

    def spec_of(self, number: int) -> EpisodeSpec | None:
        """The scene of a recorded episode; None if it is not recorded."""
        return self._specs[number] if number in self._recorded else None

    def thumbnail(self, number: int) -> bytes | None:
        """A small WebP of an episode's end; None if it is not recorded."""
        film = self._film(number)
        return None if not film else encode(self.upright(film[-1]), "WEBP", FILM_QUALITY)

    def film(self, number: int) -> tuple[bytes, dict[str, int]] | None:
        """An episode as one sheet of pictures, see `film_sheet`; None if it is not recorded."""
        film = self._film(number)
        return None if not film else film_sheet([self.upright(picture) for picture in film])

    def upright(self, picture_HWC: UInt8) -> UInt8:
        """As a person sees the scene: top up, left left. Policies look at another orientation (LIBERO's is mirrored)."""
        return reorient(reorient(picture_HWC, self.conventions.orientation), Orientation.VERTICAL_FLIP)

    def _film(self, number: int) -> list[UInt8]:
        with self._lock:
            known, recorded = self._films.get(number), number in self._recorded
        if known is not None or not recorded:
            return known or []
        return film_of(self._store.load(number))

    def _env_view(self, env: int, control: Control, actor: OperatedActor) -> dict[str, Any]:
        state, spec, period_s = control.envs[env], actor.spec_of(env), actor.period_s(env)
        rate = None if period_s is None else 1.0 / period_s
        return {
            "env": env,
            "driver": state.driver.value,
            "holder": state.holder,
            "away": state.absent_since is not None,
            "running": bool(state.take),
            "ending": state.verdict is not None,
            "step": state.steps,
            "max_steps": 0 if spec is None else spec.protocol.max_steps,
            "task": None if spec is None else spec.task,
            "prompt": "" if spec is None else instruction(self._config, spec),
            "scene": "" if spec is None else spec.init.partition(":")[2],
            "gripper": "closed" if actor.gripper_closes(env) else "open",
            "rate": None if rate is None else round(rate, 1),
            "slow": rate is not None and rate < SLOW_RATIO * self.conventions.control_rate_hz,
            "last": self._last.get(env),
        }

    def _progress(self) -> list[dict[str, Any]]:
        wanted: dict[int, list[int]] = {}
        for number, spec in enumerate(self._specs):
            wanted.setdefault(spec.task, []).append(number)
        return [
            {
                "task": task,
                "prompt": self._prompts[task],
                "recorded": sum(number in self._recorded for number in numbers),
                "wanted": len(numbers),
            }
            for task, numbers in wanted.items()
        ]


def _card_of_row(row: dict[str, Any]) -> Card:
    return Card(row["number"], row["task"], row["outcome"], row["reason"], row["steps"], bool(row["kept"]))
