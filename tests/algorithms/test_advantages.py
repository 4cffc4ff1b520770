"""GAE, group advantages and normalisation by hand, and against slow loops."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms.advantages import GaeSettings, Moments, chunk_gae, chunk_reward, group_advantages, normalize
from vla_rl.config import ConfigError


def gae(rewards, executed, values, terminated, settings_):
    advantage_T, return_T = chunk_gae(torch.tensor(rewards), torch.tensor(executed), torch.tensor(values), terminated, settings_)
    return advantage_T.tolist(), return_T.tolist()


PER_STEP = GaeSettings(discount=0.5, smoothing=0.8, discounting="control_step")
PER_CHUNK = GaeSettings(discount=0.5, smoothing=0.8, discounting="chunk")


def test_a_chunk_of_c_steps_discounts_by_gamma_to_the_c():
    # chunks of 2 and 3 steps: g = .25, .125; V = 1, 2, 4; truncated.
    # d_1 = 8 + .125 * 4 - 2 = 6.5;  A_1 = 6.5
    # d_0 = 0 + .25 * 2 - 1 = -.5;   A_0 = -.5 + .25 * .8 * 6.5 = .8
    advantage, returns = gae([0.0, 8.0], [2, 3], [1.0, 2.0, 4.0], False, PER_STEP)
    assert advantage == pytest.approx([0.8, 6.5]) and returns == pytest.approx([1.8, 8.5])


def test_gamma_per_chunk_ignores_the_length():
    # g = .5 twice: d_1 = 8 + 2 - 2 = 8; d_0 = 0 + 1 - 1 = 0, A_0 = .5 * .8 * 8 = 3.2
    advantage, returns = gae([0.0, 8.0], [2, 3], [1.0, 2.0, 4.0], False, PER_CHUNK)
    assert advantage == pytest.approx([3.2, 8.0]) and returns == pytest.approx([4.2, 10.0])


def test_termination_does_not_bootstrap_and_truncation_does():
    # RLinf's rewards + gamma V (1 - done) treats the time limit as an end. Same numbers, terminated: d_1 = 8 + 0 - 2 = 6
    advantage, _ = gae([0.0, 8.0], [2, 3], [1.0, 2.0, 4.0], True, PER_STEP)
    assert advantage == pytest.approx([-0.5 + 0.2 * 6, 6.0])
    # a value that is not there because the episode ended there may be anything
    again, _ = gae([0.0, 8.0], [2, 3], [1.0, 2.0, float("nan")], True, PER_STEP)
    assert again == advantage


def test_rewards_within_a_chunk():
    assert chunk_reward([1.0, 1.0, 1.0], PER_STEP) == 1.75
    assert chunk_reward([1.0, 1.0, 1.0], PER_CHUNK) == 3.0
    assert chunk_reward([], PER_STEP) == 0.0


@settings(deadline=None, max_examples=40)
@given(
    episode=st.lists(st.tuples(st.lists(st.floats(-2, 2), min_size=1, max_size=4), st.floats(-3, 3)), min_size=1, max_size=6),
    final=st.floats(-3, 3),
    terminated=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_gae_is_the_weighted_sum_of_its_deltas(episode, final, terminated, smoothing):
    """A_t = sum_k (prod of g lambda) delta_{t+k}; and for lambda = 1 the return is the discounted sum per control step, chunks or not."""
    settings_ = GaeSettings(discount=0.9, smoothing=smoothing)
    rewards, values = [chunk_reward(r, settings_) for r, _ in episode], [v for _, v in episode] + [final]
    lengths = [len(r) for r, _ in episode]
    advantage, returns = gae(rewards, lengths, values, terminated, settings_)
    ahead = [*values[:-1], 0.0 if terminated else final]
    deltas = [r + 0.9**c * ahead[t + 1] - ahead[t] for t, (r, c) in enumerate(zip(rewards, lengths))]
    for t in range(len(episode)):
        slow, factor = 0.0, 1.0
        for k in range(t, len(episode)):
            slow += factor * deltas[k]
            factor *= 0.9 ** lengths[k] * smoothing
        assert advantage[t] == pytest.approx(slow, abs=1e-5)  # the inputs are float32
    if smoothing == 1.0:
        steps = [r for chunk, _ in episode for r in chunk]
        discounted = sum(0.9**n * r for n, r in enumerate(steps)) + 0.9 ** len(steps) * ahead[-1]
        assert returns[0] == pytest.approx(discounted, abs=1e-5)


def test_gae_refuses_b_against_b1():
    with pytest.raises(ValueError, match=r"value_T1 has shape \[2\]; it must be \[3\]"):
        gae([0.0, 8.0], [2, 3], [1.0, 2.0], False, PER_STEP)
    with pytest.raises(ValueError, match=r"reward_T has shape \[2, 1\]; it must have 1 dimension"):
        gae([[0.0], [8.0]], [2, 3], [1.0, 2.0, 3.0], False, PER_STEP)


@pytest.mark.parametrize(("successes", "advantage"), [(1, 2.47), (2, 1.62), (3, 1.21), (4, 0.94), (5, 0.72), (6, 0.54), (7, 0.35)])
def test_published_advantages_of_a_success_in_a_group_of_8(successes: int, advantage: float):
    # algorithms.md B.1: unbiased standard deviation, epsilon 1e-6
    score = torch.tensor([1.0] * successes + [0.0] * (8 - successes))
    got = group_advantages(score, torch.zeros(8, dtype=torch.int64), "group_mean", "unbiased")
    assert float(got[0]) == pytest.approx(advantage, abs=0.005)  # two printed digits


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        # scores 1, 0, 0, 0 and 3, 1: means .25 and 2; biased std .4330127 and 1; unbiased .5 and 1.4142136
        ("group_mean", "none", [0.75, -0.25, -0.25, -0.25, 1, -1]),
        ("group_mean", "biased", [0.75 / 0.4330127, *[-0.25 / 0.4330127] * 3, 1, -1]),
        ("group_mean", "unbiased", [1.5, -0.5, -0.5, -0.5, 0.7071068, -0.7071068]),
        ("leave_one_out", "none", [1, -1 / 3, -1 / 3, -1 / 3, 2, -2]),
    ],
)
def test_group_advantages_by_hand(baseline, scale, expected):
    score, group = torch.tensor([1.0, 0, 0, 0, 3, 1]), torch.tensor([4, 4, 4, 4, 9, 9])
    assert group_advantages(score, group, baseline, scale, epsilon=0).tolist() == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    episodes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.9, 1.0])), min_size=1, max_size=16),
    permutation=st.randoms(use_true_random=False),
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
    scale=st.sampled_from(["unbiased", "biased", "none"]),
)
def test_groups_may_be_mixed_unequal_and_partial(episodes, permutation, baseline, scale):
    permutation.shuffle(episodes)
    score = torch.tensor([r for _, r in episodes], dtype=torch.float64)
    advantage = group_advantages(score, torch.tensor([g for g, _ in episodes]), baseline, scale)
    for index, (group, own) in enumerate(episodes):
        others = [r for i, (g, r) in enumerate(episodes) if g == group and i != index]
        if not others or all(r == own for r in others):
            assert float(advantage[index]) == 0.0  # exactly, also where the mean of equal scores rounds
            continue
        everyone = [*others, own]
        gap = own - (sum(others) / len(others) if baseline == "leave_one_out" else sum(everyone) / len(everyone))
        spread = {"unbiased": statistics.stdev, "biased": statistics.pstdev, "none": lambda _: 1.0 - 1e-6}[scale](everyone)
        assert float(advantage[index]) == pytest.approx(gap / (spread + 1e-6), rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_moments_of_ranks_add_up_to_the_global_ones(values, cut):
    """RLinf normalises per rank; sums of sufficient statistics do not know how many ranks there were."""
    value, mask = torch.tensor([v for v, _ in values]), torch.tensor([m for _, m in values])
    parts = [Moments.of(value[:cut], mask[:cut]), Moments.of(value[cut:], mask[cut:])]
    both = parts[0] + parts[1]
    reduced = Moments(*(sum(column) for column in zip(*(part.as_list() for part in parts))))
    assert reduced == both
    kept = value[mask].tolist()
    assert both.count == len(kept)
    if kept:
        assert both.mean == pytest.approx(statistics.fmean(kept), abs=1e-9)
        assert both.variance == pytest.approx(statistics.pvariance(kept), abs=1e-8)  # 1e4 * 1e-16 * a few sums


def test_normalize_by_hand():
    # 1, 3, (masked 99): mean 2, std 1
    value, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])
    assert normalize(value, Moments.of(value, mask), epsilon=0.0)[:2].tolist() == [-1.0, 1.0]
    same = torch.full((3,), 5.0)
    assert normalize(same, Moments.of(same, mask)).tolist() == [0.0, 0.0, 0.0]
    assert Moments.of(value, torch.zeros(3, dtype=torch.bool)).variance == 0.0
    with pytest.raises(ValueError, match=r"mask_B has shape \[3, 1\]; it must be \[3\]"):
        Moments.of(value, mask[:, None])


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"gae.discount is 0; allowed: above 0"):
        GaeSettings(discount=0)
    with pytest.raises(ConfigError, match=r"gae.smoothing is 1.5; allowed: 0 to 1"):
        GaeSettings(smoothing=1.5)
