"""The GR00T cases of `vla-rl bench policy`: our network and LeRobot's N1.7, from prepared inputs to sampled actions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vla_rl.episode import ACTION_DIM
from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import ActionHeadConfig, AttentionStackConfig, GrootConfig, QwenBackboneConfig, QwenVisionConfig
from vla_rl.policies.groot.policy import GROOT_FLOW

VIEWS, TEXT = 2, 24
IMAGE_TOKEN, IMAGE_START, IMAGE_END = 1021, 1022, 1023
"""Numbers of the tokens of and around pictures, above all text."""
SPREAD = 0.05
"""Of all weights: an output that depends on everything, and does not explode."""


def groot_config(size: str) -> GrootConfig:
    """N1.7's structure at a size: `tiny`, or `small`, which is twice as wide and deep."""
    times = {"tiny": 1, "small": 2}[size]
    vision = QwenVisionConfig(
        image_size=64 * times, width=48 * times, depth=2 * times, mlp_width=128 * times, heads=4, positions=64, deepstack=(0,)
    )
    backbone = QwenBackboneConfig(
        vision=vision,
        read_layer=2 * times,
        width=128 * times,
        mlp_width=256 * times,
        heads=4 * times,
        kv_heads=2,
        head_width=32,
        vocabulary=1024,
        rope_sections=(6, 5, 5),
    )
    head = ActionHeadConfig(
        vl_attention=AttentionStackConfig(depth=1, heads=4 * times, head_width=32),
        dit=AttentionStackConfig(depth=4 * times, heads=4, head_width=24 * times),
        hidden_width=64 * times,
        embodiments=4,
        embodiment=2,
        time_buckets=1000,
    )
    prompt = VIEWS * (vision.tokens + 2) + TEXT
    return GrootConfig(chunk_length=16, executed_horizon=8, backbone=backbone, head=head, prompt_tokens=prompt, model_action_dim=32)


def groot_calls(size: str, batch_size: int) -> dict[str, Callable[[], Tensor]]:
    """`lerobot_s` and `ours_s`: calls that give the same chunk float32[B, C, 7] from the same inputs, weights and noise."""
    from vla_rl.bench.lerobot_groot import lerobot_groot, lerobot_groot_chunk, lerobot_inputs, our_groot

    config, generator = groot_config(size), torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        theirs = lerobot_groot(config, IMAGE_TOKEN, Path(folder), SPREAD)
    ours = our_groot(config, theirs, VIEWS, IMAGE_TOKEN)
    images, batch = _inputs(config, batch_size, generator)
    noise = torch.randn(batch_size, config.chunk_length, config.model_action_dim, generator=generator)
    call = lerobot_groot_chunk(theirs, config, lerobot_inputs(config, batch, images), batch, noise)

    @torch.no_grad()
    def our_chunk() -> Tensor:
        prefix = ours.encode(batch)
        return GROOT_FLOW.euler(
            lambda x_BCA, time_B: ours.project(ours.suffix(prefix, batch.state_BS, x_BCA, time_B)[:, -config.chunk_length :]),
            noise,
            config.denoise_steps,
        )[..., :ACTION_DIM]

    return {"lerobot_s": lambda: call()[..., :ACTION_DIM], "ours_s": our_chunk}


def _inputs(config: GrootConfig, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Batch]:
    """Random pictures uint8[B, V, 3, H, W], and the batch that our network takes; no prompt is padded."""
    side = config.backbone.image_size
    images = torch.randint(0, 256, (batch_size, VIEWS, 3, side, side), generator=generator, dtype=torch.uint8)
    assert isinstance(config.backbone, QwenBackboneConfig), "as `groot_config` makes it"
    pictures = torch.tensor([IMAGE_START, *[IMAGE_TOKEN] * config.backbone.vision.tokens, IMAGE_END] * VIEWS).expand(batch_size, -1)
    tokens = torch.cat((pictures, torch.randint(0, IMAGE_TOKEN, (batch_size, TEXT), generator=generator)), 1)
    state = torch.randn(batch_size, config.model_state_dim, generator=generator)
    return images, Batch(images.float() / 127.5 - 1.0, state, tokens, torch.ones_like(tokens, dtype=torch.bool))
