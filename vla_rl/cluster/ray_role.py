"""The Ray actor around a role."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from vla_rl.cluster.backend import Sealed
from vla_rl.cluster.wire import Raised
from vla_rl.telemetry.pulse import mark_progress, progress_marks
from vla_rl.telemetry.spans import open_span_log, write_spans


@dataclass(frozen=True)
class RaySurroundings:
    """What an actor sets up before its role is made."""

    name: str
    spans: Path | None
    """Gets its spans."""
    torch_threads: int
    folder: str
    """Where the driver runs, so that a recipe's relative paths mean the same everywhere."""
    search_path: tuple[str, ...]
    """Where the driver finds modules."""


@ray.remote(concurrency_groups={"beside": 1, "liveness": 1})  # pyright: ignore[reportCallIssue]  # missing in its overloads
class RoleActor:
    """Calls run in one thread, where the role is made too: GL contexts belong to a thread."""

    def __init__(self, surroundings: RaySurroundings) -> None:
        os.chdir(surroundings.folder)
        sys.path += [path for path in surroundings.search_path if path not in sys.path]
        torch.set_num_threads(surroundings.torch_threads)
        open_span_log(surroundings.spans, surroundings.name)
        self._role: Any = None

    @ray.method(concurrency_group="liveness")
    def where(self) -> tuple[str, str]:
        """(node, file that gets what this process prints)."""
        context = ray.get_runtime_context()
        return f"{ray.util.get_node_ip_address()} (node {context.get_node_id()[:8]})", os.path.realpath("/proc/self/fd/2")

    @ray.method(concurrency_group="liveness")
    def pulse(self) -> int:
        """How much this process has got done; that it answers is a sign of life."""
        return progress_marks()

    @ray.method(num_returns=2)
    def make(self, maker: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
        """Make the role; its first call."""
        return _answer(lambda: self._keep(maker(*arguments)))

    @ray.method(num_returns=2)
    def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
        """Answer a call: (pickled value or `Raised`, payload)."""
        return _answer(lambda: getattr(self._role, method)(*arguments))

    @ray.method(num_returns=2, concurrency_group="beside")
    def call_beside(self, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
        """The same in a thread of its own, beside the call that runs."""
        return _answer(lambda: getattr(self._role, method)(*arguments))

    def _keep(self, role: Any) -> None:
        self._role = role


def _answer(work: Callable[[], Any]) -> tuple[bytes, Any]:
    mark_progress()
    try:
        value = work()
        write_spans()
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the driver gets whatever a role raises
        return pickle.dumps(Raised.of(error)), None
    if isinstance(value, Sealed):
        return pickle.dumps(Sealed(value.value, None)), value.payload
    return pickle.dumps(value), None
