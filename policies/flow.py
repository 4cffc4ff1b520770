"""Flow matching in one place: time, path, target and the deterministic sampler, for both directions of time.

Shape legend: B batch; C actions per chunk; A action dimensions of the model. All tensors are float32.

The papers disagree on which end of [0, 1] is noise. `TimeDirection` names the choice, and everything else is
written in it once, with `tau` in [0, 1] for the *share of noise*:

    x = tau * noise + (1 - tau) * actions          (the straight path of rectified flow, Lipman et al. 2023)
    NOISE_AT_ONE  (pi0, pi0.5, SmolVLA):  t = tau,      velocity dx/dt = noise - actions,  t runs 1 -> 0
    NOISE_AT_ZERO (GR00T):                t = 1 - tau,  velocity dx/dt = actions - noise,  t runs 0 -> 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(x_t float32[B, C, A], time float32[B]) -> velocity float32[B, C, A]."""


class TimeDirection(str, Enum):
    """Which end of the flow's time is noise."""

    NOISE_AT_ONE = "noise_at_one"
    """t = 1 is noise and t = 0 is data (pi0, pi0.5, SmolVLA)."""
    NOISE_AT_ZERO = "noise_at_zero"
    """t = 0 is noise and t = 1 is data (GR00T, ReinFlow)."""


@dataclass(frozen=True)
class Flow:
    """A flow-matching convention; see the module's docstring."""

    direction: TimeDirection
    """Which end of time is noise."""
    beta_alpha: float = 1.5
    """alpha of the Beta(alpha, 1) from which training draws the share of noise: above 1 favours noisy times. > 0."""
    time_scale: float = 0.999
    """Share of noise = scale * Beta + offset, so that it never reaches 0 exactly. In (0, 1]."""
    time_offset: float = 0.001
    """See `time_scale`; scale + offset must not exceed 1."""

    def time_of(self, noise_share: Tensor) -> Tensor:
        """The flow time t at which `noise_share` of x is noise (an involution: it also maps t to the share)."""
        return noise_share if self.direction is TimeDirection.NOISE_AT_ONE else 1.0 - noise_share

    def sample_time(self, uniform: Tensor) -> Tensor:
        """Training times from uniform numbers in [0, 1): Beta(alpha, 1) by inversion of its distribution u = x^alpha."""
        share = uniform.pow(1.0 / self.beta_alpha) * self.time_scale + self.time_offset
        return self.time_of(share)

    def path(self, actions_BCA: Tensor, noise_BCA: Tensor, time_B: Tensor) -> Tensor:
        """x_t float32[B, C, A]: the point of the straight line between data and noise at time t."""
        share = self.time_of(time_B)[:, None, None]
        return share * noise_BCA + (1.0 - share) * actions_BCA

    def target(self, actions_BCA: Tensor, noise_BCA: Tensor) -> Tensor:
        """The velocity dx/dt that the model learns, float32[B, C, A]; the same at every time."""
        return self._sign * (noise_BCA - actions_BCA)

    def endpoints(self, x_BCA: Tensor, velocity_BCA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor]:
        """(actions, noise) that a velocity implies at x_t: where the straight line meets both ends of time."""
        share = self.time_of(time_B)[:, None, None]
        away = self._sign * velocity_BCA
        return x_BCA - share * away, x_BCA + (1.0 - share) * away

    def grid(self, steps: int) -> list[float]:
        """The `steps` + 1 times of the sampler, from noise to data."""
        shares = [1.0 - index / steps for index in range(steps)] + [0.0]
        return shares if self.direction is TimeDirection.NOISE_AT_ONE else [1.0 - share for share in shares]

    def euler(self, velocity: VelocityFn, noise_BCA: Tensor, steps: int) -> Tensor:
        """Integrate from noise to data in `steps` equal Euler steps; returns actions float32[B, C, A]."""
        x_BCA, grid = noise_BCA, self.grid(steps)
        for time, following in pairwise(grid):
            time_B = torch.full((len(x_BCA),), time, dtype=torch.float32, device=x_BCA.device)
            x_BCA = x_BCA + (following - time) * velocity(x_BCA, time_B)
        return x_BCA

    @property
    def _sign(self) -> float:
        """Velocity = sign * (noise - actions)."""
        return 1.0 if self.direction is TimeDirection.NOISE_AT_ONE else -1.0


@dataclass(frozen=True)
class RowNoise:
    """The random numbers of each row, from that row's seed alone."""

    noise_BCA: Tensor
    """float32[B, C, A], standard normal."""
    uniform_B: Tensor
    """float32[B] in [0, 1), for the training time."""
    shift_BK: Tensor
    """float32[B, K] in [0, 1), for augmentation."""


def row_noise(seeds: Sequence[int], chunk_shape: tuple[int, int], uniforms: int, device: torch.device) -> RowNoise:
    """Draw the numbers of every row with a generator of its own, so that no row depends on the rest of the batch.

    `chunk_shape` is (C, A); `uniforms` is K. The numbers are drawn on the CPU: they are the same on every device.
    """
    noise_BCA = torch.empty(len(seeds), *chunk_shape)
    uniform_BK = torch.empty(len(seeds), 1 + uniforms)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        generator.manual_seed(int(seed))
        torch.randn(chunk_shape, generator=generator, out=noise_BCA[row])
        torch.rand(1 + uniforms, generator=generator, out=uniform_BK[row])
    noise_BCA, uniform_BK = noise_BCA.to(device), uniform_BK.to(device)
    return RowNoise(noise_BCA, uniform_BK[:, 0], uniform_BK[:, 1:])
