"""From `cluster.backend` to the backend; Ray is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from vla_rl.cluster.backend import Backend
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.inline import InlineBackend
from vla_rl.cluster.rendezvous import MeetingPlace, Rendezvous


def open_backend(config: ClusterConfig, run_dir: Path, spans: Path | None, preload: Sequence[str]) -> Backend:
    """The backend that a recipe names; `preload` are the modules of its roles.

    Raises ConfigError where the machines have less than it asks for.
    """
    if config.backend == "inline":
        return InlineBackend()
    if config.backend == "process":
        from vla_rl.cluster.process import ProcessBackend

        return ProcessBackend(config, run_dir, spans, preload)
    from vla_rl.cluster.ray_backend import RayBackend

    return RayBackend(config, spans)


def open_meeting(backend: Backend, stack: ExitStack) -> Rendezvous | None:
    """A place where the roles of `backend` meet, for as long as `stack` lasts; None where they are in one process."""
    if isinstance(backend, InlineBackend):
        return None
    place = MeetingPlace(backend.host)
    stack.callback(place.close)
    return place.address
