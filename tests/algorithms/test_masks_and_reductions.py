"""Masks come before reductions; a reduction is what its name says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.masks import action_mask, action_mask_of
from vla_rl.algorithms.reductions import LogProbReduction, element_mask, reduce_per_action
from vla_rl.config import ConfigError
from vla_rl.episode import ActionChunk, ChunkStep, Observation


def chunk_step(executed: int, interventions: tuple[int, ...] = ()) -> ChunkStep:
    zeros = np.zeros((executed, 7), np.float32)
    intervention_E = np.isin(np.arange(executed), interventions)
    observation = Observation({}, np.zeros(8, np.float32), "")
    return ChunkStep(observation, ActionChunk(np.zeros((8, 7), np.float32)), zeros, zeros, zeros[:, 0], intervention_E, False, False, False)


def test_mask_is_executed_and_not_intervention():
    intervention_BC = torch.tensor([[False, True, False, False], [False] * 4, [False] * 4, [True] * 4])
    mask = action_mask(torch.tensor([3, 4, 0, 2]), intervention_BC)
    assert mask.tolist() == [[True, False, True, False], [True] * 4, [False] * 4, [False] * 4]


def test_an_episode_of_16_steps_in_chunks_of_8_has_two_chunks():
    # DeepThinkVLA trains F // K + 1 = 3 chunks there, one of which never ran
    mask_BC = action_mask_of([chunk_step(8), chunk_step(8)], chunk_length=8)
    assert mask_BC.shape == (2, 8) and int(mask_BC.sum()) == 16
    mask_BC = action_mask_of([chunk_step(8), chunk_step(8), chunk_step(1, interventions=(0,))], chunk_length=10)
    assert mask_BC.sum(1).tolist() == [8, 8, 0]


def test_masks_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"executed_B is \[5\]; a chunk of 4 actions executes 0 to 4"):
        action_mask(torch.tensor([5]), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"executed_B has shape \[1, 1\]; it must be \[1\]"):
        action_mask(torch.tensor([[2]]), torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"chunk 0 executed 8 actions; the policy's chunk_length is 4"):
        action_mask_of([chunk_step(8)], chunk_length=4)


VALUE = torch.tensor([[-7.0, -14.0, -21.0], [-70.0, float("nan"), float("inf")]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # D = 7 dimensions, K = 2 denoise steps
        (LogProbReduction("action"), [[-7, -14, 0], [-70, 0, 0]]),
        (LogProbReduction("action", dims="mean"), [[-1, -2, 0], [-10, 0, 0]]),
        (LogProbReduction("action", denoise_steps="mean"), [[-3.5, -7, 0], [-35, 0, 0]]),
        (LogProbReduction("chunk"), [[-21], [-70]]),
        (LogProbReduction("chunk", dims="mean"), [[-3], [-10]]),
        (LogProbReduction("chunk", actions="mean"), [[-10.5], [-70]]),
        (LogProbReduction("chunk", dims="mean", actions="mean", denoise_steps="mean"), [[-0.75], [-5]]),
    ],
)
def test_reductions_by_hand(reduction: LogProbReduction, expected: list[list[float]]):
    reduced = reduce_per_action(VALUE, MASK, reduction, action_dims=7, denoise_steps=2)
    assert reduced.tolist() == expected


def test_a_masked_nan_has_no_gradient():
    value = VALUE.clone().requires_grad_()
    reduce_per_action(value, MASK, LogProbReduction(), 7, 1).sum().backward()
    assert value.grad is not None and value.grad.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_fully_masked_chunk_is_zero_and_no_element():
    mask = torch.zeros(1, 3, dtype=torch.bool)
    assert reduce_per_action(torch.ones(1, 3), mask, LogProbReduction(actions="mean"), 7, 1).tolist() == [[0.0]]
    assert element_mask(mask, "chunk").tolist() == [[False]]
    assert element_mask(MASK, "chunk").tolist() == [[True], [True]]
    assert element_mask(MASK, "action").equal(MASK)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=4, max_size=4), min_size=1, max_size=6),
    actions=st.sampled_from(["sum", "mean"]),
    dims=st.sampled_from(["sum", "mean"]),
    steps=st.integers(1, 10),
)
def test_chunk_reduction_against_a_loop(rows, actions, dims, steps):
    value = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[m for _, m in row] for row in rows])
    reduced = reduce_per_action(value, mask, LogProbReduction("chunk", dims, actions, "mean"), 7, steps)
    for got, row in zip(reduced[:, 0].tolist(), rows):
        kept = [x for x, m in row if m]
        total = sum(kept) / steps / (7 if dims == "mean" else 1) / (max(len(kept), 1) if actions == "mean" else 1)
        assert got == pytest.approx(total, rel=1e-12, abs=1e-12)


def test_reductions_refuse_what_does_not_fit():
    with pytest.raises(ConfigError, match=r"log_prob.actions is 'mean', but a ratio per action"):
        LogProbReduction("action", actions="mean")
    with pytest.raises(ValueError, match=r"mask_BC has shape \[2, 1\]; it must be \[2, 3\]"):
        reduce_per_action(VALUE, MASK[:, :1], LogProbReduction(), 7, 1)
