"""The small perceptrons that heads are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

OUTPUT_STD = 0.02
"""Spread of the last layer's first weights: heads begin near 0 and still pass a gradient back."""


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Linear layers with SiLU between them, from `inputs` to `outputs` features.

    Hidden weights are Kaiming's (fan out), the last ones N(0, `OUTPUT_STD`^2), all biases 0 (as RLinf's value heads).
    """
    widths = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, mode="fan_out")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.SiLU()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    nn.init.normal_(last.weight, std=OUTPUT_STD)
    return nn.Sequential(*layers[:-1])
