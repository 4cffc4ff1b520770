"""Small policies behind servers: tests read exactly what reached the policy from what it answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_rl.episode import ACTION_DIM, Float32, Observation
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.processor import ProcessorError

CHUNK = 4


@dataclass
class Rows:
    """A batch of the echo policy."""

    values_BA: Tensor

    def to(self, device: torch.device | str) -> Rows:
        """The same rows."""
        return self


class EchoPolicy:
    """Answers with the state's first seven numbers in every action, plus the corner pixel and the noise seed in fixed places.

    `gate`, if given, holds every forward pass until it is set; `entered` says that one has begun. A prompt `wrong` is refused,
    a prompt `bug` makes the policy itself fail.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.spec = PolicySpec(CHUNK, CHUNK, resolution=64)
        self.batches: list[int] = []
        """Different states in each batch."""
        self.entered = threading.Event()
        self._gate = gate

    def preprocess(self, observations: Sequence[Observation]) -> Rows:
        """States and corner pixels as numbers."""
        for observation in observations:
            if observation.prompt == "wrong":
                raise ProcessorError("task: this prompt is refused")
            if observation.prompt == "bug":
                raise RuntimeError("a bug in the policy")
        self.batches.append(len({id(observation) for observation in observations}))
        rows = [[*observation.state[:5], observation.images["image"][0, 0, 0], 0.0] for observation in observations]
        return Rows(torch.tensor(np.asarray(rows, np.float32)))

    def act(self, batch: Rows, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """The rows as chunks, with the seeds in the last place."""
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(20.0)
        values_BA = batch.values_BA.clone()
        values_BA[:, ACTION_DIM - 1] = torch.tensor([float(seed % 1000) for seed in noise_seeds])
        return PolicyOutput(values_BA[:, None].repeat(1, CHUNK, 1))

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """Unchanged."""
        return actions_BCA.numpy()
