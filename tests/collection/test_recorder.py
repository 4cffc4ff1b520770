"""What is kept and what is only counted, and pictures that are filled in by exact re-simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vla_rl.actors import scripted_actor
from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.plan import noisy_expert, plan_demonstrations
from vla_rl.collection.recorder import Recorder, ReplayMismatch, fill_frames
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.schema import StorageError
from vla_rl.datasets.store import EpisodeStore
from vla_rl.episode import VIEWS, Episode, Outcome
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import Env
from vla_rl.sim.factory import make_env
from vla_rl.sim.pool import SerialPool
from vla_rl.telemetry.files import read_jsonl

Recipe = Callable[..., CollectConfig]


def record_live(config: CollectConfig, frame_every: int, count: int = 2) -> list[Episode]:
    """The first episodes of a recipe, with pictures of both views before every `frame_every`-th step."""
    actor = scripted_actor(lambda spec: noisy_expert(config, spec))
    pool = SerialPool(config.pool, config.env, make_env)
    look = look_of(actor.needs, record_every=frame_every, record_states=True)
    try:
        return list(run_episodes(pool, actor, ListSource(plan_demonstrations(config)[:count]), lambda spec: look))
    finally:
        pool.close()


@pytest.fixture
def env(reach_recipe: Recipe) -> Env:
    return make_env(reach_recipe().env)


@pytest.mark.parametrize("recorded_every", [0, 3])
def test_filled_frames_are_the_ones_that_live_recording_gives(reach_recipe: Recipe, env: Env, recorded_every: int) -> None:
    config = reach_recipe()
    sparse, dense = record_live(config, recorded_every, 1)[0], record_live(config, 1, 1)[0]
    filled = fill_frames(sparse, env)
    assert list(filled.frames()) == list(range(dense.num_steps)) == list(dense.frames())
    for t, frame in dense.frames().items():
        assert all(np.array_equal(frame.images[view], filled.frames()[t].images[view]) for view in VIEWS)
        assert np.array_equal(frame.state, filled.frames()[t].state)


def test_a_file_can_be_filled_and_written_again(reach_recipe: Recipe, env: Env, tmp_path: Path) -> None:
    config = reach_recipe()
    collect(config)
    store = EpisodeStore(Path(config.run_dir) / "episodes")
    dense = fill_frames(read_episode(store.path(0)), env)
    store.write(100, dense, frame_every=1)
    assert len(read_episode(store.path(100)).frames()) == dense.num_steps


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda e: e.steps[0].executed_EA.__setitem__((0, 0), -e.steps[0].executed_EA[0, 0]),
            "simulator states from control step 1: they differ",
        ),
        (lambda e: e.steps[1].sim_states_ED.__setitem__((0, 1), 9.0), "simulator states from control step 1: they differ by up to"),
        (lambda e: e.steps[0].reward_E.__setitem__(0, 1.0), "rewards from control step 0"),
        (
            lambda e: next(iter(e.steps[0].frames.values())).images["image2"].__setitem__((0, 0, 0), 77),
            "picture 'image2' from control step 0",
        ),
        (lambda e: setattr(e, "spec", replace(e.spec, init="sampled:99")), "initial state from control step 0: sha256"),
        (lambda e: setattr(e.steps[-1], "terminated", False), "terminated from control step .*: False recorded, True now"),
    ],
)
def test_one_changed_bit_is_found(reach_recipe: Recipe, env: Env, change: Callable[[Episode], None], what: str) -> None:
    episode = record_live(reach_recipe(), 3, 1)[0]
    for step in episode.steps:
        step.executed_EA = step.executed_EA.copy()
        step.frames = {t: replace(f, images={view: p.copy() for view, p in f.images.items()}) for t, f in step.frames.items()}
    change(episode)
    with pytest.raises(ReplayMismatch, match=rf"reach/0/sampled:.*: re-simulation is not the recorded episode: {what}"):
        fill_frames(episode, env)


@pytest.mark.parametrize("keep_failures", [False, True])
def test_only_what_is_asked_for_is_kept_but_everything_is_counted(reach_recipe: Recipe, tmp_path: Path, keep_failures: bool) -> None:
    config = reach_recipe()
    success, other = record_live(config, 1, 2)
    failure = replace(other, outcome=Outcome.FAILURE, reason="time limit")
    crash = replace(other, outcome=Outcome.CRASH, steps=[], reason="died: exit code -9")
    discarded = replace(other, outcome=Outcome.DISCARDED, reason="operator")
    store = EpisodeStore(tmp_path / "episodes")
    recorder = Recorder(store, tmp_path / "episodes.jsonl", make_env(config.env).spec, 1, keep_failures)
    for number, episode in enumerate([success, failure, crash, discarded]):
        recorder.record(number, episode, {"actor": {"name": "expert"}})
    rows = read_jsonl(tmp_path / "episodes.jsonl")
    assert store.numbers() == ([0, 1] if keep_failures else [0])
    assert [row["outcome"] for row in rows] == ["success", "failure", "crash", "discarded"]
    assert [row["kept"] for row in rows] == [True, keep_failures, False, False]
    assert rows[0]["bytes"] == store.path(0).stat().st_size and rows[2]["bytes"] == 0
    provenance = read_episode(store.path(0)).provenance
    assert provenance["actor"] == {"name": "expert"} and provenance["env"]["kind"] == "reach"
    assert "initial_state_sha256" in provenance and "reset_s" not in provenance


def test_recording_stops_before_the_disk_is_full_and_loses_nothing(
    reach_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = reach_recipe()
    (episode,) = record_live(config, 1, 1)
    store = EpisodeStore(tmp_path / "episodes")
    recorder = Recorder(store, tmp_path / "episodes.jsonl", make_env(config.env).spec, 1)
    _, size = recorder.record(0, episode, {})
    recorder.require_room(size)
    monkeypatch.setattr("vla_rl.datasets.files.shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(
        StorageError, match=r"0 MiB free, an episode takes 0\.\d MiB: stopped before the disk is full\. Everything finished is"
    ):
        recorder.require_room(size)
    assert store.load(0).num_steps == episode.num_steps and len(read_jsonl(tmp_path / "episodes.jsonl")) == 1
