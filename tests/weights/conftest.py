"""Weight tests import their helpers by name, also in processes that they start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vla_rl.engine.world import World, close_world, open_world

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process alone, on the CPU."""
    torch.set_num_threads(1)
    yield open_world("cpu")
    close_world()
