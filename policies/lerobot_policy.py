"""Any policy that LeRobot saved, as one that acts here: LeRobot's own network and its own processors, batched over envs.

    policy = load_lerobot_policy(Path("outputs/train/act_libero/checkpoints/last/pretrained_model"))
    PolicyActor(policy, batch_size=4)

Its conventions are those of LeRobot's LIBERO env (pictures turned by 180 degrees, -1 opens). It acts and is served; it does not train here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, Float32, Observation
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.lerobot_files import chunk_sizes, policy_views
from vla_rl.policies.processor import IMAGES, ProcessorError, checked_image, refuse_privileged, stack_states
from vla_rl.policies.published import CONFIG_FILE, read_json
from vla_rl.policies.row_random import RowRandom
from vla_rl.policies.statistics import STATE
from vla_rl.policies.tensor_files import CheckpointError

STEPPED = ("diffusion",)
"""Types whose network wants a dimension of observation steps after the batch, also for one step."""
PROCESSOR_FILES = ("policy_preprocessor.json", "policy_postprocessor.json")


@dataclass(frozen=True)
class LerobotBatch:
    """What LeRobot's preprocessor made of observations."""

    values: dict[str, Any]

    def to(self, device: torch.device | str) -> LerobotBatch:
        """The same batch on another device."""
        return LerobotBatch({name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.values.items()})


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
        frame: dict[str, Any] = {STATE: stack_states(observations), "task": [observation.prompt for observation in observations]}
        for view in self.spec.views:
            feature = IMAGES + view
            pictures = np.stack([checked_image(observation, view, feature) for observation in observations])
            frame[feature] = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255.0
        return LerobotBatch(self._preprocessor(frame))

    def act(self, batch: LerobotBatch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """LeRobot's chunk for every row; a row's noise comes from its seed alone. Raises ProcessorError for exploration."""
        if exploration is not None:
            raise ProcessorError(f"LeRobot's {self.policy.config.type} records no transitions, so it cannot explore for a learner")
        values = dict(batch.values)
        if self.policy.config.type in STEPPED:
            values[STATE] = values[STATE][:, None]
        self.policy.reset()
        with torch.random.fork_rng(devices=[]), RowRandom(noise_seeds):
            return PolicyOutput(self.policy.predict_action_chunk(values))

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """float32[B, C, 7] in environment units, clipped to [-1, 1], through the policy's own postprocessor."""
        actions = self._postprocessor(actions_BCA.detach())
        return actions[..., :ACTION_DIM].float().cpu().clamp(-1.0, 1.0).numpy()


def load_lerobot_policy(folder: Path, device: torch.device | str = "cpu") -> LerobotPolicy:
    """The policy that LeRobot saved in a folder, whatever its type.

    Raises CheckpointError for missing processors, weights that do not fit strictly, and whatever else LeRobot refuses.
    """
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    for name in PROCESSOR_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} lacks {name}; fetch the whole folder, or bring a checkpoint from before LeRobot 0.4 up to date with its "
                "migrate_policy_normalization script"
            )
    fields = read_json(folder / CONFIG_FILE)
    views, resolution = policy_views(folder, fields)
    chunk_length, executed_horizon = chunk_sizes(folder, fields)
    try:
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = str(device)
        config.pretrained_path = folder
        policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        overrides = {"device_processor": {"device": str(device)}}
        before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"LeRobot cannot load {folder} ({fields['type']}): {type(error).__name__}: {error}") from error
    spec = PolicySpec(chunk_length, executed_horizon, views, resolution, Conventions())
    return LerobotPolicy(policy.to(device).eval(), before, after, spec)
