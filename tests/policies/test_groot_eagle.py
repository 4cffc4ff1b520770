"""GR00T N1.6's backbone: its maths against a slow reference, its names and shapes against NVIDIA's sources, its prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from test_groot_policy import EAGLE
from torch import Tensor
from transformers import Qwen3ForCausalLM

from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import GROOT_PRESETS, EagleBackboneConfig
from vla_rl.policies.groot.eagle import EagleBackbone
from vla_rl.policies.groot.features import Features
from vla_rl.policies.groot.head import ActionHead
from vla_rl.policies.groot.model import GrootModel
from vla_rl.policies.groot.policy import eagle_prompt
from vla_rl.policies.groot.published import own_name, to_published

IMAGE_TOKEN, VIEWS = 90, 2
TOLERANCE = 1e-5
"""Absolute, float32: prompts padded on the other side and pictures one by one sum the same products in another order."""


def random_backbone() -> EagleBackbone:
    backbone = EagleBackbone(EAGLE, IMAGE_TOKEN).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in backbone.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    return backbone


def random_batch() -> Batch:
    """A full prompt, a short one, and one without text after the pictures."""
    generator = torch.Generator().manual_seed(1)
    side, tokens = EAGLE.vision.image_size, EAGLE.vision.tokens
    images = torch.rand(3, VIEWS, 3, side, side, generator=generator) * 2.0 - 1.0
    pictures = torch.tensor([91, *[IMAGE_TOKEN] * tokens, 92] * VIEWS).expand(3, -1)
    before, after = (torch.randint(0, IMAGE_TOKEN, (3, 4), generator=generator) for _ in range(2))
    mask = torch.ones(3, 4 + pictures.shape[1] + 4, dtype=torch.bool)
    mask[1, -2:], mask[2, -4:] = False, False
    return Batch(images, torch.zeros(3, 8), torch.cat((before, pictures, after), 1), mask)


def slow_image_tokens(backbone: EagleBackbone, image: Tensor) -> Tensor:
    """[tokens, M] of one picture float32[3, H, W]: patches and pixel unshuffle pixel by pixel, SigLIP 2 with its own positions and masks.

    A patch is (row, column, channel); of a token, entry c * 4 + 2 i + j is channel c of the patch in row i and column j of its cell.
    """
    size, side = EAGLE.vision.patch_size, EAGLE.vision.image_size // EAGLE.vision.patch_size
    cells = [image[:, r * size : (r + 1) * size, c * size : (c + 1) * size] for r in range(side) for c in range(side)]
    pixels = torch.stack([cell.permute(1, 2, 0).flatten() for cell in cells])[None]
    seen = backbone.model.vision_model(
        pixel_values=pixels, pixel_attention_mask=torch.ones(1, side * side), spatial_shapes=torch.tensor([[side, side]])
    ).last_hidden_state[0]
    joined = [
        torch.stack([seen[(2 * row + i) * side + 2 * column + j] for i in range(2) for j in range(2)], 1).flatten()
        for row in range(side // 2)
        for column in range(side // 2)
    ]
    return backbone.model.mlp1(torch.stack(joined))


def slow_features(backbone: EagleBackbone, batch: Batch, row: int) -> Tensor:
    """[tokens, M] of one row's real tokens, as N1.6 computes them: padded on the left, the last of the hidden states."""
    language = backbone._language
    causal = Qwen3ForCausalLM(language.config).eval()
    causal.model.load_state_dict(language.state_dict())
    tokens = batch.tokens_BL[row][batch.token_mask_BL[row]]
    embedded = language.embed_tokens(tokens).clone()
    embedded[tokens == IMAGE_TOKEN] = torch.cat([slow_image_tokens(backbone, image) for image in batch.images_BVCHW[row]])
    padding = batch.tokens_BL.shape[1] - len(tokens)
    padded = torch.cat((torch.zeros(padding, EAGLE.width), embedded))[None]
    mask = (torch.arange(padded.shape[1]) >= padding)[None]
    return causal(inputs_embeds=padded, attention_mask=mask.long(), output_hidden_states=True).hidden_states[-1][0, padding:]


def test_features_equal_a_slow_reference() -> None:
    backbone, batch = random_backbone(), random_batch()
    with torch.no_grad():
        features = backbone(batch)
        for row in range(3):
            expected = slow_features(backbone, batch, row)
            assert expected.std() > 0.05, "a trivial output would agree by accident"
            torch.testing.assert_close(features.tokens_BPM[row][batch.token_mask_BL[row]], expected, atol=TOLERANCE, rtol=0)
    assert torch.equal(features.image_mask_BP, batch.tokens_BL == IMAGE_TOKEN)
    assert int(features.image_mask_BP.sum()) == 3 * VIEWS * EAGLE.vision.tokens


def eagle_shapes(layers: int, vision_layers: int) -> dict[str, list[int]]:
    """The tensors of N1.6's backbone.

    Names from Isaac-GR00T, `gr00t/model/modules/eagle_backbone.py` (`self.model`, layers above `select_layer` removed) and
    `nvidia/Eagle-Block2A-2B-v2/modeling_eagle3_vl.py` and `modeling_siglip2.py`; sizes from that folder's `config.json`.
    """
    shapes: dict[str, list[int]] = {}
    vision, language = "backbone.model.vision_model.vision_model", "backbone.model.language_model.model"

    def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = [outputs, inputs]
        shapes.update({f"{name}.bias": [outputs]} if bias else {})

    def norm(name: str, width: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = [width]
        shapes.update({f"{name}.bias": [width]} if bias else {})

    linear(f"{vision}.embeddings.patch_embedding", 1152, 14 * 14 * 3)
    shapes[f"{vision}.embeddings.position_embedding.weight"] = [256, 1152]
    for layer in (f"{vision}.encoder.layers.{index}" for index in range(vision_layers)):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{layer}.self_attn.{name}", 1152, 1152)
        norm(f"{layer}.layer_norm1", 1152)
        norm(f"{layer}.layer_norm2", 1152)
        linear(f"{layer}.mlp.fc1", 4304, 1152)
        linear(f"{layer}.mlp.fc2", 1152, 4304)
    norm(f"{vision}.post_layernorm", 1152)
    shapes[f"{vision}.head.probe"] = [1, 1, 1152]
    shapes[f"{vision}.head.attention.in_proj_weight"], shapes[f"{vision}.head.attention.in_proj_bias"] = [3 * 1152, 1152], [3 * 1152]
    linear(f"{vision}.head.attention.out_proj", 1152, 1152)
    norm(f"{vision}.head.layernorm", 1152)
    linear(f"{vision}.head.mlp.fc1", 4304, 1152)
    linear(f"{vision}.head.mlp.fc2", 1152, 4304)
    norm("backbone.model.mlp1.0", 4 * 1152)
    linear("backbone.model.mlp1.1", 2048, 4 * 1152)
    linear("backbone.model.mlp1.3", 2048, 2048)
    shapes[f"{language}.embed_tokens.weight"] = [151680, 2048]
    for layer in (f"{language}.layers.{index}" for index in range(layers)):
        for name, outputs, inputs in (("q", 16 * 128, 2048), ("k", 8 * 128, 2048), ("v", 8 * 128, 2048), ("o", 2048, 16 * 128)):
            linear(f"{layer}.self_attn.{name}_proj", outputs, inputs, bias=False)
        norm(f"{layer}.self_attn.q_norm", 128, bias=False)
        norm(f"{layer}.self_attn.k_norm", 128, bias=False)
        for name, outputs, inputs in (("gate", 6144, 2048), ("up", 6144, 2048), ("down", 2048, 6144)):
            linear(f"{layer}.mlp.{name}_proj", outputs, inputs, bias=False)
        norm(f"{layer}.input_layernorm", 2048, bias=False)
        norm(f"{layer}.post_attention_layernorm", 2048, bias=False)
    norm(f"{language}.norm", 2048, bias=False)
    return shapes


def test_published_size_has_nvidias_names_and_shapes() -> None:
    with torch.device("meta"):
        model = GrootModel(GROOT_PRESETS["n1_6"], VIEWS, 151669)
    ours = {to_published(f"model.{name}").removeprefix("_groot_model."): list(t.shape) for name, t in model.state_dict().items()}
    backbone = {name: shape for name, shape in ours.items() if name.startswith("backbone.")}
    assert backbone == eagle_shapes(layers=16, vision_layers=27)
    assert all(own_name(name) == f"model.{name}" for name in backbone)
    assert own_name("backbone.model.language_model.lm_head.weight") is None  # tied to the embedding
    assert ours["action_head.state_encoder.layer1.W"] == [32, 128, 1024] and ours["action_head.action_encoder.W1.W"] == [32, 128, 1536]
    assert ours["action_head.position_embedding.weight"] == [1024, 1536] and not any("vl_self_attention" in name for name in ours)
    unread = sum(parameter.numel() for parameter in model.backbone.unread_parameters())
    assert unread == sum(torch.Size(shape).numel() for name, shape in backbone.items() if ".head." in name)


def test_a_view_has_81_tokens_where_pictures_have_256_pixels() -> None:
    """256 goes to 252, 18 patches of 14 pixels a side, two by two one token (Eagle's `smart_resize` and `pixels_per_token`)."""
    assert EagleBackboneConfig().vision.tokens == 81


def test_hidden_states_have_the_mask_token_in_place_of_their_own() -> None:
    config = replace(GROOT_PRESETS["tiny"].head, mask_token=True)
    head = ActionHead(config, 128, 8, 7)
    assert "mask_token" in head.state_dict() and "mask_token" not in ActionHead(replace(config, mask_token=False), 128, 8, 7).state_dict()
    features = Features(torch.zeros(2, 1, 128), torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool))
    shown, hidden = (head.encode(features, torch.ones(2, 8), torch.tensor(mask)).state_B1M for mask in ([True, True], [False, True]))
    assert torch.equal(hidden[0], head.mask_token[0]) and torch.equal(hidden[1], shown[1])  # pyright: ignore[reportOptionalSubscript]


def test_the_prompt_says_the_task_and_then_shows_numbered_pictures() -> None:
    backbone = replace(EAGLE, vision=replace(EAGLE.vision, image_size=28))  # one token a view
    assert eagle_prompt("Pick up the milk.", 2, backbone) == (
        "<|im_start|>system\nYou are a helpful assistant.\n<|im_end|>\n<|im_start|>user\npick up the milk"
        "<image 1><img><IMG_CONTEXT></img><image 2><img><IMG_CONTEXT></img><|im_end|>\n"
    )
