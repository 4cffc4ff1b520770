"""Which goals have an expert, noise that depends on the seed alone, and the state machine against a weightless hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_rl.episode import EpisodeSpec, Observation
from vla_rl.sim.experts.expert import ScriptedExpert, UnsupportedGoal, make_expert, supports
from vla_rl.sim.experts.noise import BURST_STEPS, ActionNoise
from vla_rl.sim.experts.pick_place import Phase, PickPlace

SOUP_IN_BASKET = ["in", "alphabet_soup_1", "basket_1_contain_region"]


@pytest.mark.parametrize(
    "goal",
    [
        [SOUP_IN_BASKET],
        [["in", "milk_1", "basket_1_contain_region"]],
        [["on", "akita_black_bowl_1", "plate_1"]],
        [["on", "akita_black_bowl_1", "flat_stove_1_cook_region"]],
        [["on", "wine_bottle_1", "wooden_cabinet_1_top_side"]],
        [["on", "cream_cheese_1", "akita_black_bowl_1"]],
        [["on", "plate_1", "main_table_stove_front_region"]],
        [["turnon", "flat_stove_1"]],
        [["open", "wooden_cabinet_1_middle_region"]],
    ],
)
def test_supported_goals(goal: list[list[str]]) -> None:
    assert supports(goal)


@pytest.mark.parametrize(
    "goal",
    [
        [],
        [["in", "basket_1", "basket_1_contain_region"]],
        [["in", "moka_pot_1", "basket_1_contain_region"]],
        [["on", "butter_1", "milk_1"]],
        [["close", "wooden_cabinet_1_top_region"]],
        [["turnoff", "flat_stove_1"]],
        [SOUP_IN_BASKET, ["in", "milk_1", "basket_1_contain_region"]],
    ],
)
def test_other_goals_are_refused_by_name(goal: list[list[str]]) -> None:
    spec = EpisodeSpec("libero_object", 0, "benchmark:0", "test")
    with pytest.raises(UnsupportedGoal, match="libero_object/0/benchmark:0"):
        make_expert(spec, goal, noise=0.0, seed=0)
    with pytest.raises(UnsupportedGoal):
        ScriptedExpert(goal, noise=0.0, seed=0)


def test_noise_depends_on_the_seed_alone_and_leaves_rotation_and_gripper() -> None:
    action = np.array([0.5, 0.0, -1.0, 0.1, 0.2, 0.3, -1.0], np.float32)
    first, again, other = (ActionNoise(0.4, 0.1, seed) for seed in (1, 1, 2))
    perturbed = np.array([first.perturb(action) for _ in range(200)])
    assert np.array_equal(perturbed, [again.perturb(action) for _ in range(200)])
    assert not np.array_equal(perturbed, [other.perturb(action) for _ in range(200)])
    assert (perturbed[:, 3:] == action[3:]).all()
    assert perturbed.dtype == np.float32
    assert np.abs(perturbed).max() <= 1


def test_gaussian_noise_has_the_asked_spread() -> None:
    noise = ActionNoise(0.2, 0.0, seed=3)
    samples = np.array([noise.perturb(np.zeros(7, np.float32))[:3] for _ in range(4000)])
    # Relative standard error of a standard deviation from 12,000 samples: 0.65 %; four of them, and clipping at 5 sigma does nothing.
    assert samples.std() == pytest.approx(0.2, rel=0.026)


def test_bursts_push_in_one_direction_for_a_while() -> None:
    noise = ActionNoise(0.0, 0.05, seed=4)
    pushes = np.array([noise.perturb(np.zeros(7, np.float32))[:3] for _ in range(2000)])
    runs = np.split(pushes, np.flatnonzero((np.diff(pushes, axis=0) != 0).any(axis=1)) + 1)
    bursts = [run for run in runs[:-1] if run.any()]  # the last one may be cut off by the end of the sample
    assert len(bursts) > 40  # about 2000 x 0.05 / (1 + 0.05 x 5.5) = 78 are expected
    assert all(BURST_STEPS[0] <= len(run) <= BURST_STEPS[1] for run in bursts)


def test_no_noise_is_no_change() -> None:
    action = np.array([0.3, 0, 0, 0, 0, 0, 1.0], np.float32)
    assert ActionNoise(0.0, 0.0, seed=0).perturb(action) is action


class WeightlessHand:
    """A hand that moves 1.5 cm and turns 0.15 rad per step at full action, and a can that sticks to closed fingers.

    It drops the can once per entry of `drops`, that many steps after the grasp.
    """

    def __init__(self, drops: list[int]) -> None:
        self.drops = drops
        self.values = {
            "robot0_eef_pos": np.array([-0.15, 0.0, 0.25]),
            "robot0_eef_quat": np.array([1.0, 0.0, 0.0, 0.0]),
            "alphabet_soup_1_pos": np.array([-0.12, -0.24, 0.038]),
            "alphabet_soup_1_quat": np.array([0.0, np.sqrt(0.5), np.sqrt(0.5), 0.0]),
            "basket_1_pos": np.array([0.0, 0.26, -0.005]),
            "basket_1_quat": np.array([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)]),
            "site:basket_1_contain_region_pos": np.array([0.0, 0.26, 0.067]),
        }
        self.width, self.held = 0.08, 0

    def observation(self) -> Observation:
        return Observation({}, np.zeros(8, np.float32), "", self.values | {"robot0_gripper_qpos": np.array([self.width, -self.width]) / 2})

    def step(self, action: np.ndarray) -> None:
        hand, can = self.values["robot0_eef_pos"], self.values["alphabet_soup_1_pos"]
        between = np.linalg.norm((can - hand)[:2]) < 0.02 and abs((can - hand)[2]) < 0.03
        stop = 0.062 if between else 0.0
        self.width = float(np.clip(self.width - 0.01 * float(action[6]), stop, 0.08))
        holds = between and action[6] > 0 and self.width == stop
        self.held = self.held + 1 if holds else 0
        step = 0.015 * action[:3].astype(np.float64)
        self.values["robot0_eef_pos"] = hand + step
        turned = Rotation.from_rotvec(0.15 * action[3:6]) * Rotation.from_quat(self.values["robot0_eef_quat"])
        self.values["robot0_eef_quat"] = turned.as_quat()
        if holds:
            self.values["alphabet_soup_1_pos"] = can + step
        if self.drops and self.held == self.drops[0]:
            self.drops.pop(0)
            self.values["alphabet_soup_1_pos"] = np.array([can[0] + 0.05, can[1], 0.038])

    def in_basket(self) -> bool:
        away = self.values["alphabet_soup_1_pos"] - self.values["site:basket_1_contain_region_pos"]
        return bool((np.abs(away) < [0.061, 0.061, 0.069]).all())


def run(drops: list[int]) -> tuple[int, list[Phase]]:
    """Steps to success (at most 280) and the phases in their order."""
    world, expert = WeightlessHand(drops), ScriptedExpert([SOUP_IN_BASKET], noise=0.0, seed=0)
    phases: list[Phase] = []
    for step in range(280):
        world.step(expert.act(world.observation())[0])
        assert isinstance(expert.skill, PickPlace)
        if not phases or phases[-1] is not expert.skill.phase:
            phases.append(expert.skill.phase)
        if world.in_basket():
            return step + 1, phases
    return 280, phases


def test_one_attempt_takes_each_phase_once() -> None:
    steps, phases = run(drops=[])
    assert phases == [Phase.REACH, Phase.CLOSE, Phase.LIFT, Phase.CARRY]
    assert steps < 120


def test_a_dropped_object_is_grasped_again() -> None:
    steps, phases = run(drops=[20])
    assert phases.count(Phase.REACH) == 2
    assert phases[-1] is Phase.CARRY
    assert steps < 200


def test_the_label_is_the_intention_and_the_action_the_noisy_one() -> None:
    world, noisy, clean = WeightlessHand([]), ScriptedExpert([SOUP_IN_BASKET], 0.3, 5), ScriptedExpert([SOUP_IN_BASKET], 0.0, 5)
    for _ in range(30):
        action, label = noisy.act(world.observation())
        assert np.array_equal(label, clean.act(world.observation())[1])
        assert not np.array_equal(action[:3], label[:3])
        assert np.array_equal(action[3:], label[3:])
        world.step(action)
