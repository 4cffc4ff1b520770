"""Policies on disk, in LeRobot's folder layout: config, weights, processors with their statistics, tokenizer.

    config.json  model.safetensors  policy_preprocessor.json  policy_postprocessor.json  *.safetensors  tokenizer/
    vla_rl.json      what LeRobot's files have no place for: every size, the spec, the hash of the statistics

Weights carry the published names. Loading is strict: everything that is missing, surplus or mis-shaped is listed in one
error, and nothing is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vla_rl.config import build, to_plain
from vla_rl.conventions import Conventions
from vla_rl.errors import UserError
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.factory import family, make_policy
from vla_rl.policies.lerobot_files import TOKENIZER_FOLDER, read_statistics, write_lerobot_files
from vla_rl.policies.module import PolicyModule
from vla_rl.telemetry.files import fsync, write_json

WEIGHTS_FILE = "model.safetensors"
OWN_FILE = "vla_rl.json"
_LISTED = 20
"""At most this many tensors of each kind are listed in an error."""


class CheckpointError(UserError):
    """A checkpoint that is absent, damaged, or of another policy."""


def save_policy(policy: PolicyModule, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the policy's folder; a reader sees the old folder or the whole new one.

    `weights` replaces the policy's own (full, gathered tensors by our names, for a policy that is sharded).
    """
    own = dict(policy.state_dict() if weights is None else weights)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.published_weights(own).items()}
    with atomic_folder(folder) as temporary:
        write_lerobot_files(temporary, policy)
        shutil.copytree(policy.processor.tokenizer.folder, temporary / TOKENIZER_FOLDER)
        write_json(temporary / OWN_FILE, _own_fields(policy))
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})


def load_policy(folder: str | Path, device: torch.device | str = "cpu") -> PolicyModule:
    """The policy in `folder`, in evaluation mode. Raises CheckpointError listing everything that is wrong."""
    folder = Path(folder)
    own = _read_own(folder)
    statistics = read_statistics(folder)
    if statistics.sha256 != own["statistics_sha256"]:
        raise CheckpointError(
            f"{folder}: the statistics have hash {statistics.sha256[:12]}, the checkpoint was trained with "
            f"{own['statistics_sha256'][:12]}; restore the file that was saved with the weights"
        )
    config_class, _ = family(own["family"])
    config = build(config_class, own["config"], where=str(folder / OWN_FILE))
    with torch.device("meta"):
        policy = make_policy(config, statistics, _spec_from(own["spec"]), tokenizer_folder=str(folder / TOKENIZER_FOLDER))
    load_weights(policy, folder / WEIGHTS_FILE)
    return policy.to(device).eval()


def load_weights(policy: PolicyModule, path: str | Path) -> None:
    """Load a `model.safetensors` (ours, LeRobot's or openpi's names) into a policy, strictly.

    Raises CheckpointError that lists missing, surplus and mis-shaped tensors; the policy is then unchanged.
    """
    path = Path(path)
    shapes = _shapes(path)
    names = frozenset(shapes)
    own_names = {name: own for name in shapes if (own := policy.own_name(name, names)) is not None}
    _require_equal(path, policy, {own: shapes[name] for name, own in own_names.items()})
    tensors = load_file(path)
    dtypes = {name: tensor.dtype for name, tensor in policy.state_dict().items()}
    weights = {own: tensors[name].to(dtypes[own]) for name, own in own_names.items()}
    policy.load_state_dict(weights, assign=policy.device.type == "meta")


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success fsync and rename it, replacing an old one; on an exception remove it."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            fsync(path)
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(temporary, folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _own_fields(policy: PolicyModule) -> dict[str, Any]:
    spec = asdict(policy.spec) | {"conventions": policy.spec.conventions.to_dict()}
    return {
        "family": policy.config.family,
        "config": to_plain(policy.config),
        "spec": spec,
        "statistics_sha256": policy.processor.statistics.sha256,
    }


def _spec_from(values: dict[str, Any]) -> PolicySpec:
    conventions = Conventions.from_dict(values["conventions"])
    return PolicySpec(**values | {"views": tuple(values["views"]), "conventions": conventions})


def _read_own(folder: Path) -> dict[str, Any]:
    path = folder / OWN_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint's policy folder (the one that holds {WEIGHTS_FILE})")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {OWN_FILE}, so sizes and conventions are unknown; "
            "for published weights make a policy of that size and use load_weights"
        )
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the file is damaged or truncated, restore the checkpoint") from error
    missing = [key for key in ("family", "config", "spec", "statistics_sha256") if key not in values]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return values


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor in a safetensors file, from its header."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the file is damaged or truncated, restore the checkpoint") from error


def _require_equal(path: Path, policy: PolicyModule, found: Mapping[str, list[int]]) -> None:
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
            f"{path} does not fit a {policy.config.family} policy of this config; nothing was loaded\n" + "\n".join(lines)
        )


def _listing(kind: str, names: list[str]) -> str:
    shown = "".join(f"\n  {name}" for name in names[:_LISTED])
    rest = f"\n  and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{kind} ({len(names)}):{shown}{rest}"
