"""What the policies of all families share: the way in and out, what trains, and names on disk.

A family is a subclass with a network of its own; see `docs/policies.md`, "Adding a family".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.episode import ACTION_DIM, STATE_DIM, Observation
from vla_rl.policies.base import Batch, LossSums, PolicyOutput, PolicySpec, ScoredTransitions
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.processor import Normalization, Processor, ProcessorConfig
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import PromptTokenizer

HEADS = ("critic.", "noise_head.")
"""Prefixes of the names of the weights of heads that reinforcement learning adds."""
LEAST_SIZES = {
    "denoise_steps": 1,
    "prompt_tokens": 1,
    "shift_pixels": 0,
    "model_state_dim": STATE_DIM,
    "model_action_dim": ACTION_DIM,
}
"""Smallest values of fields that configs share; a model must have room for the environment's state and actions."""


class FamilyConfig(Protocol):
    """The fields that the config of every family has."""

    @property
    def family(self) -> str:
        """Name of the family, the tag by which recipes and checkpoints find the config's class."""
        ...

    @property
    def chunk_length(self) -> int:
        """Actions predicted at once."""
        ...

    @property
    def executed_horizon(self) -> int:
        """Actions executed before the next look."""
        ...

    @property
    def tokenizer(self) -> str:
        """Folder with a `tokenizer.json`; empty for the shipped one."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Every prompt is padded to this many tokens."""
        ...

    @property
    def vocabulary(self) -> int:
        """Rows of the token embedding."""
        ...

    @property
    def pad_images(self) -> bool:
        """Whether an image that is not square is padded, or stretched."""
        ...

    @property
    def normalization(self) -> Normalization:
        """How state and actions are normalised."""
        ...


class PolicyModule(nn.Module, ABC):
    """A policy of some family; see `policies/base.py` for the contract that its subclasses fulfil."""

    def __init__(self, config: Any, spec: PolicySpec, processor: Processor) -> None:
        super().__init__()
        self.config, self.spec, self.processor = config, spec, processor

    def preprocess(
        self,
        observations: Sequence[Observation],
        actions_BCA: np.ndarray | None = None,
        action_mask_BC: np.ndarray | None = None,
    ) -> Batch:
        """See `Policy.preprocess`; the batch lies on the policy's device."""
        return self.processor.preprocess(observations, actions_BCA, action_mask_BC).to(self.device)

    def postprocess(self, actions_BCA: Tensor) -> np.ndarray:
        """See `Policy.postprocess`."""
        return self.processor.postprocess(actions_BCA)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @abstractmethod
    def act(self, batch: Batch, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """See `Policy.act`."""

    @abstractmethod
    def log_prob(self, batch: Batch, record: Any, exploration: Exploration) -> ScoredTransitions:
        """See `Policy.log_prob`."""

    @abstractmethod
    def value(self, batch: Batch) -> Tensor:
        """See `Policy.value`."""

    @abstractmethod
    def sft_loss(self, batch: Batch, noise_seeds: Sequence[int]) -> LossSums:
        """See `Policy.sft_loss`."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The layers to shard and to checkpoint one by one, in the order in which they run; each is entered through `forward` only."""

    @abstractmethod
    def backbone_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the names of the vision-language backbone's parameters, which `engine.trainable: expert` leaves alone."""

    def unread_parameters(self) -> Iterator[nn.Parameter]:
        """What published weights contain but no output depends on; it never trains."""
        yield from ()

    def freeze_unread(self) -> None:
        """For constructors: the parameters that no output depends on get no gradient and no optimizer state."""
        for parameter in self.unread_parameters():
            parameter.requires_grad_(False)

    def parameter_names(self, selection: Literal["all", "expert"]) -> list[str]:
        """Names of the parameters that train under a selection: everything, or all but the vision-language backbone.

        Raises ValueError for another selection.
        """
        if selection not in ("all", "expert"):
            raise ValueError(f"trainable parameters {selection!r} are not one of 'all', 'expert'")
        frozen = self.backbone_prefixes() if selection == "expert" else ()
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad and not name.startswith(frozen)]

    def head_names(self) -> list[str]:
        """Names of the parameters of heads that reinforcement learning adds: they start from random weights, so they learn in any case."""
        return [name for name, _ in self.named_parameters() if name.startswith(HEADS)]

    def published_name(self, name: str) -> str:
        """The name under which one of our tensors is saved: the published one, where the family has one."""
        return name

    def published_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our weights under published names, complete for the family's other readers."""
        return {self.published_name(name): tensor for name, tensor in weights.items()}

    def own_name(self, name: str, others: frozenset[str]) -> str | None:
        """Our name of a tensor in a file that also holds `others`; None for a copy of another tensor, which is not read."""
        return name

    def lerobot_fields(self) -> dict[str, Any]:
        """The family's own fields of LeRobot's `config.json`."""
        return {}

    def lerobot_steps(self, normalize: dict[str, Any], tokenize: dict[str, Any], device: dict[str, Any]) -> list[dict[str, Any]]:
        """LeRobot's preprocessing steps after renaming and batching, in the family's order; `normalize` is among them."""
        return [tokenize, device, normalize]


def check_sizes(config: FamilyConfig) -> None:
    """For configs. Raises ValueError for a field of `LEAST_SIZES` that is too small and a horizon beyond the chunk."""
    if not 1 <= config.executed_horizon <= config.chunk_length:
        raise ValueError(f"executed_horizon is {config.executed_horizon}, it must be 1 to chunk_length, which is {config.chunk_length}")
    for name, least in LEAST_SIZES.items():
        if getattr(config, name, least) < least:
            raise ValueError(f"{name} is {getattr(config, name)}, it must be at least {least}")


def make_processor(
    config: FamilyConfig,
    spec: PolicySpec,
    statistics: Statistics,
    tokenizer: PromptTokenizer,
    image_size: int,
    write_prompt: Callable[[str, np.ndarray], str],
    **more: Any,
) -> Processor:
    """For builders: the processor of a config, whose `image_size`, prompt form and `more` fields of `ProcessorConfig` are the family's own.

    Raises ConfigError when the spec, the tokenizer and the config contradict each other, ProcessorError for statistics that do not fit.
    """
    _check_agreement(config, spec, tokenizer)
    processor_config = ProcessorConfig(
        views=spec.views,
        image_size=image_size,
        pad_images=config.pad_images,
        normalization=config.normalization,
        write_prompt=write_prompt,
        model_state_dim=getattr(config, "model_state_dim", STATE_DIM),
        model_action_dim=getattr(config, "model_action_dim", ACTION_DIM),
        chunk_length=config.chunk_length,
        **more,
    )
    return Processor(processor_config, statistics, tokenizer)


def _check_agreement(config: FamilyConfig, spec: PolicySpec, tokenizer: PromptTokenizer) -> None:
    for name in ("chunk_length", "executed_horizon"):
        wanted, given = getattr(config, name), getattr(spec, name)
        if wanted != given:
            raise ConfigError(f"{name} is {given} in the policy's spec and {wanted} in its config; make them equal")
    if tokenizer.size > config.vocabulary:
        raise ConfigError(
            f"vocabulary is {config.vocabulary}, the tokenizer in {tokenizer.folder} has {tokenizer.size} tokens; raise vocabulary"
        )
