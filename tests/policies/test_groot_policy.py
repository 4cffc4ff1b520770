"""What GR00T-style policies do beyond the contract that `test_policy.py` holds for every family: backbones, embodiments, state dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from vla_rl.config import ConfigError, build
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.tensors import full_tensor
from vla_rl.episode import ACTION_DIM, Observation
from vla_rl.policies.base import LossSums
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.groot.config import (
    GROOT_PRESETS,
    ActionHeadConfig,
    AttentionStackConfig,
    EagleBackboneConfig,
    EagleVisionConfig,
    GrootConfig,
    QwenBackboneConfig,
    QwenVisionConfig,
)
from vla_rl.policies.groot.dit import DiffusionTransformer
from vla_rl.policies.groot.model import GrootModel
from vla_rl.policies.groot.policy import GrootPolicy, chat_prompt, formal
from vla_rl.policies.statistics import Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE

Observe = Callable[..., list[Observation]]
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<img>", "</img>", "<IMG_CONTEXT>"]
QWEN = QwenBackboneConfig(
    vision=QwenVisionConfig(image_size=32, width=16, depth=2, mlp_width=24, heads=2, positions=16, deepstack=(0,)),
    read_layer=2,
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_width=8,
    vocabulary=1024,
    rope_sections=(2, 1, 1),
)
SMALL_HEAD = ActionHeadConfig(
    vl_attention=AttentionStackConfig(depth=1, heads=2, head_width=16), dit=AttentionStackConfig(depth=4, heads=2, head_width=16)
)
QWEN_POLICY = GrootConfig(backbone=QWEN, head=SMALL_HEAD, prompt_tokens=64, shift_pixels=1)
EAGLE = EagleBackboneConfig(
    vision=EagleVisionConfig(image_size=56, width=16, depth=2, mlp_width=24, heads=2, positions=9),
    read_layer=2,
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_width=8,
    vocabulary=1024,
)
EAGLE_POLICY = GrootConfig(
    backbone=EAGLE,
    head=replace(SMALL_HEAD, vl_attention=replace(SMALL_HEAD.vl_attention, depth=0), mask_token=True),
    prompt_tokens=128,
    shift_pixels=1,
    state_dropout=0.5,
)
LANGUAGE_POLICIES = {"qwen3_vl": QWEN_POLICY, "eagle3": EAGLE_POLICY}
"""Small policies of N1.7's and N1.6's structure."""


@pytest.fixture(scope="module")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped tokenizer with the special tokens of Qwen3-VL and Eagle."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_file(str(SHIPPED_TOKENIZER / TOKENIZER_FILE))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return folder


@pytest.fixture
def tiny_groot(statistics: Statistics) -> GrootPolicy:
    """The tiny preset with weights that make every input matter, in evaluation mode."""
    return randomized(GROOT_PRESETS["tiny"], statistics)


def randomized(config: GrootConfig, statistics: Statistics) -> GrootPolicy:
    policy = make_policy(config, statistics, policy_spec(config, resolution=64)).eval()
    assert isinstance(policy, GrootPolicy)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return policy


def test_tiny_has_the_size_of_a_cpu() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in GrootModel(config, 2, 5).parameters()) for name, config in GROOT_PRESETS.items()}
    assert 2e6 <= sizes["tiny"] <= 6e6
    assert 3.0e9 < sizes["n1_7"] < 3.3e9
    assert 2.9e9 < sizes["n1_6"] < 3.1e9


@pytest.mark.parametrize("backbone", LANGUAGE_POLICIES)
def test_a_policy_on_a_language_model_acts_trains_and_comes_back_from_disk(
    backbone: str, statistics: Statistics, observe: Observe, qwen_tokenizer: Path, tmp_path: Path
) -> None:
    policy = randomized(replace(LANGUAGE_POLICIES[backbone], tokenizer=str(qwen_tokenizer)), statistics)
    actions = np.zeros((2, 8, ACTION_DIM), np.float32)
    batch = policy.preprocess(observe(2), actions, np.ones((2, 8), bool))
    base = policy.act(batch, [1, 2]).actions_BCA
    special = policy.processor.tokenizer.tokenizer.token_to_id(SPECIAL_TOKENS[0])
    text = batch.token_mask_BL & (batch.tokens_BL < special)
    for change in (
        {"images_BVCHW": batch.images_BVCHW.flip(1)},
        {"tokens_BL": torch.where(text, (batch.tokens_BL + 1) % special, batch.tokens_BL)},
        {"state_BS": batch.state_BS + 1},
    ):
        assert (policy.act(replace(batch, **change), [1, 2]).actions_BCA - base).abs().max() > 1e-4, change.keys()
    policy.train().sft_loss(batch, [1, 2]).loss_sum.backward()
    trainable = set(policy.parameter_names("all"))
    assert {name for name, p in policy.named_parameters() if p.grad is not None} == trainable
    assert not any(name.startswith("model.backbone.") for name in policy.parameter_names("expert"))
    save_policy(policy.eval(), tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert torch.equal(loaded.act(loaded.preprocess(observe(2)), [1, 2]).actions_BCA, base)


def test_a_tokenizer_without_the_image_token_is_named(statistics: Statistics) -> None:
    with pytest.raises(ConfigError, match=r"backbone\.image_token is '<\|image_pad\|>', which the tokenizer in .* does not have"):
        make_policy(QWEN_POLICY, statistics, policy_spec(QWEN_POLICY, resolution=64))


def test_prompts_are_formal_and_in_the_chats_form() -> None:
    assert formal("Pick up the Milk, and place it (in) the basket_2!") == "pick up the milk and place it in the basket_2"
    assert chat_prompt("Go.", views=2, image_tokens=3, image_token="<i>") == (
        "<|im_start|>user\n<|vision_start|><i><i><i><|vision_end|><|vision_start|><i><i><i><|vision_end|>go<|im_end|>\n"
    )


def test_state_dropout_hides_the_state_of_its_share_of_rows_in_training_only(statistics: Statistics, observe: Observe) -> None:
    policy = randomized(replace(GROOT_PRESETS["tiny"], state_dropout=0.25, shift_pixels=0), statistics)
    batch = policy.preprocess(observe(1), np.zeros((1, 8, ACTION_DIM), np.float32), np.ones((1, 8), bool))
    rows = batch.select(torch.zeros(400, dtype=torch.long))
    uniform_BK = torch.rand(400, policy.augment_numbers(), generator=torch.Generator().manual_seed(0))
    hidden = ~policy.augment(rows, uniform_BK).state_mask_B  # pyright: ignore[reportOptionalOperand]
    assert abs(float(hidden.float().mean()) - 0.25) < 0.07  # three standard deviations of 400 draws
    other = replace(batch, state_BS=batch.state_BS + 1)
    first, second = (policy.encode(replace(b, state_mask_B=torch.tensor([False]))).state_B1M for b in (batch, other))
    assert torch.equal(first, second) and not first.any()
    assert policy.eval().sft_loss(batch, [0]).loss_sum != policy.sft_loss(other, [0]).loss_sum


def test_only_the_centre_of_an_image_is_seen_where_it_is_cropped(statistics: Statistics, observe: Observe) -> None:
    config = replace(GROOT_PRESETS["tiny"], crop=0.5)
    policy = make_policy(config, statistics, policy_spec(config, resolution=64))
    observation = observe(1)[0]
    frame = {view: image.copy() for view, image in observation.images.items()}
    for image in frame.values():
        image[:16], image[48:], image[:, :16], image[:, 48:] = 0, 0, 0, 0  # all that lies outside the middle half
    first, second = policy.preprocess([observation]), policy.preprocess([replace(observation, images=frame)])
    assert torch.equal(first.images_BVCHW, second.images_BVCHW)
    assert first.images_BVCHW.shape[-2:] == (64, 64)


def test_each_embodiment_has_encoders_and_a_decoder_of_its_own(statistics: Statistics, observe: Observe) -> None:
    config = replace(GROOT_PRESETS["tiny"], head=replace(GROOT_PRESETS["tiny"].head, embodiments=3, embodiment=1))
    policy = randomized(config, statistics)
    batch = policy.preprocess(observe(1), np.zeros((1, 8, ACTION_DIM), np.float32), np.ones((1, 8), bool))
    policy.sft_loss(batch, [0]).loss_sum.backward()
    own = tuple(f"model.action_head.{name}." for name in ("state_encoder", "action_encoder", "action_decoder"))
    specific = {name: parameter for name, parameter in policy.named_parameters() if name.startswith(own)}
    assert len(specific) == 14  # W and b of two layers of the state encoder and of the decoder, and of three of the action encoder
    for name, parameter in specific.items():
        assert parameter.grad is not None and parameter.grad[1].any(), name
        assert not parameter.grad[[0, 2]].any(), name
    base = policy.act(batch, [0]).actions_BCA
    for parameter in specific.values():
        parameter.data[[0, 2]] = 7.0
    assert torch.equal(policy.act(batch, [0]).actions_BCA, base)


@pytest.mark.parametrize(("text_every", "turns"), [(2, "tititi"), (3, "tiitii"), (1, "tttttt")])
def test_blocks_take_turns_between_text_and_images(text_every: int, turns: str) -> None:
    transformer = DiffusionTransformer(AttentionStackConfig(depth=12, heads=1, head_width=4), 4, 4, text_every)
    mask_BP, image_mask_BP = torch.tensor([[True, True, True, False]]), torch.tensor([[True, False, False, False]])
    text, images = [False, True, True, False], [True, False, False, False]
    masks = transformer.masks(mask_BP, image_mask_BP)
    assert [mask.flatten().tolist() for mask in masks] == [text if turn == "t" else images for turn in turns]


def test_without_turns_every_block_sees_all_real_tokens() -> None:
    transformer = DiffusionTransformer(AttentionStackConfig(depth=3, heads=1, head_width=4), 4, 4, text_every=0)
    masks = transformer.masks(torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]]))
    assert [mask.flatten().tolist() for mask in masks] == [[True, True, False]] * 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backbone", ["conv", *LANGUAGE_POLICIES])
def test_blocks_that_run_twice_get_the_whole_gradient_when_they_are_sharded(
    backbone: str, recompute: bool, statistics: Statistics, observe: Observe, qwen_tokenizer: Path
) -> None:
    """Blocks that attend to the features give keys and values once and attend later: FSDP and recomputation see two calls of one module."""
    language = replace(GROOT_PRESETS["tiny"].backbone.language, depth=2)  # pyright: ignore[reportAttributeAccessIssue]
    conv = replace(GROOT_PRESETS["tiny"], backbone=replace(GROOT_PRESETS["tiny"].backbone, language=language))
    config = conv if backbone == "conv" else replace(LANGUAGE_POLICIES[backbone], tokenizer=str(qwen_tokenizer))
    plain, sharded = (randomized(config, statistics).train() for _ in range(2))
    batch = plain.preprocess(observe(4), np.zeros((4, 8, ACTION_DIM), np.float32), np.ones((4, 8), bool))
    sums = plain.sft_loss(batch, range(4))
    (sums.loss_sum / sums.count).backward()
    settings = EngineConfig(device="cpu", shard_by="blocks", activation_checkpointing=recompute)
    engine = Engine(sharded, settings, total_updates=1)
    count = float(sums.count) / 2

    def loss(policy: GrootPolicy, first: int) -> LossSums:
        return policy.sft_loss(batch.select(slice(first, first + 2)), range(first, first + 2))

    engine.forward_backward([0, 2], loss, lambda first: count)
    gradients = {name: full_tensor(p.grad) for name, p in engine.trainable().items() if p.grad is not None}
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")  # float32 sums


def test_features_are_computed_once_per_chunk(tiny_groot: GrootPolicy, observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    backbone, stack = tiny_groot.model.backbone, tiny_groot.model.action_head.vl_self_attention
    for name, module in (("backbone", backbone), ("self-attention", stack)):
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    first_block = tiny_groot.model.action_head.model.transformer_blocks[0]
    first_block.register_forward_hook(lambda _, arguments, keywords, output: calls.append(str(keywords)), with_kwargs=True)
    tiny_groot.act(tiny_groot.preprocess(observe(2)), [0, 1])
    steps = tiny_groot.config.denoise_steps
    assert calls == ["backbone", "self-attention", "{'only_key_value': True}", *["{}"] * steps]


def test_recipes_choose_a_backbone_by_its_kind() -> None:
    config = build(GrootConfig, {"backbone": {"kind": "qwen3_vl", "read_layer": 4, "width": 128}})
    assert isinstance(config.backbone, QwenBackboneConfig) and config.backbone.read_layer == 4
    with pytest.raises(ConfigError, match=r"backbone\.kind is 'qwen3'; did you mean 'qwen3_vl'\?"):
        build(GrootConfig, {"backbone": {"kind": "qwen3"}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrootConfig(executed_horizon=9), "executed_horizon is 9, it must be 1 to chunk_length, which is 8"),
        (lambda: GrootConfig(state_dropout=1.0), r"state_dropout is 1\.0, it must be at least 0 and below 1"),
        (lambda: GrootConfig(chunk_length=65, executed_horizon=8), r"chunk_length is 65, but head\.positions is 64"),
        (lambda: GrootConfig(backbone=QWEN), r"head\.vl_attention is 128 wide \(heads \* head_width\), the backbone 32"),
        (lambda: GrootConfig(crop=0.0), r"crop is 0\.0, it must be above 0 and at most 1"),
        (lambda: ActionHeadConfig(embodiment=1), r"embodiment is 1, it must be 0 to 0 \(there are 1\)"),
        (lambda: ActionHeadConfig(dit=AttentionStackConfig(depth=0)), r"dit\.depth is 0"),
        (lambda: ActionHeadConfig(text_every=-1), "text_every is -1"),
        (lambda: ActionHeadConfig(time_buckets=0), "time_buckets is 0"),
        (lambda: AttentionStackConfig(heads=0), "heads is 0, it must be at least 1"),
        (lambda: QwenVisionConfig(image_size=250), r"image_size is 250, it must be a multiple of patch_size \* merge, which is 32"),
        (lambda: QwenVisionConfig(depth=6, deepstack=(5, 6)), r"deepstack is \[5, 6\]; every entry must be below depth, which is 6"),
        (lambda: QwenBackboneConfig(read_layer=2), r"read_layer is 2, it must be at least 1 .* vision\.deepstack layers, 3"),
        (lambda: EagleVisionConfig(image_size=256), r"image_size is 256, it must be a multiple of patch_size \* merge, which is 28"),
        (lambda: EagleVisionConfig(positions=200), "positions is 200, it must be the square of a whole number"),
        (lambda: EagleBackboneConfig(read_layer=0), "read_layer is 0, it must be at least 1"),
        (lambda: QwenVisionConfig(patch_size=0), "patch_size is 0, it must be at least 1"),
        (lambda: QwenVisionConfig(deepstack=(-1, 5)), r"deepstack is \[-1, 5\], it must be at least 0"),
        (lambda: EagleVisionConfig(heads=7), "width is 1152, it must be a multiple of heads, which is 7"),
        (lambda: EagleBackboneConfig(head_width=63), "head_width is 63, it must be even"),
        (lambda: QwenBackboneConfig(kv_heads=0), "kv_heads is 0, it must be at least 1"),
        (lambda: QwenBackboneConfig(kv_heads=5), "heads is 16, it must be a multiple of kv_heads, which is 5"),
        (
            lambda: QwenBackboneConfig(rope_sections=(24, 20, 21)),
            r"rope_sections is \[24, 20, 21\]; they must sum to half",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
