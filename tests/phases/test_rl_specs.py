"""Groups in spec order: who shares a scene, what a rejected group calls for, and that the order in which episodes end changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from rl_recipe import GRPO, PPO

from vla_rl.algorithms.config import AlgorithmConfig, GroupSettings
from vla_rl.algorithms.filters import GroupFilter
from vla_rl.config import ConfigError
from vla_rl.episode import SPLITS, Episode, EpisodeSpec, Outcome, StepProtocol
from vla_rl.phases.rl_specs import SCENES_PER_SEED, StepSource, TrainingScenes

PROTOCOL = StepProtocol(max_steps=10, settle_steps=0)


def scenes(size: int = 1, seed: int = 0) -> TrainingScenes:
    return TrainingScenes("reach", (0, 2), PROTOCOL, size, seed)


def ended(spec: EpisodeSpec, outcome: Outcome) -> Episode:
    return Episode(spec, [], None, outcome)


def fate(spec: EpisodeSpec) -> Outcome:
    """A function of the spec: every third scene is impossible, the others depend on the noise."""
    if spec.init_number % 3 == 0:
        return Outcome.FAILURE
    return Outcome.SUCCESS if spec.sample % 2 else Outcome.FAILURE


def run(source: StepSource, shuffle: random.Random, at_once: int = 5) -> None:
    """Run a source with episodes that end in any order."""
    running: list[EpisodeSpec] = []
    while True:
        while len(running) < at_once and (spec := source.next()) is not None:
            running.append(spec)
        if not running:
            return
        spec = running.pop(shuffle.randrange(len(running)))
        source.report(ended(spec, fate(spec)))


def test_groups_share_task_and_scene_and_differ_in_the_sample() -> None:
    group = scenes(4).group(5)
    assert {(spec.task, spec.init, spec.split) for spec in group} == {(2, f"sampled:{SPLITS['train'].start + 2}", "train")}
    assert [spec.sample for spec in group] == [0, 1, 2, 3]
    assert len({spec.key for number in range(10) for spec in scenes(4).group(number)}) == 40


def test_seeds_do_not_share_scenes_and_say_when_they_run_out() -> None:
    last = scenes(seed=0).group(2 * SCENES_PER_SEED - 1)[0]
    first = scenes(seed=1).group(0)[0]
    assert first.init_number == last.init_number + 1
    assert scenes(seed=49).group(2 * SCENES_PER_SEED - 1)[0].init_number == SPLITS["train"].stop - 1
    with pytest.raises(ConfigError, match="used up"):
        scenes().group(2 * SCENES_PER_SEED)


def grouped(wanted: int, rejected: str) -> AlgorithmConfig:
    settings = GroupSettings(size=4, filter=GroupFilter(0.1, 0.9, rejected, max_groups_factor=2.0))  # type: ignore[arg-type]
    return replace(GRPO, episodes_per_step=4 * wanted, group=settings)


@pytest.mark.parametrize("rejected", ["refill", "mask", "drop"])
def test_the_order_in_which_episodes_end_changes_nothing(rejected: str) -> None:
    results = []
    for seed in range(8):
        source = StepSource(scenes(4), 0, grouped(4, rejected))
        run(source, random.Random(seed), at_once=1 + seed)
        kept, masked = source.episodes()
        results.append(([e.spec.key for e in kept], [e.spec.key for e in masked], source.next_group, source.plan().counts))
    assert all(result == results[0] for result in results)


def test_a_rejected_group_calls_for_another_one() -> None:
    """Scenes 1000000, 1000001, ...: those divisible by three are impossible, 1000002 among them, for both tasks."""
    source = StepSource(scenes(4), 0, grouped(6, "refill"))
    run(source, random.Random(0))
    kept, masked = source.episodes()
    assert source.next_group == 8 and len(kept) == 24 and masked == []
    assert source.plan().counts["too_hard"] == 2
    assert [e.spec.sample for e in kept[:4]] == [0, 1, 2, 3]


def test_masked_groups_stay_in_the_batch_and_dropped_ones_do_not() -> None:
    sources = {rejected: StepSource(scenes(4), 0, grouped(6, rejected)) for rejected in ("mask", "drop")}
    for source in sources.values():
        run(source, random.Random(0))
        assert source.next_group == 6
    assert [len(part) for part in sources["mask"].episodes()] == [16, 8]
    assert [len(part) for part in sources["drop"].episodes()] == [16, 0]


def test_without_groups_every_episode_has_a_scene_of_its_own_and_crashes_are_left_out() -> None:
    source = StepSource(scenes(), 7, replace(PPO, episodes_per_step=3))
    specs = [source.next() for _ in range(3)]
    assert source.next() is None and len({spec.init + str(spec.task) for spec in specs if spec}) == 3
    for spec, outcome in zip(specs, (Outcome.SUCCESS, Outcome.CRASH, Outcome.FAILURE)):
        assert spec is not None
        source.report(ended(spec, outcome))
    assert [e.outcome for e in source.episodes()[0]] == [Outcome.SUCCESS, Outcome.FAILURE]
    assert len(source.all_episodes()) == 3 and source.next_group == 10


def test_episodes_before_the_end_are_refused() -> None:
    with pytest.raises(RuntimeError, match="while groups are running"):
        StepSource(scenes(), 0, PPO).episodes()
