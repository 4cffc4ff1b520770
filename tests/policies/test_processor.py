"""What goes into a policy and comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.common.vla_utils import resize_with_pad_torch
from lerobot.processor import NormalizerProcessorStep

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.processor import Affine, Normalization, ProcessorError, prompt_with_state, resize
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

Observe = Callable[..., list[Observation]]


@pytest.mark.parametrize(
    ("mode", "scale"),
    [(Normalization.MEAN_STD, 850**0.5), (Normalization.MIN_MAX, 50.0), (Normalization.QUANTILES, 49.0)],
)
def test_normalisation_by_hand(mode: Normalization, scale: float) -> None:
    """0 to 100: mean and middle 50, standard deviation sqrt((101^2 - 1) / 12) = sqrt(850), quantiles 1 and 99."""
    affine = Affine(FeatureStats.from_values(np.arange(101.0)[:, None]), mode)
    assert affine.forward(torch.tensor([[50.0], [60.0]])).flatten().tolist() == pytest.approx([0.0, 10 / scale], abs=1e-6)
    assert affine.inverse(torch.tensor([[1.0]])).item() == pytest.approx(50 + scale, abs=1e-4)


@pytest.mark.parametrize("mode", list(Normalization))
def test_equals_lerobots_normaliser(mode: Normalization, statistics: Statistics) -> None:
    values = torch.randn(16, STATE_DIM, generator=torch.Generator().manual_seed(0))
    step = NormalizerProcessorStep(
        features={STATE: PolicyFeature(type=FeatureType.STATE, shape=(STATE_DIM,))},
        norm_map={FeatureType.STATE: NormalizationMode[mode.name]},
        stats={STATE: {name: np.array(entry) for name, entry in statistics.to_dict()[STATE].items()}},
    )
    expected = step({TransitionKey.OBSERVATION: {STATE: values}})[TransitionKey.OBSERVATION][STATE]
    found = Affine(statistics.features[STATE], mode).forward(values)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)  # the same affine map, rounded in another order


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=30), st.sampled_from(list(Normalization)))
def test_inverse_undoes_forward_and_constants_come_back(values: list[float], mode: Normalization) -> None:
    column = np.array(values)
    affine = Affine(FeatureStats.from_values(np.stack([column, np.full_like(column, 0.7)], 1)), mode)
    rows = torch.from_numpy(np.stack([column, np.full_like(column, 0.7)], 1)).float()
    back = affine.inverse(affine.forward(rows))
    torch.testing.assert_close(back, rows, atol=1e-4, rtol=0)  # float32 of values up to 100
    assert (affine.inverse(torch.randn(4, 2))[:, 1] == np.float32(0.7)).all(), "a constant dimension ignores the model"


def test_images_are_scaled_to_minus_one_to_one_in_order_of_views(tiny: Pi0Policy, observe: Observe) -> None:
    observation = observe(1)[0]
    images = {VIEWS[0]: np.zeros((64, 64, 3), np.uint8), VIEWS[1]: np.full((64, 64, 3), 255, np.uint8)}
    batch = tiny.preprocess([replace(observation, images=images)])
    assert batch.images_BVCHW.shape == (1, 2, 3, 64, 64)
    assert batch.images_BVCHW.dtype == torch.float32
    assert (batch.images_BVCHW[0, 0] == -1).all()
    assert (batch.images_BVCHW[0, 1] == 1).all()


def test_a_marked_corner_stays_where_it_is(tiny: Pi0Policy, observe: Observe) -> None:
    image = np.zeros((128, 128, 3), np.uint8)
    image[:8, :8, 0] = 255
    batch = tiny.preprocess([replace(observe(1)[0], images=dict.fromkeys(VIEWS, image))])
    marked = (batch.images_BVCHW[0, 0] > 0).nonzero()
    assert marked[:, 0].unique().tolist() == [0]
    assert marked[:, 1:].max() == 3


def test_halving_is_the_mean_of_two_by_two() -> None:
    image = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4).expand(1, 3, 4, 4)
    expected = torch.tensor([[2.5, 4.5], [10.5, 12.5]]) / 127.5 - 1
    torch.testing.assert_close(resize(image, 2, pad=True)[0, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (90, 120), (56, 56), (20, 20)])
def test_resizing_with_padding_equals_lerobots(shape: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (2, 3, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = resize_with_pad_torch(images.float() / 255, 32, 32) * 2 - 1
    torch.testing.assert_close(resize(images, 32, pad=True), expected, atol=1e-5, rtol=0)  # scaled before instead of after


def test_stretching_fills_the_square() -> None:
    images = torch.full((1, 3, 30, 64), 255, dtype=torch.uint8)
    assert (resize(images, 32, pad=True) == -1).any()
    assert (resize(images, 32, pad=False) == 1).all()


def test_prompt_with_state_by_hand() -> None:
    state = np.array([-1.0, 0.0, 0.999, -0.9921], np.float32)
    assert prompt_with_state(" pick_up the milk\n", state) == "Task: pick up the milk, State: 0 128 255 1;\nAction: "


def test_pi0_prompt_ends_in_one_newline(tiny: Pi0Policy, observe: Observe) -> None:
    plain, ended = (tiny.preprocess(observe(1, prompt=prompt)).tokens_BL for prompt in ("open it", "open it\n"))
    assert torch.equal(plain, ended)


def test_state_and_actions_are_padded_to_the_models_dimensions(statistics: Statistics, observe: Observe) -> None:
    config = replace(PI0_PRESETS["tiny"], model_state_dim=12, model_action_dim=10)
    policy = make_policy(config, statistics, policy_spec(config, resolution=64))
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 8, ACTION_DIM)).astype(np.float32)
    batch = policy.preprocess(observe(2), actions)
    assert batch.state_BS.shape == (2, 12)
    assert batch.actions_BCA is not None
    assert batch.actions_BCA.shape == (2, 8, 10)
    assert not batch.state_BS[:, STATE_DIM:].any()
    assert not batch.actions_BCA[..., ACTION_DIM:].any()
    np.testing.assert_allclose(policy.postprocess(batch.actions_BCA), actions, atol=1e-6)


def test_postprocess_clips(tiny: Pi0Policy) -> None:
    actions = tiny.postprocess(torch.full((1, 8, 7), 50.0))
    assert actions.dtype == np.float32
    assert (actions == 1).all()


def broken(observation: Observation, what: str) -> Observation:
    """One observation with one thing wrong."""
    image = observation.images[VIEWS[0]]
    changes = {
        "view": {"images": {VIEWS[0]: image}},
        "shape": {"images": dict.fromkeys(VIEWS, image[..., :1])},
        "dtype": {"images": dict.fromkeys(VIEWS, image.astype(np.float32))},
        "state": {"state": observation.state[:7]},
        "float64": {"state": observation.state.astype(np.float64)},
        "nan": {"state": np.array([0, np.nan, *[0] * 6], np.float32)},
        "privileged": {"privileged": {"milk_1": np.zeros(3)}},
        "prompt": {"prompt": "really " * 50},
    }
    return replace(observation, **changes[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("view", r"observation\.images\.image2 is missing; the observation has the views image$"),
        ("shape", r"observation\.images\.image: expected uint8\[H, W, 3\], got uint8\[64, 64, 1\]"),
        ("dtype", r"observation\.images\.image: expected uint8\[H, W, 3\], got float32\[64, 64, 3\]"),
        ("state", r"observation\.state: expected shape \[8\], got \[7\] \(dimension 0 differs\)"),
        ("float64", r"observation\.state: expected float32, got float64"),
        ("nan", r"observation\.state: 1 values are not finite, the first at index \[1\]"),
        ("privileged", r"privileged information \(milk_1\), which a policy must not see"),
        ("prompt", r"task: the prompt needs \d+ tokens and there are prompt_tokens=24"),
    ],
)
def test_bad_observations_are_named(what: str, message: str, tiny: Pi0Policy, observe: Observe) -> None:
    good = observe(2)
    with pytest.raises(ProcessorError, match=message):
        tiny.preprocess([good[0], broken(good[1], what)])


def test_bad_actions_are_named(tiny: Pi0Policy, observe: Observe) -> None:
    for shape, message in (
        ((2, 8, 8), r"action: expected shape \[2, 8, 7\], got \[2, 8, 8\] \(dimension 2 differs\)"),
        ((2, 7), "number of"),
    ):
        with pytest.raises(ProcessorError, match=message):
            tiny.preprocess(observe(2), np.zeros(shape, np.float32))
    with pytest.raises(ProcessorError, match=r"action mask: expected bool\[2, 8\], got float32\[2, 8\]"):
        tiny.preprocess(observe(2), np.zeros((2, 8, 7), np.float32), np.ones((2, 8), np.float32))
    with pytest.raises(ProcessorError, match="at least one observation"):
        tiny.preprocess([])


def test_images_of_two_resolutions_in_one_batch_are_named(tiny: Pi0Policy, observe: Observe) -> None:
    with pytest.raises(ProcessorError, match=r"observation\.images\.image: one batch holds images of different shapes"):
        tiny.preprocess([*observe(1, 64), *observe(1, 128)])


def test_statistics_that_do_not_fit_are_refused_when_the_policy_is_made(statistics: Statistics) -> None:
    config = PI0_PRESETS["tiny"]
    spec = policy_spec(config, resolution=64)
    eight = FeatureStats.from_values(np.random.default_rng(0).normal(size=(9, 8)))
    for features, message in (
        ({STATE: statistics.features[STATE]}, "no statistics for feature 'action'"),
        ({**statistics.features, ACTION: eight}, "'action' have 8 dimensions, the feature has 7"),
        ({**statistics.features, "observation.force": eight}, r"do not exist: observation\.force"),
    ):
        with pytest.raises(ProcessorError, match=message):
            make_policy(config, Statistics(features), spec)
