"""A folder in which LeRobot saved a policy that is none of our families: its spec, and the other models that it is built on.

A network like SmolVLA's is built from a base model's files, which `config.json` and the processors name: a folder, a name on the
Hugging Face hub, or, for machines without the hub, a folder of that name inside the checkpoint
(`CHECKPOINT/HuggingFaceTB/SmolVLM2-500M-Video-Instruct`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl.conventions import Conventions
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.lerobot_files import chunk_sizes, policy_views
from vla_rl.policies.published import read_json, reading, relative_parts
from vla_rl.policies.tensor_files import CheckpointError

PREPROCESSOR_FILE, POSTPROCESSOR_FILE = "policy_preprocessor.json", "policy_postprocessor.json"
MASKED_PADDING = ("smolvla",)
"""Types that mask what pads a prompt, so that all prompts can have one fixed length."""
_OWN_NAMES = ("repo_id", "type")
"""Fields that are names of the checkpoint, not of what it is built on."""


def foreign_spec(folder: Path, fields: Mapping[str, Any]) -> PolicySpec:
    """Chunk, views and resolution of a policy with this `config.json`.

    Raises CheckpointError for what LIBERO does not have, and for actions relative to the state.
    """
    with reading(folder):
        _refuse_relative(folder, fields)
        views, resolution = policy_views(folder, fields)
        chunk_length, executed_horizon = chunk_sizes(folder, fields)
        if fields["type"] == "groot":
            chunk_length, executed_horizon = _groot_sizes(folder, fields, executed_horizon)
    return PolicySpec(chunk_length, executed_horizon, views, resolution, Conventions())


def processor_overrides(folder: Path, fields: Mapping[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """What to change in the preprocessor's steps, by registry name: the device, base models inside the folder, prompts of one length."""
    overrides: dict[str, dict[str, Any]] = {"device_processor": {"device": device}}
    for step in _steps(folder, PREPROCESSOR_FILE):
        name = step.get("registry_name", "")
        changes: dict[str, Any] = inside_models(folder, step.get("config", {}))
        if name == "tokenizer_processor" and fields["type"] in MASKED_PADDING:
            changes["padding"] = "max_length"
        if name and changes:
            overrides.setdefault(name, {}).update(changes)
    return overrides


def inside_models(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name a folder inside the checkpoint, with its path."""
    named = {key: value for key, value in settings.items() if isinstance(value, str) and value}
    return {key: str(folder / value) for key, value in named.items() if (folder / value).is_dir()}


def hub_models(folder: Path, fields: Mapping[str, Any]) -> list[str]:
    """The models that config and preprocessor name as `owner/model` and that are no folders here."""
    settings = [fields, *(step.get("config", {}) for step in _steps(folder, PREPROCESSOR_FILE))]
    names = {value for given in settings for key, value in given.items() if isinstance(value, str) and key not in _OWN_NAMES}
    return sorted(name for name in names if name.count("/") == 1 and not (folder / name).is_dir() and not Path(name).is_dir())


def _groot_sizes(folder: Path, fields: Mapping[str, Any], executed_horizon: int) -> tuple[int, int]:
    """LeRobot cuts GR00T's chunks to the embodiment's horizon, and replans NVIDIA's LIBERO policies after 8 actions."""
    from lerobot.policies.groot.configuration_groot import infer_groot_n1_7_action_execution_horizon, infer_groot_n1_7_action_horizon

    base = inside_models(folder, fields).get("base_model_path", fields.get("base_model_path"))
    embodiment = fields["embodiment_tag"]
    horizons = [infer_groot_n1_7_action_horizon(base, embodiment)]
    for step in _steps(folder, POSTPROCESSOR_FILE):
        modalities = step.get("config", {}).get("modality_config") or {}
        horizons.append(len(modalities.get("action", {}).get("delta_indices", [])))
    chunk_length = min([executed_horizon, *(horizon for horizon in horizons if horizon)])
    return chunk_length, min(chunk_length, infer_groot_n1_7_action_execution_horizon(base, embodiment) or chunk_length)


def _refuse_relative(folder: Path, fields: Mapping[str, Any]) -> None:
    steps = [(step.get("registry_name"), step.get("config", {})) for step in _steps(folder, POSTPROCESSOR_FILE)]
    undone = any(name == "absolute_actions_processor" and settings.get("enabled") for name, settings in steps)
    parts = [(settings.get("modality_config") or {}).get("action", {}) for _, settings in steps if settings.get("use_relative_action")]
    if fields.get("use_relative_actions") or undone or any(relative_parts(action) for action in parts if action):
        raise CheckpointError(
            f"{folder}: its actions are relative to the state, LIBERO's are not; train it with use_relative_actions off, "
            "or serve it with LeRobot and use policy.remote"
        )


def _steps(folder: Path, file: str) -> Iterator[dict[str, Any]]:
    yield from read_json(folder / file).get("steps", [])
