"""What all runs of the cluster tests share."""

from __future__ import annotations

from typing import Any

from vla_rl.sim.base import EnvConfig

RESOLUTION = 128
"""Large enough for an episode to be worth a place in Ray's object store: smaller answers travel inside their messages."""
RUN: dict[str, Any] = {"steps": 3, "checkpoint_every": 1, "env": EnvConfig(kind="reach", resolution=RESOLUTION)}
