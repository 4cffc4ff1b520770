"""Any policy that LeRobot saved, as one that acts here: LeRobot's own network and its own processors, batched over envs.

    policy = load_lerobot_policy(Path("outputs/train/act_libero/checkpoints/last/pretrained_model"))
    PolicyActor(policy, batch_size=4)

Its conventions are those of LeRobot's LIBERO env (pictures turned by 180 degrees, -1 opens). It acts and is served; it does not train here.

Shape legend: B batch; C actions per chunk; A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.episode import ACTION_DIM, Float32, Observation
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.lerobot_foreign import (
    MASKED_PADDING,
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    foreign_spec,
    hub_models,
    inside_models,
    processor_overrides,
)
from vla_rl.policies.processor import IMAGES, ProcessorError, checked_image, refuse_privileged, stack_states
from vla_rl.policies.published import CONFIG_FILE, read_json
from vla_rl.policies.row_random import RowRandom
from vla_rl.policies.statistics import STATE
from vla_rl.policies.tensor_files import CheckpointError

STEPPED = ("diffusion",)
"""Types whose network wants a dimension of observation steps after the batch, also for one step."""
IMPORTED_LATE = {"groot": ("tree",)}
"""Modules that LeRobot's code of a type would only miss when it acts."""
PROMPTS_TOGETHER = ("act", "diffusion", *MASKED_PADDING)
"""Types whose rows do not see the length of each other's prompts: they read none, or mask what pads it. Others may read padding (GR00T's
self-attention does), so each of their forwards takes rows of one prompt."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that share a forward, as LeRobot's preprocessor prepared them."""

    places: tuple[int, ...]
    """Where they are in the batch, and in the forward, which is as large: a row's bits do not depend on who else is in its group."""
    rows: tuple[int, ...]
    """The row in every place of the forward: the batch's own in `places`, the first of these in the others."""
    values: dict[str, Any]
    """What the preprocessor made of `rows`."""


@dataclass(frozen=True)
class LerobotBatch:
    """What LeRobot's preprocessor made of observations."""

    groups: tuple[RowGroup, ...]
    """Every row of the batch is in one of them."""

    def to(self, device: torch.device | str) -> LerobotBatch:
        """The same batch on another device."""
        return LerobotBatch(tuple(replace(group, values=_moved(group.values, device)) for group in self.groups))


class LerobotPolicy:
    """A `PreTrainedPolicy` behind the part of the policy contract that acts (`policies/inference.py`)."""

    def __init__(self, policy: Any, preprocessor: Any, postprocessor: Any, spec: PolicySpec) -> None:
        self.spec = spec
        self.policy = policy
        """LeRobot's policy, for `predict_action_chunk`."""
        self._preprocessor, self._postprocessor = preprocessor, postprocessor

    def preprocess(self, observations: Sequence[Observation]) -> LerobotBatch:
        """Observations as LeRobot's env hands them out, through the policy's own preprocessor.

        Raises ProcessorError for a missing view, another shape or dtype, and privileged information.
        """
        refuse_privileged(observations)
        groups = []
        for places in self._places(observations):
            rows = tuple(place if place in places else places[0] for place in range(len(observations)))
            groups.append(RowGroup(places, rows, self._prepared([observations[row] for row in rows])))
        return LerobotBatch(tuple(groups))

    def _places(self, observations: Sequence[Observation]) -> list[tuple[int, ...]]:
        """Which rows of the batch go into one forward."""
        if self.policy.config.type in PROMPTS_TOGETHER:
            return [tuple(range(len(observations)))]
        places: dict[str, list[int]] = {}
        for place, observation in enumerate(observations):
            places.setdefault(observation.prompt, []).append(place)
        return [tuple(group) for group in places.values()]

    def _prepared(self, observations: Sequence[Observation]) -> dict[str, Any]:
        frame: dict[str, Any] = {STATE: stack_states(observations), "task": [observation.prompt for observation in observations]}
        for view in self.spec.views:
            feature = IMAGES + view
            pictures = np.stack([checked_image(observation, view, feature) for observation in observations])
            frame[feature] = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255.0
        return self._preprocessor(frame)

    def act(self, batch: LerobotBatch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """LeRobot's chunk for every row; a row's noise comes from its seed alone. Raises ProcessorError for exploration."""
        if exploration is not None:
            raise ProcessorError(f"LeRobot's {self.policy.config.type} records no transitions, so it cannot explore for a learner")
        self.policy.reset()
        chunks = [(group.places, self._chunk(group, noise_seeds)) for group in batch.groups]
        actions_BCA = torch.zeros_like(chunks[0][1])
        for places, chunk_BCA in chunks:
            actions_BCA[list(places)] = chunk_BCA[list(places)]
        return PolicyOutput(actions_BCA)

    def _chunk(self, group: RowGroup, noise_seeds: Sequence[int]) -> Tensor:
        values = dict(group.values)
        if self.policy.config.type in STEPPED:
            values[STATE] = values[STATE][:, None]
        with torch.random.fork_rng(devices=[]), RowRandom([noise_seeds[row] for row in group.rows]):
            return self.policy.predict_action_chunk(values)

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """float32[B, C, 7] in environment units, clipped to [-1, 1], through the policy's own postprocessor."""
        actions = self._postprocessor(actions_BCA.detach())
        return actions[..., :ACTION_DIM].float().cpu().clamp(-1.0, 1.0).numpy()


def load_lerobot_policy(folder: Path, device: torch.device | str = "cpu") -> LerobotPolicy:
    """The policy that LeRobot saved in a folder, whatever its type.

    Raises CheckpointError for missing processors, weights that do not fit strictly, actions relative to the state, and whatever else
    LeRobot refuses.
    """
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    for name in (PREPROCESSOR_FILE, POSTPROCESSOR_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} lacks {name}; fetch the whole folder, or bring a checkpoint from before LeRobot 0.4 up to date with its "
                "migrate_policy_normalization script"
            )
    fields = read_json(folder / CONFIG_FILE)
    spec = foreign_spec(folder, fields)
    try:
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = str(device)
        config.pretrained_path = folder
        for name, value in inside_models(folder, fields).items():
            setattr(config, name, value)
        for module in IMPORTED_LATE.get(config.type, ()):
            import_module(module)
        policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        overrides = processor_overrides(folder, fields, str(device))
        before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, ImportError) as error:
        remedy = _remedy(folder, fields, error)
        raise CheckpointError(f"LeRobot cannot load {folder} ({fields['type']}): {type(error).__name__}: {error}{remedy}") from error
    return LerobotPolicy(policy.to(device).eval(), before, after, spec)


def _remedy(folder: Path, fields: Mapping[str, Any], error: Exception) -> str:
    if isinstance(error, ImportError):
        return ". Install what LeRobot's policies need with: pip install 'vla-rl[lerobot-policies]'"
    names = hub_models(folder, fields) if isinstance(error, OSError) else []
    if not names:
        return ""
    places = ", ".join(str(folder / name) for name in names)
    return f". It is built on {', '.join(names)}; without the Hugging Face hub, put their files into {places}"


def _moved(values: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
