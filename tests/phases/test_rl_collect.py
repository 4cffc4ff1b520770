"""The driver's side of rollouts, with workers that finish at once: who is dealt what, and what a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rl_recipe import GRPO, PPO, rl_recipe

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.cluster.backend import Held, Sealed
from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleLost, RoleName
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, Observation, Outcome
from vla_rl.phases.rl_collect import Collector, Rollouts
from vla_rl.phases.rl_rollout import Rollout
from vla_rl.phases.rl_specs import training_scenes
from vla_rl.phases.rl_worker import Work

NOTHING = np.zeros((1, 7), np.float32)
STEP = ChunkStep(
    Observation({}, np.zeros(8, np.float32), ""),
    ActionChunk(NOTHING),
    NOTHING,
    NOTHING,
    NOTHING[:, 0],
    np.zeros(1, bool),
    False,
    False,
    True,
)
LOST = RoleLost(RoleName("worker", 0, "here", ""), "killed")


class Worker:
    """Ends the first episode of its queue at every call."""

    def __init__(self) -> None:
        self.queue: list[EpisodeSpec] = []
        self.dealt: list[list[EpisodeSpec]] = []

    def call(self, method: str, specs: Sequence[EpisodeSpec]) -> Any:
        assert method == "advance"
        self.dealt.append(list(specs))
        self.queue += specs
        spec = self.queue.pop(0)
        episode = Episode(spec, [STEP], None, Outcome.FAILURE)
        return SimpleNamespace(result=lambda: Sealed((episode, []), Held(None)))


def crew_of(workers: list[Worker]) -> Any:
    return SimpleNamespace(
        workers=workers,
        backend=SimpleNamespace(wait_any=list),
        begin=lambda: None,
        proved_alive=lambda worker: None,
        call_each=lambda method, arguments: [Work({}, 0, 0.0, 0)] * len(workers),
    )


@pytest.mark.parametrize(
    ("algorithm", "episodes", "first_deal"),
    [(PPO, 4, [2, 2]), (PPO, 5, [3, 2]), (PPO, 40, [8, 8]), (GRPO, 6, [3, 3])],
)
def test_episodes_are_dealt_evenly(algorithm: AlgorithmConfig, episodes: int, first_deal: list[int], tmp_path: Path) -> None:
    """Two workers of four envs: none is idle while another one has episodes waiting, and none holds more than two for each env."""
    config = rl_recipe(
        tmp_path,
        tmp_path,
        algorithm=replace(algorithm, episodes_per_step=episodes),
        cluster=ClusterConfig(backend="process", rollout_workers=2),
    )
    workers = [Worker(), Worker()]
    rollout = Collector(config, training_scenes(config), crew_of(workers)).collect(0, 0)
    assert [len(worker.dealt[0]) for worker in workers] == first_deal
    assert rollout is not None and len(rollout.episodes) == episodes == sum(len(part) for worker in workers for part in worker.dealt)


def test_what_a_worker_had_not_ended_runs_again_where_it_was_replaced_together_with_another_one(tmp_path: Path) -> None:
    """It had answered before it died, and its next life knows nothing of the rest of its queue."""
    config = rl_recipe(tmp_path, tmp_path, cluster=ClusterConfig(backend="process", rollout_workers=2))
    workers, lost = [Worker(), Worker()], Worker()
    crew, replaced = crew_of(workers), list[int]()

    def die(method: str, specs: Sequence[EpisodeSpec]) -> Any:
        lost.queue += specs

        def result() -> Any:
            raise LOST

        return SimpleNamespace(result=result)

    def replace_both(worker: int, member: Any, loss: RoleLost) -> None:
        replaced.append(worker)
        crew.workers = [Worker(), Worker()]

    lost.call, crew.replace = die, replace_both  # type: ignore[method-assign]
    crew.workers = [lost, workers[1]]
    rollout = Collector(config, training_scenes(config), crew).collect(0, 0)
    assert replaced == [0] and len(lost.queue) == 2
    assert rollout is not None and len({rolled.episode.spec.key for rolled in rollout.episodes}) == len(rollout.episodes) == 4


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except RoleLost as loss:
            future.set_exception(loss)
        return future


def test_a_rollout_that_went_wrong_does_not_cost_the_step_before_it() -> None:
    """The next rollout failed beside the update: the checkpoint of the update is written, and then the error is raised."""

    def collect(step: int, first_group: int) -> Rollout:
        if step == 1:
            raise LOST
        return Rollout(step, [], [], {}, first_group + 4)

    collector: Any = SimpleNamespace(collect=collect)
    rollouts = Rollouts(collector, AtOnce(), steps=3, ahead=1)
    rollouts.start_due(0)
    assert rollouts.take().step == 0
    assert rollouts.made() == ([], 4)
    with pytest.raises(RoleLost, match="killed"):
        rollouts.take()
