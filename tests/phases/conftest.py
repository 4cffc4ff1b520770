"""Phase tests train on a few demonstrations of Reach, recorded once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("MUJOCO_GL", "egl")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def reach_demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six scenes, a picture before every second action."""
    import torch
    from reach_data import record_reach

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("reach")
    record_reach(folder, episodes=6)
    return folder


@pytest.fixture(scope="session")
def reach_demonstrations_32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scenes in small pictures, for policies that see little."""
    from reach_data import record_reach

    folder = tmp_path_factory.mktemp("reach_32")
    record_reach(folder, episodes=3, resolution=32)
    return folder
