"""The skills that move parts of the scene, against a hand without weight: a drawer, a knob and a plate that follow it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_rl.sim.experts.controller import rotation_matrix
from vla_rl.sim.experts.drawer import OpenDrawer, facing
from vla_rl.sim.experts.drawer import Phase as DrawerPhase
from vla_rl.sim.experts.expert import Skill
from vla_rl.sim.experts.move_part import MovePart, PlateOnTable, StoveKnob

FACING_Y = np.array([0.0, 0.0, 1.0, 0.0])
"""Half a turn about z: a cabinet whose drawers slide to the world's +y, as in libero_goal."""


def tabletop() -> dict[str, np.ndarray]:
    """Privileged values of a scene like libero_goal's."""
    values = {
        "robot0_eef_pos": np.array([-0.21, 0.0, 1.17]),
        "robot0_eef_quat": np.array([1.0, 0.0, 0.0, 0.0]),
        "robot0_gripper_qpos": np.array([0.04, -0.04]),
        "wooden_cabinet_1_pos": np.array([0.02, -0.24, 0.905]),
        "wooden_cabinet_1_quat": FACING_Y,
        "flat_stove_1_pos": np.array([-0.40, 0.20, 0.905]),
        "flat_stove_1_quat": np.array([0.0, 0.0, 0.0, 1.0]),
        "plate_1_pos": np.array([0.04, -0.02, 0.902]),
        "plate_1_quat": np.array([0.0, 0.0, 0.0, 1.0]),
        "site:main_table_stove_front_region_pos": np.array([-0.05, 0.21, 0.895]),
    }
    return values | {f"joint:wooden_cabinet_1_{drawer}_level": np.zeros(1) for drawer in ("top", "middle", "bottom")}


def move(values: dict[str, np.ndarray], action: np.ndarray) -> np.ndarray:
    """One control step of a hand that goes 1.5 cm and 0.15 rad at full action; its displacement (m)."""
    step = 0.015 * action[:3].astype(np.float64)
    values["robot0_eef_pos"] = values["robot0_eef_pos"] + step
    values["robot0_eef_quat"] = (Rotation.from_rotvec(0.15 * action[3:6]) * Rotation.from_quat(values["robot0_eef_quat"])).as_quat()
    width = np.clip(values["robot0_gripper_qpos"][0] - 0.005 * float(action[6]), 0.008, 0.04)
    values["robot0_gripper_qpos"] = np.array([width, -width])
    return step


@pytest.mark.parametrize("direction", [[0.0, -1.0, 0.0], [np.sqrt(0.5), np.sqrt(0.5), 0.0]])
def test_facing_is_a_rotation_with_the_fingers_one_above_the_other(direction: list[float]) -> None:
    matrix = facing(np.array(direction))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1.0)
    np.testing.assert_allclose(matrix[:, 2], direction)
    np.testing.assert_allclose(matrix[:, 1], [0, 0, 1])


def test_a_drawer_is_pulled_open_by_its_own_handle() -> None:
    values, skill = tabletop(), OpenDrawer("wooden_cabinet_1", "middle")
    for _ in range(150):
        step = move(values, skill.act(values))
        if skill.phase is DrawerPhase.PULL:
            values["joint:wooden_cabinet_1_middle_level"] = values["joint:wooden_cabinet_1_middle_level"] - step[1]
    assert values["joint:wooden_cabinet_1_middle_level"][0] < -0.14
    # The hand points at the cabinet (within the tolerance of the turn, 0.1 rad) and holds the bar of the middle drawer.
    assert rotation_matrix(values["robot0_eef_quat"])[1, 2] < -np.cos(0.1)
    assert values["robot0_eef_pos"][2] == pytest.approx(0.905 + 0.110, abs=0.01)


def test_a_drawer_that_slips_is_reached_for_again() -> None:
    values, skill = tabletop(), OpenDrawer("wooden_cabinet_1", "top")
    phases = []
    for _ in range(250):
        move(values, skill.act(values))  # the drawer never follows
        phases.append(skill.phase)
    assert sum(now is DrawerPhase.TURN and before is DrawerPhase.PULL for before, now in itertools.pairwise(phases)) >= 2


def run_until(skill: Skill, values: dict[str, np.ndarray], touch: float, follows: str | None) -> list[np.ndarray]:
    """Displacements of the hand after it came down to within `touch` of the table; `follows` moves along once the fingers are closed."""
    steps = []
    for _ in range(150):
        step = move(values, skill.act(values))
        if values["robot0_eef_pos"][2] < touch:
            steps.append(step)
            if follows and values["robot0_gripper_qpos"][0] < 0.01:
                values[follows] = values[follows] + step * [1, 1, 0]
    return steps


def test_a_plate_is_pulled_to_the_site_by_the_rim_that_faces_it() -> None:
    values = tabletop()
    rim_side = values["site:main_table_stove_front_region_pos"] - values["plate_1_pos"]
    skill = MovePart(PlateOnTable("plate_1", "main_table_stove_front_region"))
    run_until(skill, values, touch=0.93, follows="plate_1_pos")
    np.testing.assert_allclose(values["plate_1_pos"][:2], [-0.05, 0.21], atol=0.01)
    held_at = (values["robot0_eef_pos"] - values["plate_1_pos"])[:2]
    assert held_at @ rim_side[:2] / np.linalg.norm(rim_side[:2]) > 0.05


def test_a_knob_is_pushed_across_its_fin_with_open_fingers() -> None:
    values = tabletop()
    steps = run_until(MovePart(StoveKnob("flat_stove_1")), values, touch=0.945, follows=None)
    assert values["robot0_gripper_qpos"][0] == 0.04
    assert max(step[1] for step in steps) > 0.008  # towards +y: counter-clockwise at the +x end of the fin
