"""The flow-matching loss as a likelihood, for reinforcement learning (McAllister et al. 2025, "Flow Matching Policy Gradients", FPO).

Shape legend: B batch;  C actions per chunk;  A action dimensions of the model;  L live dimensions;  K draws.

A flow has no cheap density of its actions. The density of the denoising chain that led to them is exact, and most of what it says is about
noise that later steps wipe out. FPO takes minus the training loss at the actions that were executed instead: for K draws (time, noise),

    surrogate(a) = -1/(2K) sum_k |v(x_k, t_k) - target(a, noise_k)|^2,    x_k on the straight line from a to noise_k,

which up to a constant bounds log p(a) from below (with weights of its own for each time), and a ratio is exp(new - old) on the same draws.
It does not ask how the actions were sampled. The times are the quantiles of the training times, so that only the noise is random.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_rl.policies.flow import Flow, VelocityFn
from vla_rl.policies.flow_stochastic import Chain

_STREAM = 0x3F84D5B5B5470917
"""Separates the seeds of these draws from those of the initial noise and of the transitions."""


def matching_noise(seeds: Sequence[int], draws: int, chunk_shape: tuple[int, int], device: torch.device) -> Tensor:
    """float32[B, K, C, A], standard normal, each row with a generator of its own, on the CPU. `chunk_shape` is (C, A)."""
    noise_BKCA = torch.empty(len(seeds), draws, *chunk_shape)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        generator.manual_seed((int(seed) + _STREAM) % 2**63)
        torch.randn(draws, *chunk_shape, generator=generator, out=noise_BKCA[row])
    return noise_BKCA.to(device)


def matching_times(flow: Flow, draws: int) -> Tensor:
    """float32[K]: the quantiles (k + 1/2) / K of the training times."""
    return flow.sample_time((torch.arange(draws) + 0.5) / draws)


def matching_log_prob(
    flow: Flow,
    velocity: VelocityFn,
    actions_BKCA: Tensor,
    noise_BKCA: Tensor,
    index_BK: Tensor,
    draws: int,
    live_L: Sequence[int],
) -> Tensor:
    """float32[B, C]: the surrogate of each action, summed over the dimensions `live_L` and averaged over the draws, with gradient.

    `index_BK` int64 says which of the `draws` times each draw has. `velocity` is called K times with B rows, as at rollout.
    Raises ValueError where the record holds another number of draws.
    """
    if index_BK.shape[1] != draws:
        raise ValueError(f"the record holds {index_BK.shape[1]} draws per chunk, but exploration.matching_draws is {draws}")
    time_K = matching_times(flow, draws).to(index_BK.device)
    errors: list[Tensor] = []
    for actions_BCA, noise_BCA, index_B in zip(actions_BKCA.unbind(1), noise_BKCA.unbind(1), index_BK.unbind(1), strict=True):
        time_B = time_K[index_B]
        velocity_BCA = velocity(flow.path(actions_BCA, noise_BCA, time_B), time_B).float()
        errors.append((velocity_BCA - flow.target(actions_BCA, noise_BCA))[..., live_L].square().sum(-1))
    return -0.5 * torch.stack(errors, 1).mean(1)


def matching_chain(flow: Flow, velocity: VelocityFn, actions_BCA: Tensor, seeds: Sequence[int], draws: int, live_L: Sequence[int]) -> Chain:
    """Sampled actions with what a learner needs: each draw begins at its noise and goes to the actions."""
    noise_BKCA = matching_noise(seeds, draws, (actions_BCA.shape[1], actions_BCA.shape[2]), actions_BCA.device)
    actions_BKCA = actions_BCA[:, None].expand_as(noise_BKCA)
    index_BK = torch.arange(draws, device=actions_BCA.device).repeat(len(actions_BCA), 1)
    log_prob_BC = matching_log_prob(flow, velocity, actions_BKCA, noise_BKCA, index_BK, draws, live_L)
    return Chain(actions_BCA, noise_BKCA, actions_BKCA, index_BK, log_prob_BC)
