"""Sizes and choices of the token policies. The defaults are the tiny size that runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_rl.config import ConfigError
from vla_rl.policies.blocks.config import VisionConfig, require_least
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.processor import Normalization


@dataclass(frozen=True)
class LanguageConfig:
    """A causal language model of transformers, by the name of its architecture and its sizes."""

    architecture: Literal["qwen2", "qwen3", "gemma", "llama"] = "qwen2"
    """transformers' model type. vLLM has all four."""
    width: int = 128
    """Model width; at least 1."""
    depth: int = 4
    """Number of layers; at least 1."""
    mlp_width: int = 512
    """Hidden width of the gated MLP; at least 1."""
    heads: int = 4
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int = 4
    """Key and value heads; at least 1."""
    head_width: int = 32
    """Width of one head, even (rotary pairs). `qwen2` needs width / heads."""
    rotary_base: float = 10_000.0
    """Base of the rotary positions; above 1."""
    norm_eps: float = 1e-6
    """Added to the mean square in the norms; above 0."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "mlp_width", "heads", "kv_heads", "head_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"language.{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"language.heads is {self.heads}; it must be a multiple of language.kv_heads, which is {self.kv_heads}")
        if self.head_width % 2:
            raise ConfigError(f"language.head_width is {self.head_width}; it must be even, because positions rotate pairs")
        if self.architecture == "qwen2" and self.heads * self.head_width != self.width:
            raise ConfigError(
                f"language.heads times language.head_width is {self.heads * self.head_width} and language.width {self.width}; "
                "architecture 'qwen2' needs them equal ('qwen3' and 'gemma' do not)"
            )
        if not self.rotary_base > 1:
            raise ConfigError(f"language.rotary_base is {self.rotary_base}; it must be above 1")
        if not self.norm_eps > 0:
            raise ConfigError(f"language.norm_eps is {self.norm_eps}; it must be above 0")


@dataclass(frozen=True)
class ActionTokensConfig:
    """How a chunk of actions becomes tokens."""

    kind: Literal["bins", "openvla", "fast"] = "bins"
    """`bins`: one token per number, `bins` equal intervals. `openvla`: as OpenVLA counts them, `bins` edges and so one interval less,
    the highest value first. `fast`: rounded cosine coefficients, compressed by byte-pair encoding (Pertsch et al. 2025); only for
    autoregressive decoding, because the number of tokens varies."""
    bins: int = 256
    """Tokens for the numbers of [-1, 1], for `bins` and `openvla`; at least 2."""
    scale: float = 10.0
    """Cosine coefficients are multiplied by this before they are rounded, for `fast`: larger is finer. Above 0."""
    largest_coefficient: int = 100
    """Rounded coefficients are clipped to +- this, for `fast`; at least 1."""
    vocabulary: int = 512
    """Action tokens, for `fast`; more than twice `largest_coefficient`, whose values are the alphabet."""
    longest: int = 32
    """Most tokens of a chunk, its end included, for `fast`; at least 2."""

    def __post_init__(self) -> None:
        for name, least in (("bins", 2), ("largest_coefficient", 1), ("longest", 2), ("vocabulary", 2 * self.largest_coefficient + 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"action_tokens.{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.scale > 0:
            raise ConfigError(f"action_tokens.scale is {self.scale}; it must be above 0")


@dataclass(frozen=True)
class VitConfig:
    """Sizes of one vision transformer."""

    width: int
    """Model width; a multiple of `heads`."""
    depth: int
    """Layers; at least 2: the last but one is read."""
    mlp_width: int
    """Hidden width of the MLPs."""
    heads: int = 16
    """Attention heads."""

    def __post_init__(self) -> None:
        require_least(self, dict.fromkeys(("width", "mlp_width", "heads"), 1))
        if self.depth < 2:
            raise ConfigError(f"depth is {self.depth}; it must be at least 2, because the last layer but one is read")
        if self.width % self.heads:
            raise ConfigError(f"width is {self.width}; it must be a multiple of heads, which is {self.heads}")


@dataclass(frozen=True)
class PrismaticConfig:
    """OpenVLA's network (Kim et al. 2024): DINOv2 and SigLIP side by side, a three-layer projector, and OpenVLA-OFT's one sequence,
    in which everything sees everything. The defaults are OpenVLA-7B's."""

    image_size: int = 224
    """Pixels of a side of the model's input; a multiple of `patch_size`."""
    patch_size: int = 14
    """Pixels of a side of a patch; one token each."""
    dino: VitConfig = VitConfig(width=1024, depth=24, mlp_width=4096)
    """DINOv2 with registers."""
    registers: int = 4
    """DINOv2's register tokens."""
    siglip: VitConfig = VitConfig(width=1152, depth=27, mlp_width=4304)
    """SigLIP; its patches are those of DINOv2."""
    spare_rows: int = 64
    """Rows of the vocabulary after the action tokens, which are never written (`pad_to_multiple_of`)."""
    crop: float = 0.9**0.5
    """Share of each side of an image that is kept, around its centre (training cropped to 90 % of the area); above 0, at most 1."""

    def __post_init__(self) -> None:
        require_least(self, {"image_size": 1, "patch_size": 1})
        if self.image_size % self.patch_size:
            raise ConfigError(f"prismatic.image_size is {self.image_size}; it must be a multiple of patch_size, which is {self.patch_size}")
        if not 0.0 < self.crop <= 1.0:
            raise ConfigError(f"prismatic.crop is {self.crop}; it must be above 0 and at most 1")
        if self.spare_rows < 0 or self.registers < 0:
            raise ConfigError(f"prismatic.spare_rows and registers are {self.spare_rows} and {self.registers}; they must be at least 0")

    @property
    def tokens(self) -> int:
        """Tokens per view."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class TokenConfig:
    """A policy whose actions are tokens of a language model; the defaults are `tiny`."""

    family: Literal["tokens"] = "tokens"
    """The name of the family."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """`parallel`: all action tokens from one forward pass over placeholders that see each other (OpenVLA-OFT's discrete form).
    `autoregressive`: one after the other; everything is causal, which is what vLLM serves."""
    prefix_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """How images, prompt and state see each other: `bidirectional` as in PaliGemma, `causal` as in Qwen-VL. Autoregressive decoding
    needs `causal`."""
    chunk_length: int = 8
    """Actions predicted at once; at least 1."""
    executed_horizon: int = 8
    """Actions executed before the next look; 1 to `chunk_length`."""
    action_tokens: ActionTokensConfig = field(default_factory=ActionTokensConfig)
    """How actions become tokens."""
    reasoning_tokens: int = 0
    """Most tokens of the text that is written before the actions, its end included; 0: no reasoning."""
    reasoning_loss: float = 1.0
    """Weight of the reasoning's cross-entropy in SFT; at least 0."""
    skip_reasoning: bool = False
    """Act without writing the reasoning, with a policy that learned to: its segment is closed at once."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """The vision tower, SigLIP's or strided convolutions."""
    language: LanguageConfig = field(default_factory=LanguageConfig)
    """The language model that reads images, prompt and state and writes text and actions."""
    prismatic: PrismaticConfig | None = None
    """OpenVLA-OFT's vision and sequence, in place of `vision`, state and learned placeholders; only for parallel decoding."""
    vocabulary: int = 1024
    """Text tokens; at least the tokenizer's size. Marks and action tokens come after them. With `prismatic` all rows of the
    vocabulary: action tokens take the place of its last ones, before `prismatic.spare_rows`."""
    tokenizer: str = ""
    """Folder with a `tokenizer.json` (and `action_tokenizer.json` for `fast`); empty for the shipped one."""
    prompt_tokens: int = 24
    """Every prompt is padded to this many tokens; a longer one is an error."""
    normalization: Normalization = Normalization.QUANTILES
    """How state and actions are normalised; tokens cover [-1, 1], so it must be `quantiles` or `min_max`."""
    pad_images: bool = True
    """Whether an image that is not square is padded to keep its proportions or stretched."""
    shift_pixels: int = 4
    """Training shifts each view of each sample by up to this many input pixels (edges repeated); 0 turns it off."""
    critic: CriticConfig | None = None
    """A value head, which `vla-rl rl` adds; none for policies that only act."""

    def __post_init__(self) -> None:
        if not 1 <= self.executed_horizon <= self.chunk_length:
            raise ConfigError(f"executed_horizon is {self.executed_horizon}; it must be 1 to chunk_length, which is {self.chunk_length}")
        for name, least in (("reasoning_tokens", 0), ("reasoning_loss", 0), ("prompt_tokens", 1), ("shift_pixels", 0), ("vocabulary", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.reasoning_tokens == 1:
            raise ConfigError("reasoning_tokens is 1, which has room for the end of the reasoning only; allowed: 0, or at least 2")
        if self.skip_reasoning and not self.reasoning_tokens:
            raise ConfigError("skip_reasoning is true and reasoning_tokens 0: there is nothing to skip; set skip_reasoning to false")
        self._check_decoding()
        if self.prismatic is not None:
            self._check_prismatic(self.prismatic)

    @property
    def image_size(self) -> int:
        """Pixels of a side of the model's input."""
        return self.vision.image_size if self.prismatic is None else self.prismatic.image_size

    def _check_prismatic(self, prismatic: PrismaticConfig) -> None:
        wanted = {"decoding": "parallel", "prefix_attention": "bidirectional", "reasoning_tokens": 0, "vision": VisionConfig()}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                given = f"{name} is {getattr(self, name)!r}" if name != "vision" else "vision is given, which OpenVLA's network replaces"
                raise ConfigError(f"prismatic is given and {given}; leave {name} at {value!r}")
        if self.action_tokens.kind != "openvla":
            raise ConfigError(f"prismatic is given and action_tokens.kind is {self.action_tokens.kind!r}; set it to 'openvla'")
        if self.vocabulary <= self.action_tokens.bins + prismatic.spare_rows:
            raise ConfigError(f"vocabulary is {self.vocabulary}; action tokens and spare rows leave no text, raise it")

    def _check_decoding(self) -> None:
        if self.decoding == "autoregressive" and self.prefix_attention != "causal":
            raise ConfigError("decoding is 'autoregressive' and prefix_attention 'bidirectional'; set prefix_attention to 'causal'")
        if self.action_tokens.kind == "fast" and self.decoding == "parallel":
            raise ConfigError("action_tokens.kind is 'fast', whose number of tokens varies; set decoding to 'autoregressive'")
        if self.normalization is Normalization.MEAN_STD:
            raise ConfigError("normalization is 'mean_std', but action tokens cover [-1, 1] only; set it to 'quantiles' or 'min_max'")
        if self.critic is not None and self.critic.reads != "prefix":
            raise ConfigError(f"critic.reads is {self.critic.reads!r}; token policies have no action expert: set it to 'prefix'")


TOKEN_PRESETS: dict[str, TokenConfig] = {
    "tiny": TokenConfig(),
    "openvla_oft": TokenConfig(
        prismatic=PrismaticConfig(),
        language=LanguageConfig("llama", width=4096, depth=32, mlp_width=11008, heads=32, kv_heads=32, head_width=128),
        action_tokens=ActionTokensConfig(kind="openvla"),
        vocabulary=32064,
        prompt_tokens=64,
        pad_images=False,
        shift_pixels=0,
    ),
}
"""Named sizes: `tiny` for CPUs, `openvla_oft` as published (OpenVLA-7B with OpenVLA-OFT's discrete parallel decoding)."""
