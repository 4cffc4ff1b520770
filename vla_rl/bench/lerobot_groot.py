"""LeRobot's own GR00T N1.7 with our sizes: the peer of `vla-rl bench policy` and of the parity tests.

Shape legend: B batch; V views; C actions per chunk; A action dimensions of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
from torch import Tensor
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig
from transformers.feature_extraction_utils import BatchFeature

from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import AttentionStackConfig, GrootConfig, QwenBackboneConfig
from vla_rl.policies.groot.model import GrootModel
from vla_rl.policies.groot.published import own_name


def lerobot_groot_config(config: GrootConfig, backbone_folder: str) -> GR00TN17Config:
    """Our sizes as LeRobot's fields. No dropout, because it would draw from the global random state."""
    head, backbone = config.head, config.backbone
    assert isinstance(backbone, QwenBackboneConfig), "LeRobot has no other backbone"
    last = {"norm_type": "ada_norm", "output_dim": head.hidden_width, "interleave_self_attention": True}
    return GR00TN17Config(
        model_name=backbone_folder,
        select_layer=backbone.read_layer,
        backbone_embedding_dim=backbone.width,
        hidden_size=head.hidden_width,
        input_embedding_dim=head.dit.width,
        max_state_dim=config.model_state_dim,
        max_action_dim=config.model_action_dim,
        action_horizon=config.chunk_length,
        max_num_embodiments=head.embodiments,
        max_seq_len=head.positions,
        use_alternate_vl_dit=head.text_every > 0,
        attend_text_every_n_blocks=head.text_every,
        num_inference_timesteps=config.denoise_steps,
        num_timestep_buckets=head.time_buckets,
        state_dropout_prob=config.state_dropout,
        vl_self_attention_cfg=_stack(head.vl_attention),
        diffusion_model_cfg=_stack(head.dit) | last,
    )


def _stack(sizes: AttentionStackConfig) -> dict[str, Any]:
    plain = {"positional_embeddings": None, "dropout": 0.0, "final_dropout": False}
    return plain | {"num_layers": sizes.depth, "num_attention_heads": sizes.heads, "attention_head_dim": sizes.head_width}


def write_qwen_config(backbone: QwenBackboneConfig, image_token: int, folder: Path) -> None:
    """A Qwen3-VL of our sizes with one layer more than is read, which LeRobot must leave out."""
    vision = backbone.vision
    values: dict[str, Any] = {
        "image_token_id": image_token,
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": backbone.width,
            "intermediate_size": backbone.mlp_width,
            "num_hidden_layers": backbone.read_layer + 1,
            "num_attention_heads": backbone.heads,
            "num_key_value_heads": backbone.kv_heads,
            "head_dim": backbone.head_width,
            "vocab_size": backbone.vocabulary,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": backbone.rope_theta,
                "mrope_section": list(backbone.rope_sections),
            },
        },
        "vision_config": {
            "depth": vision.depth,
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp_width,
            "num_heads": vision.heads,
            "out_hidden_size": backbone.width,
            "num_position_embeddings": vision.positions,
            "deepstack_visual_indexes": list(vision.deepstack),
        },
    }
    Qwen3VLConfig.from_dict(values).save_pretrained(folder)


def lerobot_groot(config: GrootConfig, image_token: int, folder: Path, spread: float) -> GR00TN17:
    """LeRobot's class with random weights of one spread everywhere, in float32; `folder` takes the backbone's config."""
    assert isinstance(config.backbone, QwenBackboneConfig), "LeRobot has no other backbone"
    write_qwen_config(config.backbone, image_token, folder)
    model = GR00TN17(lerobot_groot_config(config, str(folder)), load_backbone_weights=False).float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread
    return model


def our_groot(config: GrootConfig, theirs: GR00TN17, views: int, image_token: int) -> GrootModel:
    """Our network with LeRobot's weights, through the names of the published files."""
    model = GrootModel(config, views, image_token).eval()
    state = {own_name(name): tensor for name, tensor in theirs.state_dict().items()}
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items() if name is not None}, strict=True)
    return model


def lerobot_inputs(config: GrootConfig, batch: Batch, images_BVCHW: Tensor) -> dict[str, Tensor]:
    """What LeRobot's backbone takes, with pictures uint8[B, V, 3, H, W] through transformers' own image processor."""
    assert isinstance(config.backbone, QwenBackboneConfig), "LeRobot has no other backbone"
    vision = config.backbone.vision
    processor = Qwen2VLImageProcessor(patch_size=vision.patch_size, merge_size=vision.merge, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processed = processor(list(images_BVCHW.flatten(0, 1)), do_resize=False, return_tensors="pt")
    prompt = {"input_ids": batch.tokens_BL, "attention_mask": batch.token_mask_BL.long()}
    return prompt | {name: processed[name] for name in ("pixel_values", "image_grid_thw")}


def lerobot_groot_chunk(
    theirs: GR00TN17, config: GrootConfig, inputs: dict[str, Tensor], batch: Batch, noise_BCA: Tensor
) -> Callable[[], Tensor]:
    """A call that samples actions float32[B, C, A] from this noise, backbone and action head."""
    embodiments = torch.full((len(batch),), config.head.embodiment)

    def call() -> Tensor:
        state = BatchFeature({"state": batch.state_BS[:, None], "embodiment_id": embodiments})
        with torch.no_grad(), mock.patch.object(torch, "randn", lambda *_, **__: noise_BCA.clone()):
            return theirs.action_head.get_action(theirs.backbone(dict(inputs)), state)["action_pred"]

    return call
