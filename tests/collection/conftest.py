"""A recipe that runs in a second: Reach, both envs in this process. Makes the helper modules of this folder importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vla_rl.collection.config import CollectConfig
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def reach_recipe(tmp_path: Path) -> Callable[..., CollectConfig]:
    """`reach_recipe(name, **changes)`: a recipe with its run directory below the test's folder."""

    def make(name: str = "run", **changes: object) -> CollectConfig:
        config = CollectConfig(
            run_dir=str(tmp_path / name),
            suite="reach",
            tasks=(0, 2),
            episodes_per_task=3,
            env=EnvConfig(kind="reach", resolution=32),
            pool=PoolConfig(backend="serial", workers=2),
            show_progress=False,
        )
        return replace(config, **changes)  # type: ignore[arg-type]

    return make
