"""Cluster tests start roles of small classes, and train the very small policy of the RL tests on Reach."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vla_rl.phases.rl_config import RlConfig

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "phases"))


@pytest.fixture(scope="session")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the policy that every run starts from."""
    import torch
    from cluster_run import RESOLUTION
    from rl_recipe import save_random_policy

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("initial") / "policy"
    save_random_policy(folder, resolution=RESOLUTION)
    return folder


@pytest.fixture(scope="session")
def inline(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> RlConfig:
    """Three steps in one process: what every other backend must give."""
    from cluster_run import RUN
    from rl_recipe import rl_recipe

    from vla_rl.phases.rl import run_rl

    config = rl_recipe(tmp_path_factory.mktemp("inline") / "run", initial, **RUN)
    assert run_rl(config) == 0
    return config
