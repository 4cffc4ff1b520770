"""Sizes and choices of pi0 and pi0.5. The defaults are the tiny size that runs on a CPU; presets are in `PI0_PRESETS`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.module import check_sizes
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.processor import Normalization


@dataclass(frozen=True)
class Pi0Config:
    """A pi0 or pi0.5 policy; the defaults are `tiny`."""

    family: Literal["pi0", "pi05"] = "pi0"
    """`pi0`: state as one token of the action expert, time joined to each action by an MLP (Black et al. 2024).
    `pi05`: state as numbers in the prompt, time through adaptive norms of the expert (Intelligence et al. 2025)."""
    chunk_length: int = 8
    """Actions predicted at once; at least 1."""
    executed_horizon: int = 8
    """Actions executed before the next look; 1 to `chunk_length`."""
    denoise_steps: int = 5
    """Euler steps from noise to actions; at least 1."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """The vision tower."""
    language: TransformerConfig = field(default_factory=lambda: TransformerConfig(mlp_width=256))
    """The language model, which also reads the image tokens."""
    expert: TransformerConfig = field(default_factory=TransformerConfig)
    """The action expert."""
    vocabulary: int = 1024
    """Rows of the token embedding; at least the tokenizer's size."""
    tokenizer: str = ""
    """Folder with a `tokenizer.json`; empty for the shipped one (trained on LIBERO's instructions)."""
    prompt_tokens: int = 24
    """Every prompt is padded to this many tokens; a longer one is an error."""
    model_state_dim: int = 8
    """The state is padded with zeros to this many dimensions (32 as published)."""
    model_action_dim: int = 7
    """Actions are padded with zeros to this many dimensions (32 as published)."""
    normalization: Normalization = Normalization.MEAN_STD
    """How state and actions are normalised; `quantiles` for pi0.5, whose state must lie in [-1, 1]."""
    state_in_prompt: bool = True
    """pi0.5 only: whether the prompt carries the state; openpi's `pi05_libero` was trained without, and then no state reaches the model."""
    pad_images: bool = True
    """Whether an image that is not square is padded to keep its proportions (as published) or stretched."""
    shift_pixels: int = 4
    """Training shifts each view of each sample by up to this many input pixels (edges repeated); 0 turns it off."""
    carry_output_head: bool = False
    """Carry the vocabulary head of the action expert, which the published weights contain and nothing reads,
    so that checkpoints of the published size go both ways."""
    time_min_period: float = 0.1
    """Shortest period of the sines that encode flow time (4e-3 as published). Periods far below the step of the sampler
    are noise to a small network: it must learn to ignore them."""
    time_max_period: float = 4.0
    """Longest period; at least the shortest, which is above 0."""
    critic: CriticConfig | None = None
    """A value head, which `vla-rl rl` adds; none for policies that only act."""
    noise_head: NoiseHeadConfig | None = None
    """A learned exploration spread (Flow-Noise), which `vla-rl rl` adds; none for policies that only act."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0 < self.time_min_period <= self.time_max_period:
            raise ValueError(
                f"time_min_period is {self.time_min_period} and time_max_period {self.time_max_period}; "
                "they must satisfy 0 < time_min_period <= time_max_period"
            )
        for name in ("depth", "kv_heads", "heads", "head_width"):
            language, expert = getattr(self.language, name), getattr(self.expert, name)
            if language != expert:
                raise ValueError(
                    f"language.{name} is {language} and expert.{name} is {expert}: they share attention, so they must be equal"
                )
        if self.family == "pi05" and self.normalization is Normalization.MEAN_STD:
            raise ValueError(
                "family pi05 writes the state as 256 bins over [-1, 1]: normalization must be 'quantiles' or 'min_max', not 'mean_std'"
            )


_SIGLIP_SO400M = VisionConfig(stem="patch", image_size=224, patch_size=14, conv_channels=(), width=1152, depth=27, mlp_width=4304, heads=16)
_GEMMA_2B = TransformerConfig(width=2048, depth=18, mlp_width=16384, heads=8, kv_heads=1, head_width=256)
_GEMMA_300M = TransformerConfig(width=1024, depth=18, mlp_width=4096, heads=8, kv_heads=1, head_width=256)
_PI0_BASE = Pi0Config(
    family="pi0",
    chunk_length=50,
    executed_horizon=50,
    denoise_steps=10,
    vision=_SIGLIP_SO400M,
    language=_GEMMA_2B,
    expert=_GEMMA_300M,
    vocabulary=257152,
    prompt_tokens=48,
    model_state_dim=32,
    model_action_dim=32,
    shift_pixels=0,
    carry_output_head=True,
    time_min_period=4e-3,
)
PI0_PRESETS: dict[str, Pi0Config] = {
    "tiny": Pi0Config(),
    "tiny_pi05": Pi0Config(family="pi05", normalization=Normalization.QUANTILES, prompt_tokens=48),
    "pi0_base": _PI0_BASE,
    "pi05_base": replace(_PI0_BASE, family="pi05", normalization=Normalization.QUANTILES, prompt_tokens=200),
}
"""Named sizes: `tiny` for CPUs, `*_base` as published (openpi's and LeRobot's pi0 and pi0.5 bases)."""
