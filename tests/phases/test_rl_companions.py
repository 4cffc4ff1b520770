"""What an RL run takes beside its policy: a teacher, demonstrations or an evaluation that does not fit is found before it trains."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rl_recipe import POLICY, PPO, metrics_of, rl_recipe, save_random_policy

from vla_rl.algorithms.config import CloningSettings, DistillationSettings
from vla_rl.config import ConfigError
from vla_rl.conventions import ConventionMismatch, Conventions
from vla_rl.datasets.loader import DataConfig
from vla_rl.datasets.schema import DatasetError
from vla_rl.phases import rl
from vla_rl.phases.evaluation import EvaluationConfig
from vla_rl.phases.pipeline import check_phase
from vla_rl.phases.rl_cloning import open_cloning
from vla_rl.phases.rl_dry_run import dry_run_rl
from vla_rl.policies.checkpoint import load_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.sim.base import EnvConfig

ONE_STEP = {"steps": 1, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "policy"
    save_random_policy(folder)
    return folder


def test_a_teacher_reads_pictures_in_its_own_size(initial: Path, tmp_path: Path) -> None:
    """It was given what the learner's processor makes."""
    save_random_policy(tmp_path / "teacher", config=replace(POLICY, vision=replace(POLICY.vision, image_size=64)))
    algorithm = replace(PPO, distillation=DistillationSettings("velocity", 0.3))
    config = rl_recipe(tmp_path / "run", initial, algorithm=algorithm, teacher=str(tmp_path / "teacher"), **ONE_STEP)
    assert rl.run_rl(config) == 0
    assert metrics_of(config)[0]["loss_distillation"] > 0


@pytest.mark.parametrize(
    ("teacher", "live_dims", "exploration", "said"),
    [
        (POLICY, 5, Exploration(), r"normalised action, scale: \[.*\] and \[.*0\.0, 0\.0\]"),
        (replace(POLICY, chunk_length=8), 7, Exploration(), "chunk_length: 4 and 8"),
        (replace(POLICY, denoise_steps=5), 7, Exploration(), "denoise_steps: 3 and 5"),
        (POLICY, 7, Exploration("flow_noise"), "noise_head: .* the teacher has none"),
    ],
    ids=["statistics", "chunk", "grid", "noise-head"],
)
def test_a_teacher_that_means_something_else_is_refused(
    teacher: Pi0Config, live_dims: int, exploration: Exploration, said: str, initial: Path, tmp_path: Path
) -> None:
    """Other statistics and another denoise grid were scored without a word."""
    save_random_policy(tmp_path / "teacher", config=teacher, live_dims=live_dims)
    algorithm = replace(PPO, distillation=DistillationSettings("policy_gradient", 0.3))
    config = rl_recipe(
        tmp_path / "run", initial, algorithm=algorithm, teacher=str(tmp_path / "teacher"), exploration=exploration, **ONE_STEP
    )
    with pytest.raises(ConfigError, match=rf"teacher .*cannot score[\s\S]*{said}"):
        rl.run_rl(config)


def test_demonstrations_of_other_conventions_are_refused(initial: Path, tmp_path: Path, reach_demonstrations_32: Path) -> None:
    data = DataConfig(paths=(str(reach_demonstrations_32),), validation_fraction=0.0)
    algorithm = replace(PPO, cloning=CloningSettings(coefficient=0.5))
    config, policy = rl_recipe(tmp_path, initial, algorithm=algorithm, demonstrations=data), load_policy(initial)
    policy.spec = replace(policy.spec, conventions=Conventions(control_rate_hz=10))
    with pytest.raises(ConventionMismatch, match=r"control_rate_hz: policy .* has 10, dataset .* has 20"):
        open_cloning(config, policy)


def test_a_resume_with_other_demonstrations_is_an_error_for_the_user(initial: Path, tmp_path: Path, reach_demonstrations_32: Path) -> None:
    folder = tmp_path / "demonstrations"
    shutil.copytree(reach_demonstrations_32, folder)
    algorithm = replace(PPO, cloning=CloningSettings(coefficient=0.5, global_batch_size=6))
    data = DataConfig(paths=(str(folder),), validation_fraction=0.0)
    config = rl_recipe(tmp_path / "run", initial, algorithm=algorithm, demonstrations=data, **ONE_STEP)
    assert rl.run_rl(config) == 0
    files = sorted(folder.rglob("*.hdf5"))
    assert len(files) > 1
    files[0].unlink()
    with pytest.raises(DatasetError, match=r"num_samples is \d+, the checkpoint has \d+; .* Episodes were added, removed or changed"):
        rl.run_rl(replace(config, steps=2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": EnvConfig()}, r"evaluation: suite 'reach' does not run in env\.kind 'libero'"),
        ({"tasks": (9,)}, r"evaluation: tasks has \[9\]; suite 'reach' has tasks 0 to 3"),
        ({"env": EnvConfig(kind="reach", resolution=64)}, r"evaluation\.env\.resolution is 64, .* have 32 px"),
    ],
)
def test_an_evaluation_that_cannot_run_is_found_before_anything_is_trained(
    changes: dict[str, Any], said: str, initial: Path, tmp_path: Path
) -> None:
    """It ended the run when the first one was due."""
    good: dict[str, Any] = {"every": 2, "suite": "reach", "env": EnvConfig(kind="reach", resolution=32)}
    config = rl_recipe(tmp_path / "run", initial, evaluation=EvaluationConfig(**(good | changes)))
    for start_up in (rl.run_rl, dry_run_rl, check_phase):
        with pytest.raises(ConfigError, match=said):
            start_up(config)
    assert not (tmp_path / "run").exists()
