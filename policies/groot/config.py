"""Sizes and choices of GR00T-style policies. The defaults are the tiny size that runs on a CPU; presets are in `GROOT_PRESETS`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Literal

from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig, require_least
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.module import check_sizes
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.processor import Normalization


@dataclass(frozen=True)
class ConvBackboneConfig:
    """A backbone for small data: strided convolutions per view, and Gemma-style layers over image and prompt tokens."""

    kind: Literal["conv"] = "conv"
    """Strided convolutions (or patches, by `vision.stem`) and a small transformer, trained from scratch."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """The vision tower."""
    language: TransformerConfig = field(default_factory=lambda: TransformerConfig(depth=1, mlp_width=256))
    """The layers over image and prompt tokens, which see each other in both directions."""
    vocabulary: int = 1024
    """Rows of the token embedding; at least the tokenizer's size."""

    @property
    def width(self) -> int:
        """Width of the features."""
        return self.language.width

    @property
    def image_size(self) -> int:
        """Pixels of a side of the model's input."""
        return self.vision.image_size


@dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes of Qwen3-VL's vision tower; the defaults are Cosmos-Reason2-2B's."""

    image_size: int = 256
    """Pixels of a side of the model's input; a multiple of `patch_size` times `merge`."""
    patch_size: int = 16
    """Pixels of a side of a patch."""
    merge: int = 2
    """Patches of a side that become one token."""
    width: int = 1024
    """Model width."""
    depth: int = 24
    """Number of layers."""
    mlp_width: int = 4096
    """Hidden width of their MLPs."""
    heads: int = 16
    """Attention heads; divides `width`."""
    positions: int = 2304
    """Learned positions, a square grid that is interpolated to the image's."""
    deepstack: tuple[int, ...] = (5, 11, 17)
    """Layers whose output is added to the image tokens of the first language layers, one each (Meng et al. 2024)."""

    def __post_init__(self) -> None:
        _check_vision(self)
        require_least(self, {"deepstack": 0})
        if self.deepstack and max(self.deepstack) >= self.depth:
            raise ValueError(f"deepstack is {list(self.deepstack)}; every entry must be below depth, which is {self.depth}")

    @property
    def tokens(self) -> int:
        """Tokens per view."""
        return (self.image_size // (self.patch_size * self.merge)) ** 2


@dataclass(frozen=True)
class QwenTextConfig:
    """Sizes of a Qwen3 language model; the defaults are those of the 2B models that N1.7 and N1.6 read."""

    width: int = 2048
    """Model width of the language model, and of the features."""
    mlp_width: int = 6144
    """Hidden width of its gated MLPs."""
    heads: int = 16
    """Query heads."""
    kv_heads: int = 8
    """Key and value heads; divides `heads`."""
    head_width: int = 128
    """Width of one head; even."""

    def __post_init__(self) -> None:
        require_least(self, dict.fromkeys(("width", "mlp_width", "heads", "kv_heads", "head_width"), 1))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, it must be a multiple of kv_heads, which is {self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width is {self.head_width}, it must be even, because positions rotate pairs")


@dataclass(frozen=True)
class QwenBackboneConfig(QwenTextConfig):
    """Qwen3-VL through transformers, read before its last layers; the defaults are Cosmos-Reason2-2B's sizes as N1.7 reads it."""

    kind: Literal["qwen3_vl"] = "qwen3_vl"
    """Qwen3-VL's text and vision, of any size."""
    vision: QwenVisionConfig = field(default_factory=QwenVisionConfig)
    """The vision tower."""
    read_layer: int = 16
    """The language layer whose output, before any final norm, is the feature; layers above it do not exist. At least 1."""
    vocabulary: int = 151936
    """Rows of the token embedding."""
    rope_theta: float = 5_000_000.0
    """Base of the rotary positions."""
    rope_sections: tuple[int, int, int] = (24, 20, 20)
    """Rotary frequencies for time, height and width; they sum to half of `head_width`."""
    image_token: str = "<|image_pad|>"
    """The token that stands for each image token in the prompt; the tokenizer must have it."""

    def __post_init__(self) -> None:
        if self.read_layer < max(1, len(self.vision.deepstack)):
            raise ValueError(
                f"read_layer is {self.read_layer}, it must be at least 1 and at least the number of vision.deepstack layers, "
                f"{len(self.vision.deepstack)}"
            )
        super().__post_init__()
        if 2 * sum(self.rope_sections) != self.head_width:
            raise ValueError(
                f"rope_sections is {list(self.rope_sections)}; they must sum to half of head_width, which is {self.head_width}"
            )

    @property
    def image_size(self) -> int:
        """Pixels of a side of the model's input."""
        return self.vision.image_size


EAGLE_CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.\n<|im_end|>\n{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% set pictures = namespace(count=0) %}{% for part in message.content %}{% if part.type == 'image' %}"
    "{% set pictures.count = pictures.count + 1 %}<image-{{ pictures.count }}>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
"""What `py_apply_chat_template` of Eagle's processor writes for a user's turn, as a Jinja template."""


@dataclass(frozen=True)
class EagleVisionConfig:
    """Sizes of Eagle's SigLIP 2; the defaults are Eagle-Block2A-2B-v2's (full attention, no rotary positions)."""

    image_size: int = 252
    """Pixels of a side of the model's input: 256 brought to a multiple of 28, as Eagle's processor does; of `patch_size` times `merge`."""
    patch_size: int = 14
    """Pixels of a side of a patch."""
    merge: int = 2
    """Patches of a side whose channels become one token (pixel unshuffle)."""
    width: int = 1152
    """Model width."""
    depth: int = 27
    """Number of layers."""
    mlp_width: int = 4304
    """Hidden width of their MLPs."""
    heads: int = 16
    """Attention heads; divides `width`."""
    positions: int = 256
    """Learned positions, a square grid that is interpolated to the image's."""

    def __post_init__(self) -> None:
        _check_vision(self)
        if isqrt(self.positions) ** 2 != self.positions:
            raise ValueError(f"positions is {self.positions}, it must be the square of a whole number")

    @property
    def tokens(self) -> int:
        """Tokens per view."""
        return (self.image_size // (self.patch_size * self.merge)) ** 2


@dataclass(frozen=True)
class EagleBackboneConfig(QwenTextConfig):
    """Eagle 3 through transformers: SigLIP 2, a connector of two layers, and Qwen3 cut off above a layer; the defaults are N1.6's sizes."""

    kind: Literal["eagle3"] = "eagle3"
    """Eagle-Block2A-2B-v2's form, of any size."""
    vision: EagleVisionConfig = field(default_factory=EagleVisionConfig)
    """The vision tower."""
    read_layer: int = 16
    """The language layer whose output, through the final norm, is the feature; layers above it do not exist. At least 1."""
    vocabulary: int = 151680
    """Rows of the token embedding."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary positions."""
    image_token: str = "<IMG_CONTEXT>"
    """The token that stands for each image token in the prompt; the tokenizer must have it."""
    chat_template: str = EAGLE_CHAT
    """Jinja template of a user's turn that says the task and then shows the views as `<image-1>`, `<image-2>`, ...."""

    def __post_init__(self) -> None:
        if self.read_layer < 1:
            raise ValueError(f"read_layer is {self.read_layer}, it must be at least 1")
        super().__post_init__()

    @property
    def image_size(self) -> int:
        """Pixels of a side of the model's input."""
        return self.vision.image_size


def _check_vision(vision: QwenVisionConfig | EagleVisionConfig) -> None:
    require_least(vision, dict.fromkeys(("image_size", "patch_size", "merge", "width", "depth", "mlp_width", "heads", "positions"), 1))
    for name, unit, value in (("image_size", "patch_size * merge", vision.patch_size * vision.merge), ("width", "heads", vision.heads)):
        if getattr(vision, name) % value:
            raise ValueError(f"{name} is {getattr(vision, name)}, it must be a multiple of {unit}, which is {value}")


BackboneConfig = ConvBackboneConfig | QwenBackboneConfig | EagleBackboneConfig
"""A vision-language backbone, by `kind`."""


@dataclass(frozen=True)
class AttentionStackConfig:
    """Sizes of a stack of attention blocks."""

    depth: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads, at least 1."""
    head_width: int = 32
    """Width of one head, at least 1; heads * head_width is the stack's width."""

    def __post_init__(self) -> None:
        for name, least in (("depth", 0), ("heads", 1), ("head_width", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}")

    @property
    def width(self) -> int:
        """Width of the stack's tokens."""
        return self.heads * self.head_width


@dataclass(frozen=True)
class ActionHeadConfig:
    """Sizes of the action head: vision-language self-attention, the diffusion transformer, and what is specific to an embodiment."""

    vl_attention: AttentionStackConfig = field(default_factory=lambda: AttentionStackConfig(depth=1))
    """Self-attention over the backbone's features; depth 0 leaves it out (N1.6). Its width is the backbone's."""
    dit: AttentionStackConfig = field(default_factory=lambda: AttentionStackConfig(depth=4))
    """The diffusion transformer: even blocks attend to the features, odd ones to state and actions. At least 1 deep."""
    text_every: int = 2
    """Of the blocks that attend to the features, every how many-th looks at text, the others at images; 0: all look at everything."""
    hidden_width: int = 128
    """Hidden width of the embodiment's encoders and decoder, and width of the transformer's output; at least 1."""
    embodiments: int = 1
    """Embodiments that have weights of their own; at least 1."""
    embodiment: int = 0
    """The one this policy acts for; below `embodiments` (N1.7: LIBERO is 2)."""
    positions: int = 64
    """Learned positions of actions; at least the chunk length."""
    time_buckets: int = 20
    """Steps into which flow time is cut; the networks see the step's number (1000 as published: its fast sines are noise to a
    small network, which must learn to ignore them)."""
    mask_token: bool = False
    """What stands for a state that dropout hides: a learned token (N1.6 trained with dropout), or zeros (N1.7)."""

    def __post_init__(self) -> None:
        for name in ("hidden_width", "embodiments", "positions", "time_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 <= self.embodiment < self.embodiments:
            raise ValueError(f"embodiment is {self.embodiment}, it must be 0 to {self.embodiments - 1} (there are {self.embodiments})")
        if self.dit.depth < 1:
            raise ValueError("dit.depth is 0, it must be at least 1")
        if self.text_every < 0:
            raise ValueError(f"text_every is {self.text_every}, it must be at least 0")
        if self.dit.width % 2:
            raise ValueError(f"dit.heads * dit.head_width is {self.dit.width}, it must be even (sines and cosines)")


@dataclass(frozen=True)
class GrootConfig:
    """A GR00T-style policy; the defaults are `tiny`."""

    family: Literal["groot"] = "groot"
    """GR00T N1.5 and later: a frozen-able vision-language backbone and a diffusion transformer that attends to its features."""
    chunk_length: int = 8
    """Actions predicted at once; at least 1."""
    executed_horizon: int = 8
    """Actions executed before the next look; 1 to `chunk_length`."""
    denoise_steps: int = 4
    """Euler steps from noise to actions; at least 1."""
    backbone: BackboneConfig = field(default_factory=ConvBackboneConfig)
    """What reads images and prompt."""
    head: ActionHeadConfig = field(default_factory=ActionHeadConfig)
    """What turns its features, the state and noise into actions."""
    tokenizer: str = ""
    """Folder with a `tokenizer.json`; empty for the shipped one (trained on LIBERO's instructions)."""
    prompt_tokens: int = 24
    """Every prompt is padded to this many tokens, image tokens included where the backbone takes them from the prompt."""
    model_state_dim: int = 8
    """The state is padded with zeros to this many dimensions (132 in N1.7, 128 in N1.6)."""
    model_action_dim: int = 7
    """Actions are padded with zeros to this many dimensions (132 in N1.7, 128 in N1.6)."""
    normalization: Normalization = Normalization.MEAN_STD
    """How state and actions are normalised; `quantiles` as published."""
    clip_outliers: bool = False
    """Cut normalised states and sampled actions to [-1, 1]; on as published."""
    pad_images: bool = True
    """Whether an image that is not square is padded to keep its proportions or stretched."""
    crop: float = 1.0
    """Share of each side of an image that is kept, around its centre, before it is resized (230 / 256 in N1.7); above 0, at most 1."""
    shift_pixels: int = 4
    """Training shifts each view of each sample by up to this many input pixels (edges repeated); 0 turns it off."""
    state_dropout: float = 0.0
    """Share of training samples that do not see the state (0.2 in N1.7); 0 to below 1."""
    critic: CriticConfig | None = None
    """A value head, which `vla-rl rl` adds; none for policies that only act."""
    noise_head: NoiseHeadConfig | None = None
    """A learned exploration spread (Flow-Noise), which `vla-rl rl` adds; none for policies that only act."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if not 0.0 <= self.state_dropout < 1.0:
            raise ValueError(f"state_dropout is {self.state_dropout}, it must be at least 0 and below 1")
        if not 0.0 < self.crop <= 1.0:
            raise ValueError(f"crop is {self.crop}, it must be above 0 and at most 1")
        if self.chunk_length > self.head.positions:
            raise ValueError(f"chunk_length is {self.chunk_length}, but head.positions is {self.head.positions}; raise positions")
        if self.head.vl_attention.depth and self.head.vl_attention.width != self.backbone.width:
            raise ValueError(
                f"head.vl_attention is {self.head.vl_attention.width} wide (heads * head_width), the backbone {self.backbone.width}; "
                "make them equal"
            )

    @property
    def vocabulary(self) -> int:
        """Rows of the backbone's token embedding."""
        return self.backbone.vocabulary


N1_7_HEAD = ActionHeadConfig(
    vl_attention=AttentionStackConfig(depth=4, heads=32, head_width=64),
    dit=AttentionStackConfig(depth=32, heads=32, head_width=48),
    hidden_width=1024,
    embodiments=32,
    embodiment=2,
    positions=1024,
    time_buckets=1000,
)
"""The action head of GR00T N1.7, for LIBERO's simulated Panda (`libero_sim`)."""
N1_6_HEAD = replace(N1_7_HEAD, vl_attention=replace(N1_7_HEAD.vl_attention, depth=0))
"""The action head of GR00T N1.6: N1.7's without the self-attention over features (NVIDIA/Isaac-GR00T, `configs/model/gr00t_n1d6.py`)."""
GROOT_PRESETS: dict[str, GrootConfig] = {
    "tiny": GrootConfig(),
    "n1_7": GrootConfig(
        chunk_length=40,
        executed_horizon=8,
        denoise_steps=4,
        backbone=QwenBackboneConfig(),
        head=N1_7_HEAD,
        prompt_tokens=192,
        model_state_dim=132,
        model_action_dim=132,
        normalization=Normalization.QUANTILES,
        clip_outliers=True,
        crop=230 / 256,
        shift_pixels=0,
        state_dropout=0.2,
    ),
    "n1_6": GrootConfig(
        chunk_length=50,
        executed_horizon=8,
        denoise_steps=4,
        backbone=EagleBackboneConfig(),
        head=N1_6_HEAD,
        prompt_tokens=288,
        model_state_dim=128,
        model_action_dim=128,
        normalization=Normalization.QUANTILES,
        clip_outliers=True,
        crop=0.95,
        shift_pixels=0,
    ),
}
"""Named sizes: `tiny` for CPUs; as published `n1_7` (`nvidia/GR00T-N1.7-3B`, chunk 40) and `n1_6` (`nvidia/GR00T-N1.6-3B`, chunk 50), of
which LIBERO executes 8."""
