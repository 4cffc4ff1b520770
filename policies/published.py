"""Published checkpoint folders: which system wrote one, and the policies of our families that come out of them.

| layout  | marks |
|---|---|
| own     | `vla_rl.json` |
| lerobot | `config.json` with `type` |
| openpi  | `model.safetensors` and `assets/ASSET_ID/norm_stats.json` |
| groot   | `config.json` with `model_type` `Gr00tN1d6` or `Gr00tN1d7` |
| openvla | `config.json` with `model_type` `openvla`, or `dataset_statistics.json` |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.tensor_files import WEIGHTS_FILE, CheckpointError

OWN_FILE = "vla_rl.json"
"""What a folder of ours holds beside LeRobot's files."""
CONFIG_FILE = "config.json"
NORM_STATS_FILE = "norm_stats.json"
GROOT_TYPES = ("Gr00tN1d6", "Gr00tN1d7")
OPENVLA_TYPE = "openvla"
OPENVLA_STATISTICS = "dataset_statistics.json"


class Layout(str, Enum):
    """Which system wrote a checkpoint folder."""

    OWN = "own"
    LEROBOT = "lerobot"
    OPENPI = "openpi"
    GROOT = "groot"
    OPENVLA = "openvla"


def resolve_folder(name: str | Path) -> Path:
    """A checkpoint's folder; a name like `owner/model` that is no folder here is fetched from the Hugging Face hub.

    Raises CheckpointError for what is neither, or cannot be fetched (as without a network).
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    parts = str(name).split("/")
    if len(parts) != 2 or folder.is_absolute() or not all(parts) or parts[0] in (".", ".."):
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint's policy folder (the one that holds {WEIGHTS_FILE})")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} is not a folder, and the Hugging Face hub does not give it either ({type(error).__name__}); check the name and the "
            "network, or download it elsewhere and give the folder"
        ) from error


def detect_layout(folder: Path) -> Layout:
    """Which system wrote a folder. Raises CheckpointError naming what was looked for."""
    if (folder / OWN_FILE).is_file():
        return Layout.OWN
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if "type" in config:
        return Layout.LEROBOT
    if config.get("model_type") in GROOT_TYPES:
        return Layout.GROOT
    if config.get("model_type") == OPENVLA_TYPE or (folder / OPENVLA_STATISTICS).is_file():
        return Layout.OPENVLA
    if norm_stats_files(folder):
        return Layout.OPENPI
    raise CheckpointError(
        f"{folder} is no checkpoint that vla-rl knows: it holds no {OWN_FILE} (ours), no {CONFIG_FILE} with 'type' (LeRobot) or "
        f"'model_type' {', '.join((*GROOT_TYPES, OPENVLA_TYPE))}, and no assets/*/{NORM_STATS_FILE} (openpi){_policy_inside(folder)}"
    )


def _policy_inside(folder: Path) -> str:
    """The tail of an error message: where a run, or a training step of it, keeps the policy (ours, LeRobot's)."""
    inside = [
        path
        for step in ("", "last", "checkpoints/last")
        for name in ("policy", "pretrained_model")
        if (path := folder / step / name).is_dir()
    ]
    return f"; did you mean {inside[0]}?" if inside else ""


def published_policy(folder: Path) -> PolicyModule:
    """The policy that belongs into a published folder of one of our families, without its weights.

    Raises CheckpointError for a folder of another kind, and for everything in it that does not fit.
    """
    from vla_rl.policies.groot.imported import nvidia_groot
    from vla_rl.policies.pi0.imported import PI0_TYPES, lerobot_pi0, openpi_pi0
    from vla_rl.policies.tokens.imported import openvla_oft

    layout = detect_layout(folder)
    if layout is Layout.GROOT:
        return nvidia_groot(folder)
    if layout is Layout.OPENPI:
        return openpi_pi0(folder)
    if layout is Layout.LEROBOT:
        family = read_json(folder / CONFIG_FILE)["type"]
        if family in PI0_TYPES:
            return lerobot_pi0(folder)
        raise CheckpointError(f"{folder} is LeRobot's {family!r}: it can act and be served, but vla-rl has no such family to train")
    return openvla_oft(folder)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Inside the block, an entry that a folder's files lack, or hold in another form than who wrote them does, is a CheckpointError.

    Other systems' files have dozens of entries, and other releases of these systems have others.
    """
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder}: its files do not say what a checkpoint of its kind says ({what}); restore the files that were saved with the "
            "weights, or take those of a release that docs/policies.md names"
        ) from error


def norm_stats_files(folder: Path) -> list[Path]:
    """openpi's statistics below `assets`; the asset's name may have several parts (`physical-intelligence/libero`)."""
    return sorted((folder / "assets").rglob(NORM_STATS_FILE)) if (folder / "assets").is_dir() else []


def relative_parts(action: Mapping[str, Any]) -> list[str]:
    """The parts of an NVIDIA action that are relative to the state where a policy's `use_relative_action` is set."""
    forms = action.get("action_configs") or []
    return [part for part, form in zip(action["modality_keys"], forms) if form and str(form.get("rep", "")).lower() == "relative"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises CheckpointError if it is absent, damaged, or no mapping."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} lacks {path.name}; fetch the whole folder")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the file is damaged or truncated, restore the checkpoint") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; it must be a mapping")
    return values
