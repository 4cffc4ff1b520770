"""Weights into a policy of ours, strictly: every tensor of the file has a destination, every destination gets a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vla_rl.policies.module import PolicyModule
from vla_rl.policies.tensor_files import CheckpointError, TensorFiles

_LISTED = 20
"""At most this many tensors of each kind are listed in an error."""


def load_weights(policy: PolicyModule, path: str | Path) -> None:
    """Load the tensors of a folder or file (ours, or the published names of the policy's family) into a policy.

    Raises CheckpointError that lists missing, surplus and mis-shaped tensors; the policy is then unchanged.
    """
    files = TensorFiles.open(path)
    destinations = destination_names(policy, files)
    require_equal(policy, files, destinations)
    dtypes = {name: tensor.dtype for name, tensor in policy.state_dict().items()}
    weights: dict[str, Tensor] = {}
    for name, tensor in files.read():
        own = destinations[name]
        if own is not None:
            weights[own] = tensor.to(dtypes[own])
    policy.load_state_dict(weights, assign=policy.device.type == "meta")


def destination_names(policy: PolicyModule, files: TensorFiles) -> dict[str, str | None]:
    """For every tensor on disk, the name of ours that it goes to; None for a copy of another tensor, which is not read."""
    return {name: policy.own_name(name, files.names) for name in files.infos}


def require_equal(policy: PolicyModule, files: TensorFiles, destinations: Mapping[str, str | None]) -> None:
    """Raise CheckpointError with everything in which a file differs from what the policy needs."""
    found = {own: files.shapes[name] for name, own in destinations.items() if own is not None}
    expected = {name: list(tensor.shape) for name, tensor in policy.state_dict().items()}
    problems = {
        "missing": [policy.published_name(name) for name in sorted(expected.keys() - found.keys())],
        "surplus": [policy.published_name(name) for name in sorted(found.keys() - expected.keys())],
        "wrong shape": [
            f"{policy.published_name(name)}: expected {expected[name]}, got {found[name]}"
            for name in sorted(expected.keys() & found.keys())
            if expected[name] != found[name]
        ],
    }
    if any(problems.values()):
        lines = [_listing(kind, names) for kind, names in problems.items() if names]
        raise CheckpointError(
            f"{files.source} does not fit a {policy.config.family} policy of this config; nothing was loaded\n" + "\n".join(lines)
        )


def _listing(kind: str, names: list[str]) -> str:
    shown = "".join(f"\n  {name}" for name in names[:_LISTED])
    rest = f"\n  and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{kind} ({len(names)}):{shown}{rest}"
