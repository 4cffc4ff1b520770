"""What a push costs, gathering the shards apart from moving the bytes; and that versions only grow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from vla_rl.weights.errors import VersionError


@dataclass
class PushTimes:
    """One push, in seconds and bytes."""

    nbytes: int = 0
    """Bytes of the flat block that travelled."""
    gather_s: float = 0.0
    """Spent in the generator of weights: collectives of the trainer ranks, merging of adapters."""
    total_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def transport_s(self) -> float:
        """All but the gathering."""
        return self.total_s - self.gather_s

    def finish(self) -> None:
        """The push is over."""
        self.total_s = time.perf_counter() - self.started


def timed(named_weights: Iterable[tuple[str, Tensor]], times: PushTimes) -> Iterator[tuple[str, Tensor]]:
    """The same weights; adds what it takes to get each to `times.gather_s`."""
    weights = iter(named_weights)
    while True:
        asked = time.perf_counter()
        pair = next(weights, None)
        times.gather_s += time.perf_counter() - asked
        if pair is None:
            return
        yield pair


def require_newer(version: int, last: int) -> None:
    """Raise VersionError unless `version` is newer than `last`."""
    if version <= last:
        raise VersionError(f"weights of version {version} were pushed after version {last}; versions must grow, also over a resume")
