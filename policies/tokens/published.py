"""OpenVLA's names for our parameters, and its prompt.

From openvla-oft: `prismatic/extern/hf/modeling_prismatic.py`, `experiments/robot/openvla_utils.py`.
"""

from __future__ import annotations

import numpy as np

_PREFIXES = (
    ("model.vision.dino.", "vision_backbone.featurizer."),
    ("model.vision.siglip.", "vision_backbone.fused_featurizer."),
    ("model.projector.", "projector."),
    ("model.language.", "language_model."),
)
"""(our prefix, the published one); every other name is the same on both sides."""
_GAIN, _PUBLISHED_GAIN = ".gamma", ".scale_factor"
"""DINOv2's gains of residual branches, which transformers of that time would have renamed."""


def openvla_name(name: str) -> str:
    """The published name of one of our parameters."""
    for ours, published in _PREFIXES:
        if name.startswith(ours):
            return published + _with_suffix(name.removeprefix(ours), _GAIN, _PUBLISHED_GAIN)
    return name


def own_name(name: str) -> str:
    """Our name of a published parameter, the inverse of `openvla_name`."""
    for ours, published in _PREFIXES:
        if name.startswith(published):
            return ours + _with_suffix(name.removeprefix(published), _PUBLISHED_GAIN, _GAIN)
    return name


def openvla_prompt(prompt: str, state_S: np.ndarray) -> str:
    """What OpenVLA reads: a question, and the mark of an answer, whose space is a token of its own in Llama's vocabulary (29871)."""
    return f"In: What action should the robot take to {prompt.lower()}?\nOut: "


def _with_suffix(name: str, before: str, after: str) -> str:
    return name.removesuffix(before) + after if name.endswith(before) else name
