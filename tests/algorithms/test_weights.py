"""Aggregations have the values of their formulas, and do not depend on how a batch is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.batches import deal_episodes, minibatches, rank_batches
from vla_rl.algorithms.losses import ClipSettings, policy_loss
from vla_rl.algorithms.weights import ElementWeights, element_weights

# Episode 7 has two chunks with 2 + 1 unmasked actions, episode 3 one chunk with one, episode 5 none.
MASK = torch.tensor([[True, True], [True, False], [True, False], [False, False]])
EPISODE = torch.tensor([7, 3, 7, 5])
LOSS = torch.tensor([[1.0, 2.0], [4.0, 100.0], [6.0, 100.0], [100.0, 100.0]])


def value_of(weights: ElementWeights, loss: torch.Tensor) -> float:
    return float((weights.loss_BU * loss).sum()) / weights.count()


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    [
        ("element_mean", None, (1 + 2 + 4 + 6) / 4),
        ("episode_mean", None, ((1 + 2 + 6) / 3 + 4 / 1) / 2),
        ("episode_sum", None, ((1 + 2 + 6) + 4) / 2),
        ("fixed_divisor", 8.0, ((1 + 2 + 6) / 8 + 4 / 8) / 2),
    ],
)
def test_aggregations_by_hand(aggregation, divisor, expected):
    weights = element_weights(MASK, EPISODE, aggregation, divisor)
    assert value_of(weights, LOSS) == pytest.approx(expected, rel=1e-6)  # float32 thirds
    # shares are a mean: of a constant they give it back, whatever the aggregation
    assert float((weights.share_BU * 3.0).sum()) / weights.count() == pytest.approx(3.0, rel=1e-6)


def test_no_factor_of_the_action_dimension():
    """RLinf's token level with a mask of last dimension 1 scales the loss by D = 7; here a constant loss is its own mean."""
    mask_BC = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)) > 0.3
    for mask in (mask_BC, mask_BC.any(1, keepdim=True)):
        for aggregation in ("element_mean", "episode_mean"):
            weights = element_weights(mask, torch.arange(9) // 3, aggregation)
            assert value_of(weights, torch.full(mask.shape, 1.5)) == pytest.approx(1.5, rel=1e-6)


batches = st.integers(1, 12).flatmap(
    lambda rows: st.tuples(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=rows, max_size=rows),
        st.lists(st.integers(0, 4), min_size=rows, max_size=rows),
    )
)


@settings(deadline=None, max_examples=40)
@given(
    batch=batches,
    aggregation=st.sampled_from(["element_mean", "episode_mean", "episode_sum", "fixed_divisor"]),
    ranks=st.integers(1, 3),
    micro=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_loss_and_gradient_do_not_depend_on_the_cut(batch, aggregation, ranks, micro, seed):
    """DeepThinkVLA's slice accumulation changes with the slice; here every cut gives the sums of the whole."""
    mask, episode = torch.tensor(batch[0]), torch.tensor(batch[1])
    weights = element_weights(mask, episode, aggregation, 11.0 if aggregation == "fixed_divisor" else None)
    generator = torch.Generator().manual_seed(seed)
    old, advantage = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    parameter = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def loss_sum(rows: torch.Tensor, chosen: ElementWeights) -> torch.Tensor:
        return policy_loss(old[rows] * (1 + parameter), old[rows], advantage[rows], chosen, ClipSettings(dual=3.0)).loss_sum

    whole = loss_sum(torch.arange(len(mask)), weights)
    (expected,) = torch.autograd.grad(whole, parameter)
    cut = rank_batches(torch.arange(len(mask)), torch.arange(len(mask)) % ranks, ranks, micro)
    total, gradient, count = 0.0, 0.0, 0.0
    for row, real in zip(cut.row_RSW.flatten(0, 1), cut.real_RSW.flatten(0, 1)):
        part = weights.select(row)
        part = ElementWeights(part.loss_BU * real[:, None], part.share_BU * real[:, None])
        piece = loss_sum(row, part)
        total, count = total + float(piece.detach()), count + part.count()
        gradient += float(torch.autograd.grad(piece, parameter)[0])
    # float64 sums of the same numbers in another order
    assert total == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
    assert count == pytest.approx(weights.count(), rel=1e-6)  # float32 shares


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 60), size=st.integers(1, 20), seed=st.integers(0, 5), ranks=st.integers(1, 4), micro=st.integers(1, 7))
def test_every_row_exactly_once_on_equal_micro_batches(rows, size, seed, ranks, micro):
    parts = minibatches(rows, size, seed)
    assert sorted(torch.cat(parts).tolist()) == list(range(rows))  # the partial minibatch is kept
    assert all(len(part) == size for part in parts[:-1])
    rank_B = torch.randint(ranks, (rows,), generator=torch.Generator().manual_seed(seed))
    for part in parts:
        cut = rank_batches(part, rank_B, ranks, micro)
        most = int(torch.bincount(rank_B[part]).max())
        assert cut.row_RSW.shape == cut.real_RSW.shape == (ranks, -(-most // micro), micro)
        assert sorted(cut.row_RSW[cut.real_RSW].tolist()) == sorted(part.tolist())
        for rank in range(ranks):
            held = set(torch.nonzero(rank_B == rank)[:, 0].tolist()) or {0}
            assert set(cut.row_RSW[rank].flatten().tolist()) <= held, "also what fills a micro-batch up is a row of the rank"
    assert all(a.equal(b) for a, b in zip(parts, minibatches(rows, size, seed)))


@settings(deadline=None, max_examples=40)
@given(chunks=st.lists(st.integers(0, 30), min_size=1, max_size=40), ranks=st.integers(1, 5))
def test_episodes_are_dealt_out_evenly_by_chunks(chunks, ranks):
    """No rank has more than the mean plus the longest episode: it got its last one when it had the least."""
    rank_N = deal_episodes(chunks, ranks)
    loads = [sum(count for count, rank in zip(chunks, rank_N) if rank == own) for own in range(ranks)]
    assert sum(loads) == sum(chunks) and max(loads) <= sum(chunks) / ranks + max(chunks)
    assert rank_N == deal_episodes(chunks, ranks)


def test_weights_of_a_long_and_a_short_episode_are_shared_out_over_minibatches():
    """Episode 0 has four chunks, episode 1 one. In minibatches of single rows the shares still add up to one per episode."""
    weights = element_weights(torch.ones(5, 1, dtype=torch.bool), torch.tensor([0, 0, 0, 0, 1]), "episode_mean")
    assert weights.count_B.tolist() == [0.25, 0.25, 0.25, 0.25, 1.0]


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="aggregation is 'fixed_divisor' and fixed_divisor is None"):
        element_weights(MASK, EPISODE, "fixed_divisor")
    with pytest.raises(ValueError, match=r"aggregation is 'episode_sum' and fixed_divisor is 3\.0"):
        element_weights(MASK, EPISODE, "episode_sum", 3.0)
    with pytest.raises(ValueError, match=r"mask_BU has shape \[4\]; it must have 2 dimensions"):
        element_weights(MASK[:, 0], EPISODE, "element_mean")
    with pytest.raises(ValueError, match=r"episode_B has shape \[4, 1\]; it must be \[4\]"):
        element_weights(MASK, EPISODE[:, None], "element_mean")
    with pytest.raises(ValueError, match="at least one row"):
        rank_batches(torch.arange(0), torch.zeros(1, dtype=torch.int64), 1, 4)
