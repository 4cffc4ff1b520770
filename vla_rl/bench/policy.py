"""`vla-rl bench policy`: a chunk of pi0, pi0.5 and GR00T on the CPU against LeRobot's own code with the same weights.

Regime: float32, one thread, the published structure at two small sizes, one observation and four (a rollout worker's batch).
Both sides get the same prepared inputs and the same noise, and must give the same actions. Pairs of calls are interleaved in one process
per case; times are CPU times, because on a shared machine the wall clock measures the neighbours. The bar is 1 in every case.
pi0: against `predict_action_chunk`; both encode the prefix once per chunk, LeRobot copies its cache for every denoise step and builds masks
and positions again. GR00T: against N1.7's backbone and `get_action`, which computes keys and values of the features at every step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh
from vla_rl.bench.groot_case import groot_calls
from vla_rl.bench.lerobot_peer import lerobot_batch, lerobot_chunk, lerobot_policy
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow import row_noise
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

BAR = 1.0
TOLERANCE = 2e-5
"""Largest difference of an action in model space: both sum the same products in another order, over ten steps."""
SIZES: dict[str, tuple[VisionConfig, TransformerConfig, TransformerConfig]] = {
    "tiny": (
        VisionConfig(stem="patch", image_size=56, patch_size=14, conv_channels=(), width=64, depth=2, mlp_width=256, heads=4),
        TransformerConfig(width=128, depth=3, mlp_width=512, heads=8, kv_heads=1, head_width=16),
        TransformerConfig(width=64, depth=3, mlp_width=256, heads=8, kv_heads=1, head_width=16),
    ),
    "small": (
        VisionConfig(stem="patch", image_size=112, patch_size=14, conv_channels=(), width=144, depth=4, mlp_width=512, heads=4),
        TransformerConfig(width=256, depth=6, mlp_width=2048, heads=8, kv_heads=1, head_width=32),
        TransformerConfig(width=128, depth=6, mlp_width=512, heads=8, kv_heads=1, head_width=32),
    ),
}
"""Vision tower, language model and action expert: a handful of layers, and the published proportions at an eighth of the width."""
FAMILIES = ("pi0", "pi05", "groot")
BATCHES = (1, 4)


def main(argv: list[str]) -> int:
    """Run every case; prints the closing JSON line and returns 0 when the bar is reached in all of them."""
    parser = benchmark_parser("policy", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of calls of each case, at least 1")
    parser.add_argument("--once", nargs=3, metavar=("FAMILY", "SIZE", "BATCH"), help="(used by the benchmark itself) one case")
    arguments = parser.parse_args(argv)
    if arguments.once:
        family, size, batch = arguments.once
        print(json.dumps(measure(family, size, int(batch), arguments.pairs)))
        return 0
    cases = [(family, size, batch) for family in FAMILIES for size in SIZES for batch in BATCHES]
    pairs = str(arguments.pairs)
    return report([run_fresh("vla_rl.bench.policy", "--once", f, s, str(b), "--pairs", pairs) for f, s, b in cases], arguments)


def report(cases: Sequence[dict[str, Any]], options: argparse.Namespace) -> int:
    """Hold the smallest median ratio against the bar. Raises RuntimeError where both sides do not give the same actions."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case["difference"] > TOLERANCE:
            raise RuntimeError(f"{case['case']}: actions differ by {case['difference']}, more than {TOLERANCE}")
        ratio, low, high = median_iqr([theirs / ours for theirs, ours in zip(case["lerobot_s"], case["ours_s"])])
        seconds = {name: round(median_iqr(case[name])[0], 5) for name in ("lerobot_s", "ours_s")}
        rows.append({"case": case["case"], "ratio": round(ratio, 4), "iqr": [round(low, 4), round(high, 4)], **seconds})
        print(json.dumps(rows[-1]), flush=True)
    return finish("policy", min(row["ratio"] for row in rows), BAR, None, rows, options)


def measure(family: str, size: str, batch_size: int, pairs: int) -> dict[str, Any]:
    """One case: CPU seconds of every call of either side, and the largest difference of their actions."""
    calls = groot_calls(size, batch_size) if family == "groot" else pi0_calls(family, size, batch_size)
    difference = float((calls["lerobot_s"]() - calls["ours_s"]()).abs().max())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(pairs):
        for name, call in calls.items():
            seconds[name].append(_cpu_seconds(call))
    return {"case": f"{family} {size}, batch {batch_size}", "difference": difference, **seconds}


def pi0_calls(family: str, size: str, batch_size: int) -> dict[str, Callable[[], Tensor]]:
    """`lerobot_s` and `ours_s`: calls that give the same chunk from the same inputs, weights and noise."""
    ours = make_our_policy(case_config(family, size))
    theirs = lerobot_policy(ours)
    batch = ours.preprocess([observation(seed, ours.config.vision.image_size) for seed in range(batch_size)])
    seeds = list(range(batch_size))
    noise = row_noise(seeds, (ours.config.chunk_length, ours.config.model_action_dim), 0, ours.device).noise_BCA
    their_batch = lerobot_batch(batch, ours.spec.views)
    return {
        "lerobot_s": lambda: lerobot_chunk(theirs, their_batch, noise),
        "ours_s": lambda: ours.act(batch, seeds).actions_BCA[..., :ACTION_DIM],
    }


def case_config(family: str, size: str) -> Pi0Config:
    """A policy of the published structure at one of `SIZES`."""
    vision, language, expert = SIZES[size]
    return replace(
        PI0_PRESETS[f"{family}_base"],
        vision=vision,
        language=language,
        expert=expert,
        vocabulary=1024,
        chunk_length=10,
        executed_horizon=10,
    )


def make_our_policy(config: Pi0Config) -> Pi0Policy:
    """Our policy, with random weights everywhere."""
    limits = {STATE: np.array([[-1.0] * STATE_DIM, [1.0] * STATE_DIM]), ACTION: np.array([[-1.0] * ACTION_DIM, [1.0] * ACTION_DIM])}
    statistics = Statistics({name: FeatureStats.from_values(values) for name, values in limits.items()})
    policy = make_policy(config, statistics, policy_spec(config, resolution=config.vision.image_size)).eval()
    assert isinstance(policy, Pi0Policy)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():  # adaptive norms start at zero, and would hide every layer
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return policy


def observation(seed: int, size: int) -> Observation:
    """A random observation."""
    generator = np.random.default_rng(seed)
    images = {view: generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for view in VIEWS}
    return Observation(images, generator.normal(size=STATE_DIM).astype(np.float32), "pick up the milk and place it in the basket")


def _cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
