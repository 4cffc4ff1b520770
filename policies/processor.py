"""The only way into a policy and out of it: images, state, prompt and actions to model space and back.

Shape legend: B batch; V views; H, W pixels; C actions per chunk; A, S action and state dimensions of the model (padded);
L prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.episode import ACTION_DIM, STATE_DIM, Observation
from vla_rl.errors import UserError
from vla_rl.policies.base import Batch
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics, StatisticsError
from vla_rl.policies.tokenizer import PromptTokenizer, TokenizerError

IMAGES = "observation.images."
"""LeRobot's prefix of image features; the view's name follows."""
STATE_BINS = 256
"""Bins of pi0.5's discretised state over [-1, 1]."""
_EPS = 1e-8
"""LeRobot's guard against division by zero."""


class ProcessorError(UserError):
    """Input that does not fit the policy: names the feature, what was expected and what came."""


class Normalization(str, Enum):
    """How state and actions are brought to model space, from fixed statistics."""

    MEAN_STD = "mean_std"
    """(x - mean) / std."""
    MIN_MAX = "min_max"
    """[min, max] -> [-1, 1]."""
    QUANTILES = "quantiles"
    """[q01, q99] -> [-1, 1], not clipped."""


@dataclass(frozen=True)
class ProcessorConfig:
    """What a processor needs to know besides statistics and tokenizer."""

    views: tuple[str, ...]
    """Views in the order in which the model reads them."""
    image_size: int
    """Pixels of a side of the model's input."""
    pad_images: bool
    """Pad an image that is not square (keeps proportions), or stretch it."""
    normalization: Normalization
    """Of state and actions."""
    write_prompt: Callable[[str, np.ndarray], str]
    """The text to tokenize, from the prompt and the normalised state float32[8]: `prompt_line`, `prompt_with_state`, ..."""
    model_state_dim: int
    """State dimensions of the model, at least 8; the rest is zeros."""
    model_action_dim: int
    """Action dimensions of the model, at least 7; the rest is zeros."""
    chunk_length: int
    """Actions per chunk."""
    clip: bool = False
    """Cut normalised states and sampled actions to [-1, 1], as GR00T's processor does with outliers."""
    crop: float = 1.0
    """Share of each side of an image that is kept, around its centre, before it is resized (GR00T N1.7: 230 / 256); above 0, at most 1."""


class Affine:
    """x -> (x - offset) / scale per dimension, and back. A constant dimension goes to x - offset, and comes back as the constant.

    A low end above the high one turns a dimension around: GR00T's gripper is 1 when open, the env's -1.
    """

    def __init__(self, stats: FeatureStats, normalization: Normalization) -> None:
        if normalization is Normalization.MEAN_STD:
            offset, scale = stats.vector("mean"), stats.vector("std")
        else:
            low, high = map(stats.vector, ("min", "max") if normalization is Normalization.MIN_MAX else ("q01", "q99"))
            offset, scale = (low + high) / 2, (high - low) / 2
        constant = np.abs(scale) < _EPS
        scale = scale + np.where(scale < 0, -_EPS, _EPS)
        self.offset = torch.from_numpy(offset).float()
        self.scale = torch.from_numpy(np.where(constant, 1.0, scale)).float()
        self.inverse_scale = torch.from_numpy(np.where(constant, 0.0, scale)).float()

    def forward(self, values: Tensor) -> Tensor:
        """Environment units -> model space, along the last dimension."""
        return (values - self.offset) / self.scale

    def inverse(self, values: Tensor) -> Tensor:
        """Model space -> environment units."""
        return values * self.inverse_scale + self.offset


class Processor:
    """Deterministic; holds no parameters; saved and loaded with the weights (`policies/checkpoint.py`)."""

    def __init__(self, config: ProcessorConfig, statistics: Statistics, tokenizer: PromptTokenizer) -> None:
        """Raises ProcessorError when the statistics do not fit the features."""
        self.config, self.statistics, self.tokenizer = config, statistics, tokenizer
        features = [STATE, ACTION, *(IMAGES + view for view in config.views)]
        try:
            statistics.require_only(features)
            self.state = Affine(statistics.feature(STATE, STATE_DIM), config.normalization)
            self.action = Affine(statistics.feature(ACTION, ACTION_DIM), config.normalization)
        except StatisticsError as error:
            raise ProcessorError(str(error)) from error

    def preprocess(
        self,
        observations: Sequence[Observation],
        actions_BCA: np.ndarray | None = None,
        action_mask_BC: np.ndarray | None = None,
    ) -> Batch:
        """See `Policy.preprocess`. Raises ProcessorError naming feature, expected and got."""
        if not observations:
            raise ProcessorError("preprocess needs at least one observation, got none")
        refuse_privileged(observations)
        images_BVCHW = torch.stack([self._images(observations, view) for view in self.config.views], 1)
        state_BS = self.state.forward(stack_states(observations))
        state_BS = state_BS.clamp(-1.0, 1.0) if self.config.clip else state_BS
        tokens_BL, token_mask_BL = self._tokens([observation.prompt for observation in observations], state_BS)
        batch = Batch(images_BVCHW, _pad_last(state_BS, self.config.model_state_dim), tokens_BL, token_mask_BL)
        if actions_BCA is not None:
            batch.actions_BCA, batch.action_mask_BC = self._actions(len(observations), actions_BCA, action_mask_BC)
        return batch

    def postprocess(self, actions_BCA: Tensor) -> np.ndarray:
        """float32[B, C, 7] in environment units, clipped to [-1, 1]."""
        real = actions_BCA.detach()[..., :ACTION_DIM].float().cpu()
        real = real.clamp(-1.0, 1.0) if self.config.clip else real
        return self.action.inverse(real).clamp(-1.0, 1.0).numpy()

    def _images(self, observations: Sequence[Observation], view: str) -> Tensor:
        """float32[B, 3, H, W] in [-1, 1] of one view."""
        feature, size = IMAGES + view, self.config.image_size
        arrays = [checked_image(observation, view, feature) for observation in observations]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            raise ProcessorError(f"{feature}: one batch holds images of different shapes, {sorted(shapes)}; render them at one resolution")
        images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
        return resize(crop_center(images, self.config.crop), size, self.config.pad_images)

    def _tokens(self, prompts: list[str], state_BS: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self.tokenizer([self.config.write_prompt(prompt, state.numpy()) for prompt, state in zip(prompts, state_BS)])
        except TokenizerError as error:
            raise ProcessorError(f"task: {error}") from error

    def _actions(self, batch: int, actions_BCA: np.ndarray, action_mask_BC: np.ndarray | None) -> tuple[Tensor, Tensor]:
        expected = (batch, self.config.chunk_length, ACTION_DIM)
        _require(ACTION, np.asarray(actions_BCA), expected)
        mask = np.ones(expected[:2], bool) if action_mask_BC is None else np.asarray(action_mask_BC)
        if mask.shape != expected[:2] or mask.dtype != bool:
            raise ProcessorError(f"action mask: expected bool{list(expected[:2])}, got {mask.dtype}{list(mask.shape)}")
        actions = self.action.forward(torch.from_numpy(np.asarray(actions_BCA, np.float32)))
        return _pad_last(actions, self.config.model_action_dim), torch.from_numpy(mask)


def crop_center(images: Tensor, share: float) -> Tensor:
    """uint8[B, 3, H, W] -> uint8[B, 3, round(share H), round(share W)] around the centre, half a pixel up and left where it must."""
    height, width = (round(side * share) for side in images.shape[-2:])
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]


def resize(images: Tensor, size: int, pad: bool) -> Tensor:
    """uint8[B, 3, H, W] -> float32[B, 3, size, size] in [-1, 1].

    Bilinear without antialiasing, as openpi's PyTorch port and LeRobot do; an exact halving is then the mean of 2x2
    pixels. A larger exact reduction averages its cells, where plain bilinear would skip pixels. Padding is black and centred.
    """
    height, width = images.shape[-2:]
    values = images.float() / 127.5 - 1.0
    if (height, width) == (size, size):
        return values
    if height == width and height % size == 0:
        return F.avg_pool2d(values, height // size)
    if not pad:
        return F.interpolate(values, (size, size), mode="bilinear", align_corners=False)
    ratio = max(height, width) / size
    inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
    values = F.interpolate(values, inner, mode="bilinear", align_corners=False)
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    return F.pad(values, (left, size - inner[1] - left, top, size - inner[0] - top), value=-1.0)


def prompt_line(prompt: str, state_S: np.ndarray) -> str:
    """pi0's prompt: the task and one line break (openpi `PaligemmaTokenizer.tokenize`)."""
    return prompt if prompt.endswith("\n") else prompt + "\n"


def prompt_with_state(prompt: str, state_S: np.ndarray) -> str:
    """pi0.5's prompt: the task, and the normalised state as bins of [-1, 1] (openpi `PaligemmaTokenizer.tokenize`)."""
    edges = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
    bins = " ".join(str(number) for number in np.digitize(state_S, edges) - 1)
    cleaned = prompt.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {cleaned}, State: {bins};\nAction: "


def refuse_privileged(observations: Sequence[Observation]) -> None:
    """Raise ProcessorError for an observation that carries simulator truth."""
    for observation in observations:
        if observation.privileged:
            raise ProcessorError(
                f"the observation carries privileged information ({', '.join(sorted(observation.privileged))}), which a policy must "
                "not see; only actors that declare `privileged` (scripted experts) may ask for it"
            )


def checked_image(observation: Observation, view: str, feature: str) -> np.ndarray:
    """The picture uint8[H, W, 3] of a view. Raises ProcessorError naming the feature for another kind, or none."""
    if view not in observation.images:
        raise ProcessorError(f"{feature} is missing; the observation has the views {', '.join(observation.images) or 'none'}")
    image = observation.images[view]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ProcessorError(f"{feature}: expected uint8[H, W, 3], got {image.dtype}{list(image.shape)}")
    return image


def stack_states(observations: Sequence[Observation]) -> Tensor:
    """float32[B, 8]. Raises ProcessorError for a state of another shape or dtype, or with values that are not finite."""
    for observation in observations:
        _require(STATE, observation.state, (STATE_DIM,))
    return torch.from_numpy(np.stack([observation.state for observation in observations]))


def _require(feature: str, values: np.ndarray, expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        unlike = [index for index, (want, got) in enumerate(zip(expected, values.shape)) if want != got]
        where = f"dimension {unlike[0]}" if unlike and len(values.shape) == len(expected) else "number of dimensions"
        raise ProcessorError(f"{feature}: expected shape {list(expected)}, got {list(values.shape)} ({where} differs)")
    if values.dtype != np.float32:
        raise ProcessorError(f"{feature}: expected float32, got {values.dtype}")
    if not np.isfinite(values).all():
        wrong = np.argwhere(~np.isfinite(values))
        raise ProcessorError(f"{feature}: {len(wrong)} values are not finite, the first at index {wrong[0].tolist()}")


def _pad_last(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[-1]))
