"""Operators without a person: recorded hands, for other pictures of the same episodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.operators import ReplayOperator
from vla_rl.config import ConfigError
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig

Recipe = Callable[..., CollectConfig]


@pytest.mark.parametrize("workers", [1, 3])
def test_recorded_hands_give_the_same_episodes_with_other_pictures(reach_recipe: Recipe, workers: int) -> None:
    """Failures too, which ended by the time limit; labels, who acted and outcomes stay; pictures are larger and denser."""
    first = reach_recipe("first", max_steps=12, keep_failures=True, frame_every=4)
    replay = ReplayOperator("replay", first.run_dir)
    changes = {"env": EnvConfig("reach", resolution=48), "frame_every": 1, "keep_failures": True, "pool": PoolConfig("serial", workers)}
    again = reach_recipe("again", operator=replay, **changes)
    collect(first)
    summary = collect(again)
    assert summary.complete and summary.episodes == 6
    for number in range(6):
        before, after = (read_episode(Path(run.run_dir) / "episodes" / f"episode_{number:06d}.hdf5") for run in (first, again))
        assert (after.spec, after.outcome, after.reason) == (before.spec, before.outcome, before.reason)
        np.testing.assert_array_equal(after.actions_NA(), before.actions_NA())
        np.testing.assert_array_equal(after.labels_NA(), before.labels_NA())
        assert not any(step.intervention_E.any() for step in after.steps), "a script acted, and a replay does not make it a person"
        assert len(after.frames()) == after.num_steps and after.frames()[0].images["image"].shape == (48, 48, 3)
        assert after.provenance["actor"]["name"] == "replay"


def test_a_replay_of_nothing_is_refused(reach_recipe: Recipe) -> None:
    first = reach_recipe("first", tasks=(0,), episodes_per_task=1)
    collect(first)
    with pytest.raises(ConfigError, match=r"holds no episode of reach tasks \[3\]; it holds reach task 0"):
        collect(reach_recipe("again", tasks=(3,), operator=ReplayOperator("replay", first.run_dir)))
    shutil.copytree(Path(first.run_dir) / "episodes", twice := Path(first.run_dir).parent / "twice")
    shutil.copy(twice / "episode_000000.hdf5", twice / "episode_000001.hdf5")
    with pytest.raises(ConfigError, match=r"holds the scene of .*episode_000000\.hdf5:demo_0 more than once"):
        collect(reach_recipe("again", tasks=(0,), operator=ReplayOperator("replay", str(twice))))
    with pytest.raises(ValueError, match="nothing is left for a policy to do"):
        reach_recipe("policy", operator=ReplayOperator("replay", first.run_dir), checkpoint="somewhere")
