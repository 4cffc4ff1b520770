"""What trainer ranks other than the first do in a push."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from vla_rl.weights.times import require_newer


class Follower:
    """Walks the weights, because gathering them is a collective, and keeps none of them."""

    def __init__(self) -> None:
        self.version = -1
        """Version of the last push."""

    def push(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take part in the gathering. Raises VersionError unless `version` is newer than the last, as rank 0 does."""
        require_newer(version, self.version)
        for _ in named_weights:
            pass
        self.version = version
