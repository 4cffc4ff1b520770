"""Flow policies as stochastic policies: denoise steps with a density, for reinforcement learning.

Shape legend: B batch;  C actions per chunk;  A action dimensions of the model;  D real action dimensions (the first of A);
              N denoise steps;  K recorded (stochastic) steps of a chunk, 1 or N;
              L live dimensions, those of D that reach the robot (`FlowPolicy.live_dims`).

In terms of the share of noise tau (see `policies/flow.py`), which runs from 1 to 0 on a grid of N equal steps delta = 1/N, and with
u = noise - actions, the velocity's direction whichever way time runs:

    ode         mean = x - delta u                                                           std = 0
    flow_sde    mean = x - delta u - (s^2 delta / (2 tau)) (x + (1 - tau) u)                 std = s sqrt(delta)
                s = a sqrt(tau / (1 - tau)); at tau = 1 the denominator takes the next grid point, so s_0 = a sqrt(N), std_0 = a
    flow_noise  mean = x - delta u                                                           std = learned, per dimension

`flow_sde` has, in the limit of small steps, the marginals of the ODE at every tau (Liu et al. 2025, Flow-GRPO; the form of RLinf's
pi0 recipes); `flow_noise` learns its spread (Zhang et al. 2025, ReinFlow). The unclipped sample carries the density, and the
log-probability of an action is summed over its L live dimensions and over the recorded steps.

With `noise_over: chunk` one draw moves all actions of a chunk alike, and the density is that of what was drawn: of the chunk's mean action,
N(mean_C(x); mean_C(mean), mean_C(std)^2). The other C - 1 directions of each dimension are deterministic and have no part in it. Every
action carries this one number whole, so that a ratio takes their mean, however many of them were executed.

Rollout and trainer both go through `_transition`, with the times of one table: equal weights and equal batch shapes give
log-ratios of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from vla_rl.errors import UserError
from vla_rl.policies.flow import Flow

SpreadVelocityFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(x_t float32[B, C, A], time float32[B]) -> (velocity float32[B, C, A], raw output of a noise head [B, C, A] or None)."""

_STREAM = 0x1E3779B97F4A7C15
"""Separates the seeds of the transitions' noise from those of the initial noise."""


@dataclass(frozen=True)
class Exploration:
    """How a policy explores while it learns. Evaluation integrates a flow's ODE, and takes the likeliest tokens."""

    method: Literal["flow_sde", "flow_noise", "tokens"] = "flow_sde"
    """`flow_sde`: noise from the flow's own schedule. `flow_noise`: a learned spread; the policy needs a noise head.
    `tokens`: samples of a token policy."""
    stochastic_steps: Literal["one", "last", "all"] = "one"
    """`one`: one denoise step per chunk, drawn from the row's seed, the others deterministic (the trainer then evaluates one
    velocity per chunk, 1/N of the cost). `last`: the last step, whose noise reaches the robot as it is, at the same cost. `all`: the
    whole chain."""
    _: KW_ONLY
    noise_over: Literal["action", "chunk"] = "action"
    """`action`: each action of a chunk has noise of its own. `chunk`: one draw for all of its actions, which moves the hand sqrt(C)
    times as far for its size, and leaves C times fewer numbers in a likelihood."""
    likelihood: Literal["chain", "matching"] = "chain"
    """What a ratio is taken of. `chain`: the exact density of the recorded denoise steps. `matching`: the flow-matching loss at the actions
    (`policies/flow_matching.py`), however they were sampled; not for `flow_noise`, whose spread it would not train."""
    matching_draws: int = 8
    """Times and noises at which that loss is taken; at least 1. The trainer evaluates one velocity for each."""
    noise_level: float = 0.5
    """a of `flow_sde`; above 0. Not used by `flow_noise`."""
    std_min: float = 0.08
    """Smallest learned standard deviation of `flow_noise`, in normalised action units; above 0."""
    std_max: float = 0.16
    """Largest learned standard deviation of `flow_noise`; at least `std_min`."""
    temperature: float = 1.0
    """Of action tokens, in sampling and in every log-probability (SimpleVLA-RL trains at 1.6); 0.0001 to 100."""
    reasoning_temperature: float = 1.0
    """Of the reasoning's tokens, likewise; 0.0001 to 100."""

    def __post_init__(self) -> None:
        for name in ("temperature", "reasoning_temperature"):
            if not 1e-4 <= getattr(self, name) <= 100:  # float32 logits divided by far less overflow, and their differences are no numbers
                raise UserError(f"exploration.{name} is {getattr(self, name)}; allowed: 0.0001 to 100 (evaluation takes the likeliest)")
        if self.likelihood == "matching" and self.method != "flow_sde":
            raise UserError(f"exploration.likelihood is 'matching' and exploration.method {self.method!r}; it belongs to 'flow_sde'")
        if self.matching_draws < 1:
            raise UserError(f"exploration.matching_draws is {self.matching_draws}; it must be at least 1")
        if not self.noise_level > 0:
            raise UserError(f"exploration.noise_level is {self.noise_level}; without noise there is no density: set it above 0")
        if not 0 < self.std_min <= self.std_max:
            raise UserError(
                f"exploration.std_min is {self.std_min} and std_max is {self.std_max}; they must satisfy 0 < std_min <= std_max"
            )


@dataclass(frozen=True)
class StochasticDraws:
    """The random numbers of each row's transitions, from that row's seed alone."""

    noise_BNCA: Tensor
    """float32[B, N, C, A], standard normal, one per denoise step."""
    index_B: Tensor
    """int64[B] in [0, N): the stochastic step where there is only one."""


@dataclass(frozen=True)
class Chain:
    """A sampled chunk with the transitions that a learner needs."""

    actions_BCA: Tensor
    """float32[B, C, A]: the end of the chain, unclipped."""
    x_t_BKCA: Tensor
    """float32[B, K, C, A]: where each recorded transition began."""
    x_next_BKCA: Tensor
    """float32[B, K, C, A]: where it went."""
    denoise_index_BK: Tensor
    """int64[B, K]: which steps these are."""
    log_prob_BC: Tensor
    """float32[B, C]: per action, summed over real dimensions and recorded steps."""


def stochastic_draws(seeds: Sequence[int], denoise_steps: int, chunk_shape: tuple[int, int], device: torch.device) -> StochasticDraws:
    """Draw every row with a generator of its own, on the CPU, so that no row depends on the batch or the device.

    `chunk_shape` is (C, A). The stream is another one than `row_noise`'s of the same seed.
    """
    noise_BNCA = torch.empty(len(seeds), denoise_steps, *chunk_shape)
    index_B = torch.empty(len(seeds), dtype=torch.int64)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        generator.manual_seed((int(seed) + _STREAM) % 2**63)
        torch.randn(denoise_steps, *chunk_shape, generator=generator, out=noise_BNCA[row])
        index_B[row] = torch.randint(denoise_steps, (), generator=generator)
    return StochasticDraws(noise_BNCA.to(device), index_B.to(device))


def sde_std(denoise_steps: int, noise_level: float) -> list[float]:
    """Standard deviation of each `flow_sde` step, from noise to data: s_i sqrt(1/N). For a = 0.5, N = 5: 0.5, 0.4472, 0.2739, ..."""
    return [sigma / math.sqrt(denoise_steps) for sigma in _sde_sigma(denoise_steps, noise_level)]


def learned_std(raw: Tensor, std_min: float, std_max: float) -> Tensor:
    """Standard deviation from a noise head's output: tanh, mapped to log-variances in [log std_min^2, log std_max^2]."""
    low, high = 2 * math.log(std_min), 2 * math.log(std_max)
    return torch.exp(0.5 * (low + 0.5 * (torch.tanh(raw) + 1.0) * (high - low)))


def gaussian_log_prob(x_BCA: Tensor, mean_BCA: Tensor, std_BCA: Tensor, live_L: Sequence[int]) -> Tensor:
    """float32[B, C]: log N(x; mean, std^2) summed over the dimensions `live_L`; padding has no say.

    -1/2 ((x - mean) / std)^2 - log std - 1/2 log 2 pi, in float32; `std_BCA` may have size 1 in any dimension.
    """
    std_BCL = std_BCA.expand_as(mean_BCA)[..., live_L].float()
    z_BCL = (x_BCA[..., live_L].float() - mean_BCA[..., live_L].float()) / std_BCL
    return (-0.5 * z_BCL.square() - std_BCL.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(std_BCA: Tensor, shape_BCA: torch.Size, live_L: Sequence[int]) -> Tensor:
    """float32[B, C]: 1/2 log(2 pi e std^2) summed over the dimensions `live_L`."""
    std_BCL = std_BCA.expand(shape_BCA)[..., live_L].float()
    return (std_BCL.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


@torch.no_grad()
def sample_chain(
    flow: Flow,
    velocity: SpreadVelocityFn,
    noise_BCA: Tensor,
    draws: StochasticDraws,
    exploration: Exploration,
    live_L: Sequence[int],
) -> Chain:
    """Denoise from noise to actions with one or all steps stochastic, keeping the stochastic transitions.

    `velocity` is called N times, on all rows at one time each; N is the draws'. Log-probabilities are of the dimensions `live_L`.
    """
    denoise_steps = draws.noise_BNCA.shape[1]
    index_BK = _stochastic_steps(draws.index_B, denoise_steps, exploration)
    visited = [noise_BCA]
    log_probs: list[Tensor] = []
    for step in range(denoise_steps):
        index_B = torch.full_like(draws.index_B, step)
        mean_BCA, std_BCA, ode_BCA = _transition(flow, velocity, visited[-1], index_B, denoise_steps, exploration)
        drawn_BCA = draws.noise_BNCA[:, step]
        sampled_BCA = mean_BCA + std_BCA * (drawn_BCA[:, :1] if exploration.noise_over == "chunk" else drawn_BCA)
        log_probs.append(_log_prob(sampled_BCA, mean_BCA, std_BCA, live_L, exploration))
        chosen_B11 = (index_BK == step).any(1)[:, None, None]
        visited.append(torch.where(chosen_B11, sampled_BCA, ode_BCA))
    return _record(torch.stack(visited, 1), torch.stack(log_probs, 1), index_BK)


def chain_log_prob(
    flow: Flow,
    velocity: SpreadVelocityFn,
    x_t_BKCA: Tensor,
    x_next_BKCA: Tensor,
    denoise_index_BK: Tensor,
    denoise_steps: int,
    exploration: Exploration,
    live_L: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(log_prob_BC, entropy_BC) float32[B, C] of recorded transitions under `velocity`'s weights, with gradient.

    `velocity` is called K times with B rows, as at rollout. Raises ValueError where the record does not fit the settings.
    """
    kept = x_t_BKCA.shape[1]
    if kept != recorded_steps(exploration, denoise_steps):
        raise ValueError(
            f"the record holds {kept} transitions per chunk, but stochastic_steps is {exploration.stochastic_steps!r} of "
            f"{denoise_steps} denoise steps; recompute with the exploration settings of the rollout"
        )
    log_probs: list[Tensor] = []
    entropies: list[Tensor] = []
    for k in range(kept):
        mean_BCA, std_BCA, _ = _transition(flow, velocity, x_t_BKCA[:, k], denoise_index_BK[:, k], denoise_steps, exploration)
        log_probs.append(_log_prob(x_next_BKCA[:, k], mean_BCA, std_BCA, live_L, exploration))
        entropies.append(_entropy(std_BCA, mean_BCA.shape, live_L, exploration))
    return torch.stack(log_probs, 1).sum(1), torch.stack(entropies, 1).sum(1)


def recorded_steps(exploration: Exploration, denoise_steps: int) -> int:
    """K, how many transitions of a chunk are recorded, or how many draws of the flow-matching loss."""
    if exploration.likelihood == "matching":
        return exploration.matching_draws
    return denoise_steps if exploration.stochastic_steps == "all" else 1


def _stochastic_steps(index_B: Tensor, denoise_steps: int, exploration: Exploration) -> Tensor:
    """int64[B, K]: the stochastic denoise steps of each row; `index_B` is the one that its seed chose."""
    match exploration.stochastic_steps:
        case "one":
            return index_B[:, None]
        case "last":
            return torch.full_like(index_B, denoise_steps - 1)[:, None]
        case "all":
            return torch.arange(denoise_steps, device=index_B.device).repeat(len(index_B), 1)


def _log_prob(x_BCA: Tensor, mean_BCA: Tensor, std_BCA: Tensor, live_L: Sequence[int], exploration: Exploration) -> Tensor:
    """float32[B, C]: log-density of a transition, per action; where a chunk draws once, each action has that of the chunk."""
    if exploration.noise_over == "action":
        return gaussian_log_prob(x_BCA, mean_BCA, std_BCA, live_L)
    log_prob_B1 = gaussian_log_prob(x_BCA.mean(1, keepdim=True), mean_BCA.mean(1, keepdim=True), std_BCA, live_L)
    return log_prob_B1.expand(x_BCA.shape[:2])


def _entropy(std_BCA: Tensor, shape_BCA: torch.Size, live_L: Sequence[int], exploration: Exploration) -> Tensor:
    """float32[B, C]: entropy of a transition, per action; of the chunk where it draws once, as in `_log_prob`."""
    rows, actions, dims = shape_BCA
    if exploration.noise_over == "action":
        return gaussian_entropy(std_BCA, shape_BCA, live_L)
    return gaussian_entropy(std_BCA, torch.Size((rows, 1, dims)), live_L).expand(rows, actions)


def _transition(
    flow: Flow, velocity: SpreadVelocityFn, x_BCA: Tensor, index_B: Tensor, denoise_steps: int, exploration: Exploration
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, std, ODE's next point) of the denoise steps `index_B`, each with its row's own time; see the module's docstring.

    The std of a chunk that draws once has size 1 over actions.
    """
    if exploration.method == "tokens":
        raise UserError("exploration.method is 'tokens', and the policy is a flow; use 'flow_sde' or 'flow_noise'")
    grid = flow.grid(denoise_steps)
    time_B = _gather(grid, index_B)
    velocity_BCA, raw_BCA = velocity(x_BCA, time_B)
    velocity_BCA = velocity_BCA.float()
    stride_B = _gather([following - time for time, following in pairwise(grid)], index_B)
    ode_BCA = x_BCA + stride_B[:, None, None] * velocity_BCA
    if exploration.method == "flow_noise":
        if raw_BCA is None:
            raise ValueError("exploration.method is 'flow_noise', but the policy has no noise head; build it with one or use 'flow_sde'")
        std_BCA = learned_std(raw_BCA.float(), exploration.std_min, exploration.std_max)
        return ode_BCA, std_BCA.mean(1, keepdim=True) if exploration.noise_over == "chunk" else std_BCA, ode_BCA
    noise_BCA = flow.endpoints(x_BCA, velocity_BCA, time_B)[1]
    sigma = _sde_sigma(denoise_steps, exploration.noise_level)
    pull = [s * s / (2 * denoise_steps * _share(i, denoise_steps)) for i, s in enumerate(sigma)]
    std_B = _gather(sde_std(denoise_steps, exploration.noise_level), index_B)
    return ode_BCA - _gather(pull, index_B)[:, None, None] * noise_BCA, std_B[:, None, None], ode_BCA


def _share(index: int, denoise_steps: int) -> float:
    """tau_i, the share of noise where step i begins."""
    return 1.0 - index / denoise_steps


def _sde_sigma(denoise_steps: int, noise_level: float) -> list[float]:
    """s_i = a sqrt(tau_i / (1 - tau_i)); where tau = 1, 1 - tau is taken at the next grid point."""
    clean = [max(index, 1) / denoise_steps for index in range(denoise_steps)]
    return [noise_level * math.sqrt(_share(index, denoise_steps) / clean[index]) for index in range(denoise_steps)]


def _gather(table: Sequence[float], index_B: Tensor) -> Tensor:
    """float32[B]: the table's entry of each row."""
    return torch.tensor(table, dtype=torch.float32, device=index_B.device)[index_B]


def _record(visited_BMCA: Tensor, log_prob_BNC: Tensor, index_BK: Tensor) -> Chain:
    """Keep the stochastic transitions of a chain of M = N + 1 points."""
    rows = torch.arange(len(index_BK), device=index_BK.device)[:, None]
    return Chain(
        actions_BCA=visited_BMCA[:, -1],
        x_t_BKCA=visited_BMCA[rows, index_BK],
        x_next_BKCA=visited_BMCA[rows, index_BK + 1],
        denoise_index_BK=index_BK,
        log_prob_BC=log_prob_BNC[rows, index_BK].sum(1),
    )
