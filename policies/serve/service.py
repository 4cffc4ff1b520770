"""What both protocol servers need: the batcher, the policy's description, where to listen and what to refuse."""

from __future__ import annotations

import hashlib
import hmac
import traceback
from dataclasses import dataclass

from vla_rl.errors import UserError
from vla_rl.policies.remote.served import ServedPolicy
from vla_rl.policies.serve.batcher import Batcher


@dataclass(frozen=True)
class Service:
    """A policy that is being served."""

    batcher: Batcher
    served: ServedPolicy
    seed: int
    """Of the noise of clients that give none; at least 0."""
    max_message_bytes: int
    """Larger requests are refused."""
    api_token: str | None = None
    """What clients must present; None: nothing."""

    def noise_seed(self, client: str, index: int) -> int:
        """The 63-bit seed of a client's request number `index`, for clients that give none."""
        text = f"serve:{self.seed}:{client}:{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def admits(self, token: object) -> bool:
        """Whether a client that presents `token` may ask."""
        return self.api_token is None or (isinstance(token, str) and hmac.compare_digest(token.encode(), self.api_token.encode()))


@dataclass(frozen=True)
class Listen:
    """Where a server listens."""

    host: str
    """Address of an interface; `127.0.0.1` is this machine only, `0.0.0.0` every interface."""
    port: int
    """TCP port; 0 takes a free one."""


def error_text(error: BaseException) -> str:
    """What a client is told: the text alone for wrong input, the traceback for a bug of ours."""
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
