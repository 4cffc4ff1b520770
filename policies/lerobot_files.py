"""The JSON and statistics files of a LeRobot policy folder: what LeRobot needs to read config and processors of our policies.

Format of LeRobot 0.6: `config.json` (type and fields), `policy_preprocessor.json` and `policy_postprocessor.json`
(a list of steps by registry name), and one safetensors file with the statistics beside each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.processor import IMAGES, Normalization
from vla_rl.policies.published import read_json
from vla_rl.policies.statistics import ACTION, STATE, Statistics, StatisticsError
from vla_rl.policies.tensor_files import CheckpointError
from vla_rl.telemetry.files import write_json

TOKENIZER_FOLDER = "tokenizer"
_EMPTY_CAMERA = IMAGES + "empty_camera"
_PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
_NORM_MODE = {Normalization.MEAN_STD: "MEAN_STD", Normalization.MIN_MAX: "MIN_MAX", Normalization.QUANTILES: "QUANTILES"}


def write_lerobot_files(folder: Path, policy: PolicyModule) -> None:
    """Write config.json, both processor files and their statistics."""
    mode = _NORM_MODE[policy.config.normalization]
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    write_json(folder / "config.json", _config_fields(policy, norm_map))
    before, normalize = _preprocessor_steps(policy, norm_map)
    index = next(i for i, step in enumerate(before) if step is normalize)
    normalize["state_file"] = f"{_PREPROCESSOR}_step_{index}_normalizer_processor.safetensors"
    unnormalize = _step("unnormalizer_processor", eps=1e-8, features=_outputs(), norm_map=norm_map)
    unnormalize["state_file"] = f"{_POSTPROCESSOR}_step_0_unnormalizer_processor.safetensors"
    write_json(folder / f"{_PREPROCESSOR}.json", {"name": _PREPROCESSOR, "steps": before})
    write_json(folder / f"{_POSTPROCESSOR}.json", {"name": _POSTPROCESSOR, "steps": [unnormalize, _device_step()]})
    for step in (normalize, unnormalize):
        save_file(_statistics_tensors(policy.processor.statistics), folder / step["state_file"])


def read_statistics(folder: Path) -> Statistics:
    """The statistics beside the preprocessor. Raises StatisticsError naming the file when they are absent or damaged."""
    return _statistics_of(folder, f"{_PREPROCESSOR}_step_*_normalizer_processor.safetensors")


def _statistics_of(folder: Path, pattern: str) -> Statistics:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise StatisticsError(
            f"{folder} must hold one {pattern.replace('*', 'N')}, it holds {len(found)}; fetch the whole folder, or bring a checkpoint "
            "from before LeRobot 0.4 up to date with its migrate_policy_normalization script"
        )
    values: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(found[0], "pt") as file:
            for key in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                feature, _, name = key.rpartition(".")
                values.setdefault(feature, {})[name] = file.get_tensor(key).numpy()
    except (SafetensorError, OSError) as error:
        raise StatisticsError(f"{found[0]} cannot be read ({error}); the file is damaged or truncated, restore the checkpoint") from error
    return Statistics.from_dict(values, complete=False)


@dataclass(frozen=True)
class LerobotFolder:
    """What LeRobot's JSON files and statistics say of a policy."""

    config: dict[str, Any]
    """`config.json`."""
    views: tuple[str, ...]
    """Our views, in the order in which the policy reads them."""
    resolution: int
    """Pixels of a side of its pictures."""
    chunk_length: int
    executed_horizon: int
    normalization: Normalization
    """Of state and actions."""
    statistics: Statistics
    """Of state and actions only."""


def read_lerobot_folder(folder: Path) -> LerobotFolder:
    """Read everything but weights and tokenizer of a folder that LeRobot wrote, and check that it fits LIBERO's observations and actions.

    Raises CheckpointError or StatisticsError naming what is missing, contradicts itself or is not supported.
    """
    config = read_json(folder / "config.json")
    views, resolution = policy_views(folder, config)
    chunk_length, executed_horizon = chunk_sizes(folder, config)
    statistics = _one_statistics(folder)
    wanted = Statistics({name: statistics.feature(name, dims) for name, dims in ((STATE, STATE_DIM), (ACTION, ACTION_DIM))})
    return LerobotFolder(config, views, resolution, chunk_length, executed_horizon, _normalization(folder, config), wanted)


def chunk_sizes(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Actions of a chunk, and how many of them are executed.

    Raises CheckpointError for a policy that wants several observations, and for more actions executed than a chunk has.
    """
    if config.get("n_obs_steps", 1) != 1:
        raise CheckpointError(
            f"{folder}: n_obs_steps is {config['n_obs_steps']}; between two chunks no picture is rendered, so only policies with "
            "n_obs_steps 1 can act here"
        )
    if "n_action_steps" not in config:
        raise CheckpointError(f"{folder / 'config.json'} lacks n_action_steps; it is no policy of LeRobot 0.4 or later")
    executed = int(config["n_action_steps"])
    chunk_length = int(config.get("chunk_size", executed))
    if not 1 <= executed <= chunk_length:
        raise CheckpointError(
            f"{folder / 'config.json'}: n_action_steps is {executed}; it must be 1 to chunk_size, which is {chunk_length}"
        )
    return chunk_length, executed


def policy_views(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Our views in a LeRobot config's order, and the pixels of their sides.

    Empty cameras, which LeRobot masks, are left out. Raises CheckpointError for features that LIBERO does not have.
    """
    inputs = dict(config.get("input_features") or {})
    names: dict[str, str] = {policy: env for env, policy in _rename_map(folder).items()}
    pictures = {key: inputs[key]["shape"] for key in inputs if inputs[key]["type"] == "VISUAL" and not key.startswith(_EMPTY_CAMERA)}
    views = tuple(str(names.get(key, key)).removeprefix(IMAGES) for key in pictures)
    unknown = [view for view in views if view not in VIEWS]
    if unknown or not views:
        raise CheckpointError(
            f"{folder} looks at {', '.join(pictures) or 'nothing'}; LIBERO's pictures are {', '.join(IMAGES + view for view in VIEWS)}. "
            f"If they are the same cameras, set rename_map of rename_observations_processor in {_PREPROCESSOR}.json"
        )
    for feature, given, dims in ((STATE, inputs, STATE_DIM), (ACTION, dict(config.get("output_features") or {}), ACTION_DIM)):
        shape = list(given.get(feature, {}).get("shape", [dims]))
        if shape != [dims]:
            raise CheckpointError(f"{folder}: {feature} has shape {shape}, LIBERO's is [{dims}]; the policy is for another robot")
    sides = {side for shape in pictures.values() for side in shape[1:]}
    if len(sides) != 1:
        raise CheckpointError(f"{folder}: its pictures are {list(pictures.values())}; they must be square and of one size")
    return views, int(sides.pop())


def _rename_map(folder: Path) -> dict[str, str]:
    """Name in the env -> name in the policy."""
    steps = read_json(folder / f"{_PREPROCESSOR}.json").get("steps", [])
    found = [step.get("config", {}).get("rename_map", {}) for step in steps if step.get("registry_name") == "rename_observations_processor"]
    return found[0] if found else {}


def _normalization(folder: Path, config: Mapping[str, Any]) -> Normalization:
    modes = {kind: config.get("normalization_mapping", {}).get(kind) for kind in ("STATE", "ACTION")}
    known = {lerobot: ours for ours, lerobot in _NORM_MODE.items()}
    if len(set(modes.values())) != 1 or modes["STATE"] not in known:
        raise CheckpointError(f"{folder}: normalization_mapping is {modes}; state and actions must share one of {', '.join(known)}")
    return known[modes["STATE"]]


def _one_statistics(folder: Path) -> Statistics:
    """The preprocessor's statistics, which must be the postprocessor's too, or actions would come back in other units."""
    statistics = read_statistics(folder)
    after = _statistics_of(folder, f"{_POSTPROCESSOR}_step_*_unnormalizer_processor.safetensors")
    if after.features.get(ACTION) != statistics.features.get(ACTION):
        raise StatisticsError(
            f"{folder}: the statistics of {ACTION!r} differ between {_PREPROCESSOR} and {_POSTPROCESSOR}; restore the files that were "
            "saved with the weights"
        )
    return statistics


def _config_fields(policy: PolicyModule, norm_map: dict[str, str]) -> dict[str, Any]:
    common = {
        "type": policy.config.family,
        "n_obs_steps": 1,
        "input_features": _inputs(policy.spec),
        "output_features": _outputs(),
        "chunk_size": policy.config.chunk_length,
        "n_action_steps": policy.config.executed_horizon,
        "normalization_mapping": norm_map,
        "push_to_hub": False,
    }
    return common | policy.lerobot_fields()


def _preprocessor_steps(policy: PolicyModule, norm_map: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All steps in LeRobot's order for the family, and the normaliser among them."""
    normalize = _step("normalizer_processor", eps=1e-8, features=_inputs(policy.spec) | _outputs(), norm_map=norm_map)
    tokenize = _step(
        "tokenizer_processor",
        max_length=policy.config.prompt_tokens,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=TOKENIZER_FOLDER,
    )
    start = [_step("rename_observations_processor", rename_map={}), _step("to_batch_processor")]
    return start + policy.lerobot_steps(normalize, tokenize, _device_step()), normalize


def _step(name: str, **settings: Any) -> dict[str, Any]:
    return {"registry_name": name, "config": settings}


def _device_step() -> dict[str, Any]:
    return _step("device_processor", device="cpu", float_dtype=None)


def _inputs(spec: PolicySpec) -> dict[str, Any]:
    image = {"type": "VISUAL", "shape": [3, spec.resolution, spec.resolution]}
    return {IMAGES + view: dict(image) for view in spec.views} | {STATE: {"type": "STATE", "shape": [STATE_DIM]}}


def _outputs() -> dict[str, Any]:
    return {ACTION: {"type": "ACTION", "shape": [ACTION_DIM]}}


def _statistics_tensors(statistics: Statistics) -> dict[str, torch.Tensor]:
    """float64, so that the statistics read back are the ones that were hashed; LeRobot casts them itself."""
    return {
        f"{feature}.{name}": torch.tensor(values, dtype=torch.float64)
        for feature, entry in statistics.to_dict().items()
        for name, values in entry.items()
    }
