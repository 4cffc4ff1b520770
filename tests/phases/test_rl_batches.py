"""Rows, masks, advantages and staleness, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rl_recipe import GROUPS, GRPO, PPO

from vla_rl.algorithms.advantages import GaeSettings
from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.rewards import episode_rewards
from vla_rl.episode import ActionChunk, ChunkStep, Episode, EpisodeSpec, FlowRecord, Observation, Outcome, StepProtocol
from vla_rl.phases.rl_batches import (
    Advantages,
    StaleRollout,
    TrainingRows,
    advantages,
    episodes_to_hold,
    rank_of_rows,
    row_scalars,
    staleness,
    training_rows,
)

CHUNK = 4
EXACT = {"atol": 1e-6, "rtol": 0}
"""float32 results of float64 sums of order 1."""


def chunk(executed: int, value: float, version: int = 0, person: tuple[int, ...] = (), record: bool = True) -> ChunkStep:
    flow = FlowRecord(
        np.zeros((1, CHUNK, 7), np.float32), np.ones((1, CHUNK, 7), np.float32), np.array([2]), np.arange(CHUNK, dtype=np.float32)
    )
    observation = Observation({}, np.zeros(8, np.float32), "go")
    actions = np.zeros((executed, 7), np.float32)
    intervention = np.isin(np.arange(executed), person)
    proposed = ActionChunk(np.zeros((CHUNK, 7), np.float32), record=flow if record else None, value=value, weights_version=version)
    return ChunkStep(observation, proposed, actions, actions, np.zeros(executed, np.float32), intervention, False, False, False)


def episode(steps: list[ChunkStep], success: bool, scene: int = 0, sample: int = 0) -> Episode:
    spec = EpisodeSpec("reach", 0, f"sampled:{1_000_000 + scene}", "train", StepProtocol(), sample)
    return Episode(spec, steps, steps[-1].observation, Outcome.SUCCESS if success else Outcome.FAILURE)


def rows_of(episodes: list[Episode], masked: list[Episode], ranks: int = 1, rank: int = 0) -> TrainingRows:
    """The rows of a step as one trainer rank holds them."""
    scalars, every = row_scalars(episodes, masked, CHUNK), [*episodes, *masked]
    rank_B = rank_of_rows(scalars, ranks)
    return training_rows(scalars, rank_B, {number: every[number] for number in episodes_to_hold(scalars, rank_B, rank)}, CHUNK)


def wanted(episodes: list[Episode], rows: TrainingRows, final: dict[str, float], penalty: Any, algorithm: AlgorithmConfig) -> Advantages:
    """Advantages with the rewards that the algorithm gives."""
    return advantages(episodes, [episode_rewards(e, algorithm.reward) for e in episodes], rows, final, penalty, algorithm)


def test_rows_credit_executed_actions_that_no_person_took() -> None:
    first = episode([chunk(4, 0.1, 3), chunk(2, 0.2, 3, person=(0,))], success=True)
    left_out = episode([chunk(4, 0.3, 3)], success=False, scene=1)
    rows = rows_of([first], [left_out])
    assert rows.mask_BC.tolist() == [[True] * 4, [False, True, False, False], [False] * 4]
    assert rows.episode_B.tolist() == [0, 0, 1] and rows.version_B.tolist() == [3, 3, 3]
    torch.testing.assert_close(rows.value_B, torch.tensor([0.1, 0.2, 0.3]))
    assert rows.record.x_next_BKCA.shape == (3, 1, CHUNK, 7) and rows.record.denoise_index_BK.tolist() == [[2]] * 3
    assert rows.behaviour_BC.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_each_rank_holds_the_episodes_that_it_trains_on_and_no_other() -> None:
    """Episodes of 3, 1, 2 and 1 chunks on two ranks: the longest goes first, to the rank with less."""
    episodes = [episode([chunk(4, 0.0)] * count, True, scene) for scene, count in enumerate((3, 1, 2, 1))]
    first, second = (rows_of(episodes[:3], episodes[3:], ranks=2, rank=rank) for rank in range(2))
    assert first.rank_B.tolist() == second.rank_B.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert list(first.observations) == [0, 1, 2, 6] and list(second.observations) == [3, 4, 5]
    assert first.behaviour_BC.isnan().all(1).tolist() == [False, False, False, True, True, True, False]
    assert first.mask_BC.equal(second.mask_BC) and len(first) == len(first.behaviour_BC) == 7


def test_a_rank_without_an_episode_holds_one_to_compute_along_with() -> None:
    only = [episode([chunk(4, 0.0)] * 2, True)]
    idle = rows_of(only, [], ranks=2, rank=1)
    assert idle.rank_B.tolist() == [0, 0] and list(idle.observations) == [0, 1]


def test_a_chunk_without_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="learners need a policy that explores"):
        rows_of([episode([chunk(4, 0.0, record=False)], True)], [])


def test_gae_bootstraps_over_truncation_and_not_over_success() -> None:
    """gamma 0.9 per control step, lambda 0.5; success after 4 + 2 steps, and a truncation after 4 whose final value is 0.6."""
    algorithm = replace(PPO, gae=GaeSettings(0.9, 0.5), normalize_advantages=False)
    won = episode([chunk(4, 0.5), chunk(2, 0.7)], success=True)
    lost = episode([chunk(4, 0.2)], success=False, scene=1)
    rows = rows_of([won, lost], [])
    result = wanted([won, lost], rows, {lost.spec.key: 0.6}, None, algorithm)
    last = 0.9 * 1.0 - 0.7  # the reward comes with the second of two actions
    first = 0.9**4 * 0.7 - 0.5 + 0.9**4 * 0.5 * last
    cut = 0.9**4 * 0.6 - 0.2
    torch.testing.assert_close(result.advantage_B, torch.tensor([first, last, cut]), **EXACT)
    torch.testing.assert_close(result.return_B, torch.tensor([first + 0.5, last + 0.7, cut + 0.2]), **EXACT)
    assert result.mean_return == 0.5, "what the episodes earned, without the discount"
    penalised = wanted([won, lost], rows, {lost.spec.key: 0.6}, torch.tensor([0.0, 0.0, 0.3]), algorithm)
    torch.testing.assert_close(penalised.advantage_B, torch.tensor([first, last, cut - 0.3]), **EXACT)


def test_normalisation_leaves_masked_rows_out_of_its_statistics() -> None:
    algorithm = replace(PPO, gae=GaeSettings(1.0, 1.0))
    episodes = [episode([chunk(1, value)], True, scene) for scene, value in enumerate((0.0, 0.5))]
    masked = [episode([chunk(1, -100.0)], True, 9)]
    result = wanted([*episodes, *masked], rows_of(episodes, masked), {}, None, algorithm)
    torch.testing.assert_close(result.advantage_B[:2], torch.tensor([1.0, -1.0]), atol=1e-4, rtol=0)  # epsilon 1e-5 on 0.25


def test_group_advantages_reach_every_chunk_of_an_episode() -> None:
    """Two successes of three: mean 2/3, unbiased standard deviation sqrt(1/3)."""
    algorithm = replace(GRPO, group=replace(GROUPS, size=3), episodes_per_step=3)
    outcomes = [(True, 2), (False, 1), (True, 1)]
    episodes = [episode([chunk(4, 0.0)] * count, success, sample=n) for n, (success, count) in enumerate(outcomes)]
    rows = rows_of(episodes, [])
    result = wanted(episodes, rows, {}, None, algorithm)
    up, down = (1 / 3) / (1 / 3) ** 0.5, (-2 / 3) / (1 / 3) ** 0.5
    torch.testing.assert_close(result.advantage_B, torch.tensor([up, up, down, up]), atol=1e-5, rtol=0)  # epsilon 1e-6 below
    assert result.mean_return == pytest.approx(2 / 3)


def test_staleness_is_bounded_at_consumption() -> None:
    rows = rows_of([episode([chunk(4, 0.0, 2), chunk(4, 0.0, 3)], False)], [])
    assert staleness(rows, 4, most=2).tolist() == [2, 1]
    with pytest.raises(StaleRollout, match=r"version 2 to 3 reached the trainer at version 5; algorithm\.max_staleness allows 2"):
        staleness(rows, 5, most=2)
    with pytest.raises(StaleRollout):
        staleness(rows, 2, most=2)  # weights from the future
