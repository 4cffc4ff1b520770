"""The text before the actions: what it says in demonstrations, and whether a policy's text has the right form.

Demonstrations have no reasoning of their own, so it is written from what they do next: the motion of the chunk in words
(the "movement" of embodied chain-of-thought, Zawalski et al. 2024), such as "left bottom open".
The words are those of LIBERO's instructions, so that the shipped tokenizer has one token for each.

Shape legend: B batch;  C actions per chunk;  R reasoning tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vla_rl.policies.tokenizer import PromptTokenizer
from vla_rl.policies.tokens.vocabulary import Vocabulary

AXES = (("front", "back"), ("left", "right"), ("top", "bottom"))
"""Words for the positive and the negative direction of the first three action dimensions (the robot's base: x ahead, y left, z up)."""
LEAST_MOTION = 0.1
"""Mean action of a chunk along an axis from which on the motion is named; 1 is the controller's largest step."""
STILL = "middle"
"""Where no axis is named."""


def motion_text(actions_CA: np.ndarray, mask_C: np.ndarray) -> str:
    """The motion of the real actions of a chunk (environment units) in words, and what the gripper does at its end."""
    real = actions_CA[mask_C] if mask_C.any() else actions_CA[:1]
    mean = real[:, : len(AXES)].mean(0)
    words = [AXES[axis][0 if mean[axis] > 0 else 1] for axis in range(len(AXES)) if abs(mean[axis]) >= LEAST_MOTION]
    return " ".join([*(words or [STILL]), "close" if real[-1, -1] > 0 else "open"])


class ReasoningWriter:
    """Turns demonstrations' motion into reasoning tokens."""

    def __init__(self, tokenizer: PromptTokenizer, length: int, vocabulary: Vocabulary) -> None:
        """`length` is R, the end mark included."""
        self._tokenizer = PromptTokenizer(tokenizer.folder, length - 1, "reasoning_tokens", kept=1)
        self._length, self._vocabulary = length, vocabulary

    def __call__(self, actions_BCA: np.ndarray, mask_BC: np.ndarray) -> tuple[Tensor, Tensor]:
        """int64[B, R] and bool[B, R]: text, then the end mark. Raises TokenizerError where R is too short for the text."""
        text_BR, real_BR = self._tokenizer([motion_text(actions, mask) for actions, mask in zip(actions_BCA, mask_BC)])
        tokens_BR = torch.cat((text_BR, text_BR.new_zeros(len(text_BR), 1)), 1)
        mask_BR = torch.cat((real_BR.new_ones(len(real_BR), 1), real_BR), 1)
        tokens_BR.scatter_(1, real_BR.sum(1, keepdim=True), self._vocabulary.end_think)
        return tokens_BR, mask_BR


def well_formed(tokens_BR: Tensor, mask_BR: Tensor, vocabulary: Vocabulary) -> Tensor:
    """bool[B]: the reasoning says something and was closed within its length (the format reward of DeepThinkVLA)."""
    last_B1 = (mask_BR.sum(1, keepdim=True) - 1).clamp(min=0)
    closed_B = tokens_BR.gather(1, last_B1)[:, 0] == vocabulary.end_think
    return closed_B & (mask_BR.sum(1) > 1)
