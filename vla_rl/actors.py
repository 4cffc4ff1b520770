"""Who acts: the actor contract, and the actors that need no policy.

An actor has the same submit/ready shape as an env pool, so that the loop (`rollout.py`) serves both
and neither waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from vla_rl.conventions import Conventions
from vla_rl.episode import ActionChunk, Episode, EpisodeSpec, Observation


@dataclass(frozen=True)
class ActorNeeds:
    """What an actor must be shown, compared with the env's spec when the two are connected."""

    name: str
    """For messages."""
    views: tuple[str, ...] = ()
    """Views it looks at."""
    privileged: bool = False
    """Whether it reads simulator truth."""
    chunk_length: int = 1
    """Actions per chunk it proposes."""
    conventions: Conventions | None = None
    """None: any."""
    resolution: int | None = None
    """Pixels it wants rendered at; None: any."""


class Actor(Protocol):
    """Answers observations with action chunks, for any number of envs at once."""

    needs: ActorNeeds

    def start(self, env: int, spec: EpisodeSpec) -> None:
        """An episode begins in `env`."""
        ...

    def submit(self, env: int, observation: Observation) -> None:
        """Ask for a chunk; the answer comes through `ready`."""
        ...

    def ready(self, timeout_s: float) -> list[tuple[int, ActionChunk]]:
        """Answers that are there, waiting at most `timeout_s` for the first one."""
        ...

    def waitables(self) -> list[Any]:
        """Objects for `multiprocessing.connection.wait` that become readable when `ready(0)` has something new."""
        ...

    def finish(self, env: int, episode: Episode) -> None:
        """The episode in `env` ended."""
        ...

    def close(self) -> None:
        """Stop threads; may be called twice."""
        ...
