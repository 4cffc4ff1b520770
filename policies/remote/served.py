"""What a server says of its policy, so that a client can compare it with its env before anything moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_rl.errors import UserError
from vla_rl.policies.base import PolicySpec

ENTRY = "vla_rl"
"""Key of this description in openpi's metadata, and prefix of what only our servers and clients exchange. Others ignore it."""


class RemoteError(UserError):
    """A policy server that cannot be reached, does not answer in time, refuses a request, or serves another policy than asked for."""


@dataclass(frozen=True)
class ServedPolicy:
    """A served policy and what identifies it."""

    name: str
    """The checkpoint that the server was started with; for messages."""
    weights: str
    """Digest of the checkpoint's files (`telemetry.files.folder_digest`)."""
    spec: PolicySpec
    """Views, horizon, resolution, conventions, rate."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire."""
        return {"name": self.name, "weights": self.weights, "spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServedPolicy:
        """Inverse of `to_dict`. Raises RemoteError for a description that is incomplete, as another version may send."""
        try:
            return cls(str(values["name"]), str(values["weights"]), PolicySpec.from_dict(values["spec"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(
                f"the server's description of its policy cannot be read ({type(error).__name__}: {error}); "
                "run the same version of vla-rl on both sides"
            ) from error
