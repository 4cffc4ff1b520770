"""`vla-rl bench prefix`: what computing the prefix once per chunk gains over encoding it again at every denoise step.

Regime: one observation (batch 1), K Euler steps, a pi0 whose prefix takes at least 100 ms on one thread.
Limit: the ratio of floating-point operations, K (Fp + Fs) / (Fp + K Fs), with Fp and Fs counted by torch's FLOP counter in
the same process. Pairs are interleaved in fresh processes; both ways must give the same actions in every one of them.
The bar is 80 % of the limit: the rest is work that no FLOP counts (masks, rotary angles, memory traffic).
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

from vla_rl.bench.common import finish, median_iqr, run_fresh
from vla_rl.policies.pi0.config import Pi0Config, TransformerConfig, VisionConfig
from vla_rl.policies.pi0.model import Pi0Model
from vla_rl.policies.pi0.policy import PI0_FLOW

VIEWS = 2
BAR = 0.8
"""Fraction of the FLOP ratio."""
LEAST_PREFIX_S = 0.1
TOLERANCE = 1e-5
"""Both ways do the same operations on the same shapes; only buffer alignment may differ."""
CONFIG = Pi0Config(
    denoise_steps=10,
    vision=VisionConfig(stem="patch", image_size=112, patch_size=14, conv_channels=(), width=384, depth=6, mlp_width=1024, heads=6),
    language=TransformerConfig(width=512, depth=6, mlp_width=2048, heads=8, kv_heads=1, head_width=64),
    expert=TransformerConfig(width=256, depth=6, mlp_width=1024, heads=8, kv_heads=1, head_width=64),
)
"""About a sixth of the published widths; 128 image tokens and a padded prompt."""


def main(argv: list[str]) -> int:
    """Run the pairs; prints the closing JSON line and returns 0 when the bar is reached."""
    parser = argparse.ArgumentParser(prog="vla-rl bench prefix", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of fresh processes, at least 1")
    parser.add_argument("--once", choices=("cached", "encoded_again"), help="(used by the benchmark itself) one measurement")
    arguments = parser.parse_args(argv)
    if arguments.once:
        print(json.dumps(measure(arguments.once)))
        return 0
    pairs = [(_child("cached"), _child("encoded_again")) for _ in range(arguments.pairs)]
    return report(pairs)


def report(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> int:
    """Check that both ways agree and hold the median ratio against the bar. Raises RuntimeError when they do not agree."""
    for cached, again in pairs:
        difference = float(np.abs(np.array(cached["actions"]) - np.array(again["actions"])).max())
        if difference > TOLERANCE:
            raise RuntimeError(f"cached and re-encoded prefixes give actions that differ by {difference}, more than {TOLERANCE}")
        if cached["prefix_s"] < LEAST_PREFIX_S:
            raise RuntimeError(
                f"the prefix takes {cached['prefix_s']:.3f} s, less than {LEAST_PREFIX_S} s: this machine needs a larger config"
            )
    limit = pairs[0][0]["flop_ratio"]
    ratio, low, high = median_iqr([again["chunk_s"] / cached["chunk_s"] for cached, again in pairs])
    row = {
        "case": f"batch 1, {CONFIG.denoise_steps} denoise steps",
        "ratio": ratio,
        "ratio_quartiles": [low, high],
        "flop_ratio": limit,
        "prefix_s": median_iqr([cached["prefix_s"] for cached, _ in pairs])[0],
        "cached_chunk_s": median_iqr([cached["chunk_s"] for cached, _ in pairs])[0],
        "encoded_again_chunk_s": median_iqr([again["chunk_s"] for _, again in pairs])[0],
        "pairs": len(pairs),
    }
    return finish("prefix", ratio, round(BAR * limit, 4), ratio / limit, [row])


def measure(way: str) -> dict[str, Any]:
    """One process: seconds of a chunk (the faster of three, CPU time) `way`, of the prefix alone, the FLOP ratio, the actions."""
    torch.manual_seed(0)
    model = Pi0Model(CONFIG, VIEWS).eval()
    torch.nn.init.normal_(model.action_out_proj.weight, std=0.05)
    inputs = _inputs()
    sample = cached_chunk if way == "cached" else encoded_again_chunk
    with torch.no_grad():
        actions = sample(model, inputs)
        return {
            "chunk_s": _fastest(lambda: sample(model, inputs)),
            "prefix_s": _fastest(lambda: model.encode_prefix(*inputs[:3])),
            "flop_ratio": flop_ratio(model, inputs),
            "actions": actions.flatten().tolist(),
        }


def cached_chunk(model: Pi0Model, inputs: Sequence[Tensor]) -> Tensor:
    """The product's way: `Pi0Policy.act` encodes the prefix once."""
    images, tokens, token_mask, state, noise = inputs
    prefix = model.encode_prefix(images, tokens, token_mask)
    return PI0_FLOW.euler(lambda x, t: model.velocity(prefix, state, x, t), noise, CONFIG.denoise_steps)


def encoded_again_chunk(model: Pi0Model, inputs: Sequence[Tensor]) -> Tensor:
    """The naive twin: images and prompt are encoded at every denoise step."""
    images, tokens, token_mask, state, noise = inputs
    return PI0_FLOW.euler(
        lambda x, t: model.velocity(model.encode_prefix(images, tokens, token_mask), state, x, t), noise, CONFIG.denoise_steps
    )


def flop_ratio(model: Pi0Model, inputs: Sequence[Tensor]) -> float:
    """K (Fp + Fs) / (Fp + K Fs)."""
    images, tokens, token_mask, state, noise = inputs
    with FlopCounterMode(display=False) as counter:
        prefix = model.encode_prefix(images, tokens, token_mask)
    of_prefix, steps = counter.get_total_flops(), CONFIG.denoise_steps
    with FlopCounterMode(display=False) as counter:
        model.velocity(prefix, state, noise, torch.ones(1))
    of_step = counter.get_total_flops()
    return steps * (of_prefix + of_step) / (of_prefix + steps * of_step)


def _child(way: str) -> dict[str, Any]:
    return run_fresh("vla_rl.bench.prefix", "--once", way)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    size, length = CONFIG.vision.image_size, CONFIG.prompt_tokens
    images = torch.rand(1, VIEWS, 3, size, size, generator=generator) * 2 - 1
    tokens = torch.randint(0, CONFIG.vocabulary, (1, length), generator=generator)
    state = torch.randn(1, CONFIG.model_state_dim, generator=generator)
    noise = torch.randn(1, CONFIG.chunk_length, CONFIG.model_action_dim, generator=generator)
    return images, tokens, torch.arange(length)[None] < 12, state, noise


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
