"""The JSON and statistics files of a LeRobot policy folder: what LeRobot needs to read config and processors of our policies.

Format of LeRobot 0.6: `config.json` (type and fields), `policy_preprocessor.json` and `policy_postprocessor.json`
(a list of steps by registry name), and one safetensors file with the statistics beside each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vla_rl.episode import ACTION_DIM, STATE_DIM
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.processor import IMAGES, Normalization
from vla_rl.policies.statistics import ACTION, STATE, Statistics, StatisticsError
from vla_rl.telemetry.files import write_json

TOKENIZER_FOLDER = "tokenizer"
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
    found = sorted(folder.glob(f"{_PREPROCESSOR}_step_*_normalizer_processor.safetensors"))
    if len(found) != 1:
        raise StatisticsError(f"{folder} must hold one {_PREPROCESSOR}_step_N_normalizer_processor.safetensors, it holds {len(found)}")
    values: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(found[0], "pt") as file:
            for key in file.keys():  # noqa: SIM118 (a safetensors file is no dict)
                feature, _, name = key.rpartition(".")
                values.setdefault(feature, {})[name] = file.get_tensor(key).numpy()
    except (SafetensorError, OSError) as error:
        raise StatisticsError(f"{found[0]} cannot be read ({error}); the file is damaged or truncated, restore the checkpoint") from error
    return Statistics.from_dict(values)


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
