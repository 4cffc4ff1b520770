"""`vla-rl bench prefix`: what computing the prefix once per chunk gains over encoding it again at every denoise step.

Regime: a batch of four observations, as a rollout worker has, K Euler steps, a pi0 whose prefix takes at least 100 ms on one thread.
Limit: the ratio of floating-point operations, K (Fp + Fs) / (Fp + K Fs), with Fp and Fs counted by torch's FLOP counter in
the same process. Pairs are interleaved in fresh processes; both ways must give the same actions in every one of them.
The bar is 80 % of the limit: the rest is work that no FLOP counts (small products that do not fill a core, memory traffic).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.base import Batch
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow import row_noise
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.policy import PI0_FLOW, Pi0Policy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

SEEDS = (1, 2, 3, 4)
BATCH = len(SEEDS)
BAR = 0.8
"""Fraction of the FLOP ratio."""
LEAST_PREFIX_S = 0.1
TOLERANCE = 1e-5
"""Both ways do the same operations on the same shapes; only buffer alignment may differ."""
CONFIG = Pi0Config(
    denoise_steps=10,
    vision=VisionConfig(stem="patch", image_size=168, patch_size=14, conv_channels=(), width=256, depth=6, mlp_width=1024, heads=4),
    language=TransformerConfig(width=256, depth=6, mlp_width=2048, heads=4, kv_heads=1, head_width=64),
    expert=TransformerConfig(width=128, depth=6, mlp_width=512, heads=4, kv_heads=1, head_width=64),
)
"""The published proportions at an eighth of the width: 288 image tokens, a padded prompt, an expert of half the width."""


def main(argv: list[str]) -> int:
    """Run the pairs; prints the closing JSON line and returns 0 when the bar is reached."""
    parser = benchmark_parser("prefix", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of fresh processes, at least 1")
    parser.add_argument("--once", choices=("cached", "encoded_again"), help="(used by the benchmark itself) one measurement")
    arguments = parser.parse_args(argv)
    if arguments.once:
        print(json.dumps(measure(arguments.once)))
        return 0
    return report([(_child("cached"), _child("encoded_again")) for _ in range(arguments.pairs)], arguments)


def report(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], options: argparse.Namespace) -> int:
    """Hold the median ratio of the pairs against the bar. Raises RuntimeError when both ways do not give the same actions."""
    for cached, again in pairs:
        difference = float(np.abs(np.array(cached["actions"]) - np.array(again["actions"])).max())
        if difference > TOLERANCE:
            raise RuntimeError(f"cached and re-encoded prefixes give actions that differ by {difference}, more than {TOLERANCE}")
        if cached["prefix_s"] < LEAST_PREFIX_S:
            raise RuntimeError(
                f"the prefix takes {cached['prefix_s']} s, less than {LEAST_PREFIX_S} s: CONFIG is too small for this machine"
            )
    limit = pairs[0][0]["flop_ratio"]
    ratio, low, high = median_iqr([again["chunk_s"] / cached["chunk_s"] for cached, again in pairs])
    row = {
        "case": f"batch {BATCH}, {CONFIG.denoise_steps} denoise steps",
        "ratio": ratio,
        "ratio_quartiles": [low, high],
        "flop_ratio": limit,
        "prefix_s": median_iqr([cached["prefix_s"] for cached, _ in pairs])[0],
        "cached_chunk_s": median_iqr([cached["chunk_s"] for cached, _ in pairs])[0],
        "encoded_again_chunk_s": median_iqr([again["chunk_s"] for _, again in pairs])[0],
        "pairs": len(pairs),
    }
    return finish("prefix", ratio, round(BAR * limit, 4), ratio / limit, [row], options)


def measure(way: str) -> dict[str, Any]:
    """One process: seconds of a chunk `way` and of the prefix alone, the FLOP ratio, and the actions."""
    policy, batch = _policy_and_batch()
    sample = cached_chunk if way == "cached" else encoded_again_chunk
    with torch.no_grad():
        actions = sample(policy, batch)
        return {
            "chunk_s": _fastest(lambda: sample(policy, batch)),
            "prefix_s": _fastest(lambda: policy.encode(batch)),
            "flop_ratio": flop_ratio(policy, batch),
            "actions": actions.flatten().tolist(),
        }


def cached_chunk(policy: Pi0Policy, batch: Batch) -> Tensor:
    """The product's way: the prefix once."""
    return policy.act(batch, SEEDS).actions_BCA


def encoded_again_chunk(policy: Pi0Policy, batch: Batch) -> Tensor:
    """The naive twin: images and prompt are encoded at every denoise step."""
    noise = row_noise(SEEDS, (CONFIG.chunk_length, CONFIG.model_action_dim), 0, policy.device).noise_BCA

    def velocity(x_BCA: Tensor, time_B: Tensor) -> Tensor:
        return policy.model.velocity(policy.encode(batch), batch.state_BS, x_BCA, time_B)

    return PI0_FLOW.euler(velocity, noise, CONFIG.denoise_steps)


def flop_ratio(policy: Pi0Policy, batch: Batch) -> float:
    """K (Fp + Fs) / (Fp + K Fs)."""
    with FlopCounterMode(display=False) as counter:
        prefix = policy.encode(batch)
    x_BCA = torch.zeros(BATCH, CONFIG.chunk_length, CONFIG.model_action_dim)
    of_prefix, steps = counter.get_total_flops(), CONFIG.denoise_steps
    with FlopCounterMode(display=False) as counter:
        policy.model.velocity(prefix, batch.state_BS, x_BCA, torch.ones(BATCH))
    of_step = counter.get_total_flops()
    return steps * (of_prefix + of_step) / (of_prefix + steps * of_step)


def _child(way: str) -> dict[str, Any]:
    return run_fresh("vla_rl.bench.prefix", "--once", way)


def _policy_and_batch() -> tuple[Pi0Policy, Batch]:
    """A random policy (with an output layer that is not zero) and random observations, the same in every process."""
    limits = {STATE: np.array([[-1.0] * STATE_DIM, [1.0] * STATE_DIM]), ACTION: np.array([[-1.0] * ACTION_DIM, [1.0] * ACTION_DIM])}
    statistics = Statistics({name: FeatureStats.from_values(values) for name, values in limits.items()})
    policy = make_policy(CONFIG, statistics, policy_spec(CONFIG, resolution=CONFIG.vision.image_size)).eval()
    assert isinstance(policy, Pi0Policy)
    policy.model.action_out_proj.weight.data.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    return policy, policy.preprocess([_observation(seed) for seed in SEEDS])


def _observation(seed: int) -> Observation:
    generator, size = np.random.default_rng(seed), CONFIG.vision.image_size
    images = {view: generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for view in VIEWS}
    return Observation(images, generator.normal(size=STATE_DIM).astype(np.float32), "pick up the milk and place it in the basket")


def _fastest(call: Callable[[], object], repeats: int = 3) -> float:
    """Least CPU time of some calls: on a shared machine the wall clock measures the neighbours."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
