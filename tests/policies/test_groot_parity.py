"""Our GR00T-style policy against LeRobot's own N1.7 code, with the same weights and the same noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17ActionHead, GR00TN17Config

from vla_rl.bench.lerobot_groot import lerobot_groot, lerobot_inputs, our_groot
from vla_rl.policies.base import Batch
from vla_rl.policies.groot.config import (
    GROOT_PRESETS,
    N1_6_HEAD,
    ActionHeadConfig,
    AttentionStackConfig,
    GrootConfig,
    QwenBackboneConfig,
    QwenVisionConfig,
)
from vla_rl.policies.groot.head import ActionHead
from vla_rl.policies.groot.model import GrootModel
from vla_rl.policies.groot.policy import GROOT_FLOW
from vla_rl.policies.groot.published import own_name, to_published

TOLERANCE = 1e-5
"""Absolute, float32: both sides sum the same products in different orders; differences up to 5e-6 were seen."""
BATCH, VIEWS, CHUNK, EMBODIMENTS, EMBODIMENT = 3, 2, 5, 4, 2
IMAGE_TOKEN, IMAGE_START, IMAGE_END, TEXT = 90, 91, 92, 6
"""Numbers of the tokens of and around images, above all text, and text tokens after the images."""
VISION = QwenVisionConfig(image_size=64, width=24, depth=3, mlp_width=40, heads=2, positions=36, deepstack=(0, 2))
BACKBONE = QwenBackboneConfig(
    vision=VISION,
    read_layer=3,
    width=32,
    mlp_width=56,
    heads=4,
    kv_heads=2,
    head_width=12,
    vocabulary=97,
    rope_sections=(2, 2, 2),
)
HEAD = ActionHeadConfig(
    vl_attention=AttentionStackConfig(depth=2, heads=2, head_width=16),
    dit=AttentionStackConfig(depth=9, heads=3, head_width=12),
    hidden_width=28,
    embodiments=EMBODIMENTS,
    embodiment=EMBODIMENT,
    positions=16,
    time_buckets=1000,
)
"""Sizes that differ wherever they may differ, and a depth in which text, images and own tokens all take their turns."""
PLAIN = replace(HEAD, text_every=0, vl_attention=replace(HEAD.vl_attention, depth=1))
N1_6 = replace(HEAD, vl_attention=replace(HEAD.vl_attention, depth=0), dit=replace(HEAD.dit, depth=4))
CASES = {
    "n1_7": (HEAD, False),
    "plain-dit": (PLAIN, False),
    "n1_6-padded": (N1_6, True),
}
"""The head, and whether prompts are padded: LeRobot's self-attention over features and its plain transformer read padding, ours do not."""


@dataclass
class Inputs:
    """Random inputs of the shapes that both sides take."""

    images: torch.Tensor
    batch: Batch
    actions: torch.Tensor
    noise: torch.Tensor
    time: torch.Tensor


def small_config(head: ActionHeadConfig) -> GrootConfig:
    return GrootConfig(
        chunk_length=CHUNK,
        executed_horizon=CHUNK,
        denoise_steps=4,
        backbone=BACKBONE,
        head=head,
        prompt_tokens=VIEWS * (VISION.tokens + 2) + TEXT,
        model_state_dim=10,
        model_action_dim=9,
    )


def lerobot_model(config: GrootConfig, folder: Path) -> GR00TN17:
    return lerobot_groot(config, IMAGE_TOKEN, folder, spread=0.15)


def our_model(config: GrootConfig, theirs: GR00TN17) -> GrootModel:
    return our_groot(config, theirs, VIEWS, IMAGE_TOKEN)


def random_inputs(config: GrootConfig, padded: bool) -> Inputs:
    """With `padded`, one prompt is full, one is short, one is a single token."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    images = torch.randint(0, 256, (BATCH, VIEWS, 3, VISION.image_size, VISION.image_size), generator=generator, dtype=torch.uint8)
    pictures = torch.tensor([IMAGE_START, *[IMAGE_TOKEN] * VISION.tokens, IMAGE_END] * VIEWS).expand(BATCH, -1)
    text = torch.randint(0, IMAGE_TOKEN, (BATCH, TEXT), generator=generator)
    lengths = torch.tensor([[TEXT], [4], [1]]) if padded else torch.full((BATCH, 1), TEXT)
    mask = torch.cat((torch.ones_like(pictures, dtype=torch.bool), torch.arange(TEXT) < lengths), 1)
    batch = Batch(images.float() / 127.5 - 1.0, normal(BATCH, config.model_state_dim), torch.cat((pictures, text), 1), mask)
    actions, noise = normal(BATCH, CHUNK, config.model_action_dim), normal(BATCH, CHUNK, config.model_action_dim)
    return Inputs(images, batch, actions, noise, torch.tensor([0.0, 0.3704, 0.998]))


def their_features(theirs: GR00TN17, config: GrootConfig, inputs: Inputs) -> Any:
    """LeRobot's backbone on what transformers' own image processor makes of the pictures."""
    return theirs.backbone(lerobot_inputs(config, inputs.batch, inputs.images))


def their_action_input(inputs: Inputs, **more: torch.Tensor) -> Any:
    from transformers.feature_extraction_utils import BatchFeature

    return BatchFeature({"state": inputs.batch.state_BS[:, None], "embodiment_id": torch.full((BATCH,), EMBODIMENT), **more})


@pytest.mark.parametrize("case", CASES)
def test_training_error_equals_lerobots(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, padded = CASES[case]
    config = small_config(head)
    theirs, inputs = lerobot_model(config, tmp_path), random_inputs(config, padded)
    monkeypatch.setattr(theirs.action_head, "sample_time", lambda *_, **__: inputs.time)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: inputs.noise)
    mask = (torch.arange(config.model_action_dim) < 7).expand(BATCH, CHUNK, -1).float()
    expected = theirs.action_head(
        their_features(theirs, config, inputs), their_action_input(inputs, action=inputs.actions, action_mask=mask)
    )
    monkeypatch.undo()
    ours = our_model(config, theirs)
    x_t = GROOT_FLOW.path(inputs.actions, inputs.noise, inputs.time)
    velocity = ours.project(ours.suffix(ours.encode(inputs.batch), inputs.batch.state_BS, x_t, inputs.time)[:, -CHUNK:])
    error = (velocity - GROOT_FLOW.target(inputs.actions, inputs.noise)).square() * mask
    assert expected["action_loss"].std() > 0.1, "a trivial output would agree by accident"
    torch.testing.assert_close(error, expected["action_loss"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(error.sum() / mask.sum(), expected["loss"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_sampled_actions_equal_lerobots(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, padded = CASES[case]
    config = small_config(head)
    theirs, inputs = lerobot_model(config, tmp_path), random_inputs(config, padded)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: inputs.noise.clone())
    expected = theirs.action_head.get_action(their_features(theirs, config, inputs), their_action_input(inputs))["action_pred"]
    monkeypatch.undo()
    ours = our_model(config, theirs)
    with torch.no_grad():
        prefix = ours.encode(inputs.batch)
        actions = GROOT_FLOW.euler(
            lambda x_t, time: ours.project(ours.suffix(prefix, inputs.batch.state_BS, x_t, time)[:, -CHUNK:]),
            inputs.noise,
            config.denoise_steps,
        )
    assert (actions - inputs.noise).std() > 0.1
    torch.testing.assert_close(actions, expected, atol=TOLERANCE, rtol=0)


def test_hidden_states_equal_lerobots_state_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(small_config(HEAD), state_dropout=0.5)
    theirs, inputs = lerobot_model(config, tmp_path), random_inputs(config, False)
    features = their_features(theirs, config, inputs)
    monkeypatch.setattr(theirs.action_head, "sample_time", lambda *_, **__: inputs.time)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: inputs.noise)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([0.2, 0.7, 0.4]))
    mask = torch.ones_like(inputs.actions)
    theirs.action_head.train()
    expected = theirs.action_head(features, their_action_input(inputs, action=inputs.actions, action_mask=mask))["action_loss"]
    monkeypatch.undo()
    ours = our_model(config, theirs)
    prefix = ours.encode(replace(inputs.batch, state_mask_B=torch.tensor([False, True, False])))
    x_t = GROOT_FLOW.path(inputs.actions, inputs.noise, inputs.time)
    velocity = ours.project(ours.suffix(prefix, inputs.batch.state_BS, x_t, inputs.time)[:, -CHUNK:])
    torch.testing.assert_close((velocity - (inputs.actions - inputs.noise)).square(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("head", [HEAD, PLAIN], ids=["n1_7", "plain-dit"])
def test_padding_is_not_read(head: ActionHeadConfig) -> None:
    config = small_config(head)
    torch.manual_seed(0)
    model, inputs = GrootModel(config, VIEWS, IMAGE_TOKEN).eval(), random_inputs(config, padded=True)
    torch.nn.init.normal_(model.action_head.action_decoder.layer2.W)
    changed = replace(inputs.batch, tokens_BL=torch.where(inputs.batch.token_mask_BL, inputs.batch.tokens_BL, 3))
    with torch.no_grad():
        first, second = (
            model.project(model.suffix(model.encode(batch), batch.state_BS, inputs.noise, inputs.time)) for batch in (inputs.batch, changed)
        )
    assert torch.equal(first, second)


def test_time_falls_into_lerobots_buckets() -> None:
    for steps in range(1, 21):
        for buckets in (20, 1000):
            with torch.device("meta"):
                head = ActionHead(replace(HEAD, time_buckets=buckets), 8, 8, 7)
            expected = [int(step / float(steps) * buckets) for step in range(steps)]
            assert head.bucket(torch.tensor(GROOT_FLOW.grid(steps)[:-1])).tolist() == expected


def test_published_size_has_lerobots_names_and_shapes() -> None:
    config = GROOT_PRESETS["n1_7"]
    with torch.device("meta"):
        theirs = GR00TN17(GR00TN17Config(), load_backbone_weights=False)
        ours = GrootModel(config, VIEWS, 151655)
    weights = {to_published(f"model.{name}"): tensor.shape for name, tensor in ours.state_dict().items()}
    expected = {f"_groot_model.{name}": tensor.shape for name, tensor in theirs.state_dict().items()}
    del expected["_groot_model.backbone.model.lm_head.weight"]  # tied to the embedding; LeRobot's files leave it out
    assert weights == expected
    defaults = GR00TN17Config()
    assert (config.chunk_length, config.denoise_steps, config.state_dropout) == (
        defaults.action_horizon,
        defaults.num_inference_timesteps,
        defaults.state_dropout_prob,
    )


def test_n1_6_head_has_the_names_and_shapes_of_nvidias_source() -> None:
    # Isaac-GR00T configs/model/gr00t_n1d6.py: state and action 29, no self-attention over features, the same 32-layer transformer;
    # its action head's attributes (model/gr00t_n1d6/gr00t_n1d6.py) are N1.7's without vl_self_attention.
    # The released GR00T-N1.6-3B has 128 in place of 29 (see docs/groot.md); with state dropout there is one tensor more.
    sizes = GR00TN17Config(vl_self_attention_cfg={"num_layers": 0}, max_state_dim=29, max_action_dim=29, action_horizon=16)
    with torch.device("meta"):
        theirs, ours = GR00TN17ActionHead(sizes), ActionHead(N1_6_HEAD, 2048, 29, 29)
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == {
        name: tensor.shape for name, tensor in theirs.state_dict().items()
    }


def test_published_names_go_both_ways() -> None:
    for config in (GROOT_PRESETS["tiny"], small_config(HEAD)):
        with torch.device("meta"):
            names = [f"model.{name}" for name in GrootModel(config, VIEWS, IMAGE_TOKEN).state_dict()]
        assert all(own_name(to_published(name)) == name for name in names)
        assert len({to_published(name) for name in names}) == len(names)
        nvidia = [to_published(name).removeprefix("_groot_model.") for name in names]  # NVIDIA's folder has no prefix
        assert [own_name(name) for name in nvidia] == names
