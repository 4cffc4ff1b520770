"""Shared simulator for the LIBERO tests: compiling a task takes seconds, so one env serves them all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("MUJOCO_GL", "egl")

from vla_rl.conventions import Orientation
from vla_rl.episode import EpisodeSpec, StepProtocol
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.libero.env import LiberoEnv


@pytest.fixture(scope="session")
def env() -> Iterator[LiberoEnv]:
    """An env with 128 pixel pictures in OpenGL's raw orientation, as stock LIBERO returns them."""
    made = LiberoEnv(EnvConfig(orientation=Orientation.RAW))
    yield made
    made.close()


def benchmark_spec(suite: str, task: int, number: int, **protocol: int) -> EpisodeSpec:
    """A published initial state."""
    return EpisodeSpec(suite, task, f"benchmark:{number}", "test", protocol=StepProtocol(**protocol))


def sampled_spec(suite: str, task: int, number: int, **protocol: int) -> EpisodeSpec:
    """A sampled scene of the training range."""
    return EpisodeSpec(suite, task, f"sampled:{1_000_000 + number}", "train", protocol=StepProtocol(**protocol))
