"""Our pi0 and pi0.5 against LeRobot's own code, with the same weights and the same noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config

from vla_rl.bench.lerobot_peer import lerobot_sizes
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.pi0.config import PI0_PRESETS, Pi0Config
from vla_rl.policies.pi0.model import Pi0Model
from vla_rl.policies.pi0.policy import PI0_FLOW
from vla_rl.policies.pi0.published import from_published, published_weights, to_published

TOLERANCE = 1e-5
"""Absolute, float32: both sides sum the same products in different orders; differences up to 4e-6 were seen."""
BATCH, VIEWS, LENGTH = 3, 2, 7
VOCABULARY, CHUNK = 97, 5


@dataclass
class Inputs:
    """Random inputs of the shapes that both sides take."""

    images: torch.Tensor
    tokens: torch.Tensor
    token_mask: torch.Tensor
    state: torch.Tensor
    actions: torch.Tensor
    noise: torch.Tensor
    time: torch.Tensor


def small_config(family: Any, kv_heads: int) -> Pi0Config:
    """Sizes that differ wherever they may differ, so that no transposed or swapped size can pass unseen."""
    language = TransformerConfig(width=48, depth=3, mlp_width=80, heads=8, kv_heads=kv_heads, head_width=12)
    expert = TransformerConfig(width=32, depth=3, mlp_width=56, heads=8, kv_heads=kv_heads, head_width=12)
    vision = VisionConfig(stem="patch", image_size=28, patch_size=14, conv_channels=(), width=36, depth=2, mlp_width=44, heads=3)
    return Pi0Config(
        family=family,
        chunk_length=CHUNK,
        executed_horizon=CHUNK,
        denoise_steps=4,
        vision=vision,
        language=language,
        expert=expert,
        vocabulary=VOCABULARY,
        model_state_dim=10,
        model_action_dim=9,
        normalization=PI0_PRESETS["pi05_base"].normalization,
        carry_output_head=True,
        time_min_period=PI0_PRESETS["pi0_base"].time_min_period,
    )


def lerobot_model(config: Pi0Config) -> Any:
    """LeRobot's class at our sizes, with random weights everywhere."""
    module = modeling_pi0 if config.family == "pi0" else modeling_pi05
    config_class, model_class = (PI0Config, "PI0Pytorch") if config.family == "pi0" else (PI05Config, "PI05Pytorch")
    fields = config_class(
        device="cpu",
        dtype="float32",
        chunk_size=config.chunk_length,
        n_action_steps=config.chunk_length,
        max_state_dim=config.model_state_dim,
        max_action_dim=config.model_action_dim,
        num_inference_steps=config.denoise_steps,
        image_resolution=(config.vision.image_size,) * 2,
    )
    with lerobot_sizes(module, config):
        model = getattr(module, model_class)(fields).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.12
    return model


def our_model(config: Pi0Config, theirs: Any) -> Pi0Model:
    """Our class with LeRobot's weights, through the names of the published files."""
    model = Pi0Model(config, VIEWS).eval()
    state = {f"model.{name}": tensor for name, tensor in theirs.state_dict().items() if not name.endswith("paligemma.lm_head.weight")}
    model.load_state_dict({from_published(name).removeprefix("model."): tensor for name, tensor in state.items()}, strict=True)
    return model


def random_inputs(config: Pi0Config) -> Inputs:
    """One prompt is full, one is short, one is a single token: padding must not leak."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    size = config.vision.image_size
    return Inputs(
        images=normal(BATCH, VIEWS, 3, size, size).clamp(-1, 1),
        tokens=torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator),
        token_mask=torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [1]]),
        state=normal(BATCH, config.model_state_dim),
        actions=normal(BATCH, CHUNK, config.model_action_dim),
        noise=normal(BATCH, CHUNK, config.model_action_dim),
        time=torch.tensor([0.001, 0.37, 1.0]),
    )


def lerobot_arguments(config: Pi0Config, inputs: Inputs) -> list[Any]:
    images = [inputs.images[:, view] for view in range(VIEWS)]
    masks = [torch.ones(BATCH, dtype=torch.bool)] * VIEWS
    state = [inputs.state] if config.family == "pi0" else []
    return [images, masks, inputs.tokens, inputs.token_mask, *state]


CASES = [(family, kv_heads) for family in ("pi0", "pi05") for kv_heads in (1, 8)]


@pytest.mark.parametrize(("family", "kv_heads"), CASES)
def test_training_error_equals_lerobots(family: str, kv_heads: int) -> None:
    config = small_config(family, kv_heads)
    theirs = lerobot_model(config)
    ours, inputs = our_model(config, theirs), random_inputs(config)
    expected = theirs(*lerobot_arguments(config, inputs), inputs.actions, inputs.noise, inputs.time)
    prefix = ours.encode_prefix(inputs.images, inputs.tokens, inputs.token_mask)
    x_t = PI0_FLOW.path(inputs.actions, inputs.noise, inputs.time)
    velocity = ours.velocity(prefix, inputs.state, x_t, inputs.time)
    error = (velocity - PI0_FLOW.target(inputs.actions, inputs.noise)).square()
    assert expected.std() > 0.1, "a trivial output would agree by accident"
    torch.testing.assert_close(error, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "kv_heads"), CASES)
def test_velocities_and_sampled_actions_equal_lerobots(family: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(family, kv_heads)
    theirs = lerobot_model(config)
    ours, inputs = our_model(config, theirs), random_inputs(config)
    velocities: list[torch.Tensor] = []
    denoise_step = theirs.denoise_step
    monkeypatch.setattr(theirs, "denoise_step", lambda **arguments: velocities.append(denoise_step(**arguments)) or velocities[-1])
    expected = theirs.sample_actions(*lerobot_arguments(config, inputs), noise=inputs.noise)
    mine: list[torch.Tensor] = []
    with torch.no_grad():
        prefix = ours.encode_prefix(inputs.images, inputs.tokens, inputs.token_mask)

        def velocity(x_t: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            mine.append(ours.velocity(prefix, inputs.state, x_t, time))
            return mine[-1]

        actions = PI0_FLOW.euler(velocity, inputs.noise, config.denoise_steps)
    torch.testing.assert_close(torch.stack(mine), torch.stack(velocities), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(actions, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["pi0_base", "pi05_base"])
def test_published_size_has_lerobots_names_and_shapes(name: str) -> None:
    config = PI0_PRESETS[name]
    pi0 = config.family == "pi0"
    with torch.device("meta"):
        theirs = modeling_pi0.PI0Pytorch(PI0Config(device="cpu")) if pi0 else modeling_pi05.PI05Pytorch(PI05Config(device="cpu"))
        ours = Pi0Model(config, VIEWS)
    weights = published_weights({f"model.{key}": tensor for key, tensor in ours.state_dict().items()})
    assert {key: tensor.shape for key, tensor in weights.items()} == {
        f"model.{key}": tensor.shape for key, tensor in theirs.state_dict().items()
    }, "LeRobot's policies hold this network as `model`"


def test_published_names_go_both_ways() -> None:
    names = [f"model.{key}" for preset in ("tiny", "tiny_pi05") for key in Pi0Model(PI0_PRESETS[preset], VIEWS).state_dict()]
    assert all(from_published(to_published(name)) == name for name in names)
    assert len({to_published(name) for name in names}) == len(set(names))
