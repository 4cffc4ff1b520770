"""LeRobot's own families behind the adapter: their processors, their networks, batched, with noise row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors
from published_folders import RESOLUTION, input_features, stats_tensors
from safetensors.torch import load_file, save_file

from vla_rl.episode import ACTION_DIM, VIEWS, Observation
from vla_rl.policies.checkpoint import CheckpointError, load_acting_policy, load_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.inference import answer
from vla_rl.policies.inspect import inspect_checkpoint
from vla_rl.policies.lerobot_policy import LerobotPolicy
from vla_rl.policies.processor import ProcessorError
from vla_rl.policies.row_random import RowRandom
from vla_rl.policies.statistics import ACTION, Statistics

CHUNK = 8
Observe = Callable[..., list[Observation]]


def act_policy() -> ACTPolicy:
    """A tiny ACT."""
    sizes = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4}
    return ACTPolicy(ACTConfig(chunk_size=CHUNK, n_action_steps=4, pretrained_backbone_weights=None, **common(), **sizes))


def diffusion_policy(scheduler: str = "DDPM") -> DiffusionPolicy:
    """A tiny diffusion policy; DDPM draws noise at every step, DDIM only at the start."""
    config = DiffusionConfig(
        n_obs_steps=1,
        horizon=CHUNK,
        n_action_steps=CHUNK,
        down_dims=(8, 16),
        n_groups=4,
        diffusion_step_embed_dim=8,
        spatial_softmax_num_keypoints=4,
        pretrained_backbone_weights=None,
        num_train_timesteps=4,
        noise_scheduler_type=scheduler,
        **common(),
    )
    return DiffusionPolicy(config)


def common() -> dict[str, Any]:
    return {
        "device": "cpu",
        "input_features": input_features(),
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
    }


def save(policy: Any, statistics: Statistics, folder: Path) -> Path:
    """As LeRobot's training saves it."""
    torch.manual_seed(3)
    for parameter in policy.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    policy.eval().save_pretrained(folder)
    for pipeline in make_pre_post_processors(policy.config, dataset_stats=stats_tensors(statistics)):
        pipeline.save_pretrained(folder)
    return folder


MAKERS: dict[str, Callable[[], Any]] = {"act": act_policy, "diffusion": diffusion_policy}


@pytest.fixture(params=list(MAKERS))
def folder(request: pytest.FixtureRequest, statistics: Statistics, tmp_path: Path) -> Path:
    """A saved ACT, and a saved diffusion policy."""
    return save(MAKERS[request.param](), statistics, tmp_path / request.param)


def test_its_chunks_are_lerobots(folder: Path, observe: Observe) -> None:
    """LeRobot's own pipeline on the frames that its env hands out, with the noise that row's seed gives."""
    policy = load_acting_policy(folder)
    assert isinstance(policy, LerobotPolicy)
    observations = observe(3, RESOLUTION)
    _, actions = answer(policy, observations, [5, 6, 7], 3, "cpu")
    executed = 4 if "act" in folder.name else CHUNK
    assert actions.shape == (3, CHUNK, ACTION_DIM) and policy.spec.executed_horizon == executed
    assert policy.spec.views == VIEWS and policy.spec.resolution == RESOLUTION
    theirs = (ACTPolicy if "act" in folder.name else DiffusionPolicy).from_pretrained(folder)
    before, after = make_pre_post_processors(theirs.config, str(folder))
    for row, observation in enumerate(observations):
        frame = {f"observation.images.{view}": torch.from_numpy(observation.images[view]).permute(2, 0, 1) / 255 for view in VIEWS}
        batch = before(frame | {"observation.state": torch.from_numpy(observation.state), "task": observation.prompt})
        if "diffusion" in folder.name:
            batch["observation.state"] = batch["observation.state"][:, None]
        with torch.no_grad(), RowRandom([5 + row]):
            chunk = after(theirs.predict_action_chunk(batch))[0].clamp(-1, 1).numpy()
        np.testing.assert_allclose(actions[row], chunk, atol=2e-5, rtol=0)  # batches of another size sum in another order


def test_a_rows_noise_is_its_own_and_the_global_random_state_stays(statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    policy = load_acting_policy(save(diffusion_policy(), statistics, tmp_path / "diffusion"))
    observations = observe(3, RESOLUTION)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    _, together = answer(policy, observations, [1, 2, 3], 3, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    _, mixed = answer(policy, [observations[2], observations[0]], [3, 1], 3, "cpu")
    np.testing.assert_array_equal(mixed, together[[2, 0]])
    _, other = answer(policy, observations, [1, 2, 4], 3, "cpu")
    assert np.abs(other[2] - together[2]).max() > 1e-3 and np.array_equal(other[:2], together[:2])


def test_given_noise_reaches_the_network_unchanged(statistics: Statistics, observe: Observe, tmp_path: Path) -> None:
    """DDIM draws once: LeRobot's own `noise` argument with the numbers of each row's generator gives the same chunk."""
    policy = load_acting_policy(save(diffusion_policy("DDIM"), statistics, tmp_path / "diffusion"))
    assert isinstance(policy, LerobotPolicy)
    observations = observe(2, RESOLUTION)
    sampled = policy.act(policy.preprocess(observations), [8, 9]).actions_BCA
    noise = torch.stack([torch.randn(CHUNK, ACTION_DIM, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9)])
    values = dict(policy.preprocess(observations).groups[0].values)
    values["observation.state"] = values["observation.state"][:, None]
    torch.testing.assert_close(sampled, policy.policy.predict_action_chunk(values, noise=noise), atol=0, rtol=0)


def test_random_numbers_that_no_row_owns_are_refused() -> None:
    second = torch.randn(3, generator=torch.Generator().manual_seed(2))
    with RowRandom([1, 2]):
        assert torch.equal(torch.randn(2, 3)[1], second)
        with pytest.raises(RuntimeError, match="not one row for each of 2 seeds"):
            torch.randn(5)
        with pytest.raises(RuntimeError, match="another mean or spread"):
            torch.normal(mean=1.0, std=1.0, size=(2, 3))


def test_what_it_cannot_do_is_named(folder: Path, observe: Observe) -> None:
    policy = load_acting_policy(folder)
    with pytest.raises(ProcessorError, match="records no transitions"):
        policy.act(policy.preprocess(observe(1, RESOLUTION)), [0], Exploration())
    with pytest.raises(CheckpointError, match="no such family to train"):
        load_policy(folder)
    report = inspect_checkpoint(folder)
    assert report.problems == () and report.spec == policy.spec and "LeRobot's" in report.tensors[0].destination


def test_folders_that_lack_something_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if name.endswith("weight"))
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"LeRobot cannot load(.|\n)*{lost}"):
        load_acting_policy(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_obs_steps": 2}))
    with pytest.raises(CheckpointError, match="n_obs_steps is 2"):
        load_acting_policy(folder)
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks policy_postprocessor\.json.*migrate_policy_normalization"):
        load_acting_policy(folder)
