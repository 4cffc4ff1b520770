"""Policies on disk, in LeRobot's folder layout: config, weights, processors with their statistics, tokenizer.

    config.json  model.safetensors  policy_preprocessor.json  policy_postprocessor.json  *.safetensors  tokenizer/
    vla_rl.json      what LeRobot's files have no place for: every size, the spec, the hash of the statistics

Weights carry the published names. Loading is strict: everything that is missing, surplus or mis-shaped is listed in one
error, and nothing is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.config import build, to_plain
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.factory import family, make_policy
from vla_rl.policies.inference import ActingPolicy
from vla_rl.policies.lerobot_files import TOKENIZER_FOLDER, read_statistics, write_lerobot_files
from vla_rl.policies.lerobot_policy import load_lerobot_policy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.imported import PI0_TYPES
from vla_rl.policies.published import CONFIG_FILE, OWN_FILE, Layout, detect_layout, published_policy, read_json, reading, resolve_folder
from vla_rl.policies.strict_load import load_weights
from vla_rl.policies.tensor_files import INDEX_FILE, WEIGHTS_FILE, CheckpointError
from vla_rl.telemetry.files import fsync, write_json

__all__ = [
    "OWN_FILE",
    "WEIGHTS_FILE",
    "CheckpointError",
    "atomic_folder",
    "load_acting_policy",
    "load_policy",
    "load_weights",
    "meta_policy",
    "save_policy",
]

_TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Of the files that a tokenizer consists of."""


def save_policy(policy: PolicyModule, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the policy's folder; a reader sees the old folder or the whole new one.

    `weights` replaces the policy's own (full, gathered tensors by our names, for a policy that is sharded).
    """
    own = dict(policy.state_dict() if weights is None else weights)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.published_weights(own).items()}
    with atomic_folder(folder) as temporary:
        write_lerobot_files(temporary, policy)
        _copy_tokenizer(policy.processor.tokenizer.folder, temporary / TOKENIZER_FOLDER)
        write_json(temporary / OWN_FILE, _own_fields(policy))
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})


def load_policy(folder: str | Path, device: torch.device | str = "cpu") -> PolicyModule:
    """The policy in `folder`, in evaluation mode: ours, or a published one of our families (`policies/published.py`).

    A name like `owner/model` that is no folder is fetched from the Hugging Face hub. Raises CheckpointError listing all that is wrong.
    """
    folder = resolve_folder(folder)
    policy = meta_policy(folder)
    load_weights(policy, folder)
    return policy.to(device).eval()


def meta_policy(folder: Path) -> PolicyModule:
    """The policy that belongs into a folder, without its weights and without storage: sizes, statistics, tokenizer, spec.

    Raises CheckpointError, StatisticsError or ConfigError naming what is wrong.
    """
    with reading(folder):
        return _own_policy(folder) if (folder / OWN_FILE).is_file() else published_policy(folder)


def _own_policy(folder: Path) -> PolicyModule:
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
        return make_policy(config, statistics, _own_spec(folder, own["spec"]), tokenizer_folder=str(folder / TOKENIZER_FOLDER))


def _own_spec(folder: Path, values: Mapping[str, Any]) -> PolicySpec:
    try:
        return PolicySpec.from_dict(values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / OWN_FILE}: its spec is none ({type(error).__name__}: {error}); restore the file that was saved with the weights"
        ) from error


def load_acting_policy(folder: str | Path, device: torch.device | str = "cpu") -> ActingPolicy:
    """A policy that acts, from any folder that vla-rl knows: also LeRobot's own families, behind an adapter.

    Raises CheckpointError, StatisticsError or ConfigError naming what is wrong.
    """
    folder = resolve_folder(folder)
    if detect_layout(folder) is Layout.LEROBOT and read_json(folder / CONFIG_FILE)["type"] not in PI0_TYPES:
        return load_lerobot_policy(folder, device)
    return load_policy(folder, device)


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


def _copy_tokenizer(source: Path, destination: Path) -> None:
    """Its files alone: OpenVLA's lie among the weights."""
    destination.mkdir()
    for path in source.iterdir():
        if path.suffix in _TOKENIZER_SUFFIXES and path.name != INDEX_FILE:
            shutil.copy2(path, destination)


def _own_fields(policy: PolicyModule) -> dict[str, Any]:
    return {
        "family": policy.config.family,
        "config": to_plain(policy.config),
        "spec": policy.spec.to_dict(),
        "statistics_sha256": policy.processor.statistics.sha256,
    }


def _read_own(folder: Path) -> dict[str, Any]:
    path = folder / OWN_FILE
    values = read_json(path)
    missing = [key for key in ("family", "config", "spec", "statistics_sha256") if key not in values]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return values
