"""Grasps by shape, against the sizes of the hand and of the objects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.sim.experts.controller import half_turn_difference
from vla_rl.sim.experts.grasp import FINGERTIP, PALM, can_hold, candidates, choose_grasp, intrusion
from vla_rl.sim.experts.shapes import CATALOGUE, Solid, solid_of, solids_in

UPRIGHT = np.array([0.5, 0.5, 0.5, 0.5])
"""How LIBERO stands its bottles and cartons up: body x to world y, y to z, z to x."""
FLAT = np.array([0.0, 0.0, 0.0, 1.0])
ACROSS_Y = np.pi / 2


def scene(*things: tuple[str, tuple[float, float, float], np.ndarray]) -> dict[str, np.ndarray]:
    """Privileged values of the named things."""
    values = {}
    for name, position, quaternion in things:
        values[f"{name}_pos"], values[f"{name}_quat"] = np.array(position), quaternion
    return values


def only(name: str, quaternion: np.ndarray, height: float = 0.0) -> Solid:
    return solid_of(name, scene((name, (0.0, 0.0, height), quaternion)))


def test_a_bottle_stands_on_its_long_axis() -> None:
    bottle = only("salad_dressing_1", UPRIGHT)
    assert (bottle.half_u, bottle.half_v, bottle.half_z) == pytest.approx((0.026, 0.018, 0.073))
    assert half_turn_difference(bottle.angle, np.pi / 2) == pytest.approx(0.0, abs=1e-9)


def test_tall_things_are_held_high_enough_for_the_palm() -> None:
    bottle = only("salad_dressing_1", UPRIGHT)
    grasp = choose_grasp(bottle, [], ACROSS_Y, [])
    assert bottle.centre[2] + grasp.offset[2] + PALM > bottle.top


@pytest.mark.parametrize("name", ["cream_cheese_1", "butter_1", "chocolate_pudding_1"])
def test_flat_boxes_are_held_across_their_short_side_without_touching_the_floor(name: str) -> None:
    box = only(name, FLAT)
    grasp = choose_grasp(box, [], ACROSS_Y, [])
    assert half_turn_difference(grasp.finger_angle, ACROSS_Y) == pytest.approx(0.0)
    assert box.centre[2] + grasp.offset[2] + FINGERTIP > box.bottom


def test_a_box_that_lies_the_other_way_turns_the_hand() -> None:
    quarter_turn = np.array([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)])
    grasp = choose_grasp(only("cream_cheese_1", quarter_turn), [], ACROSS_Y, [])
    assert abs(half_turn_difference(grasp.finger_angle, 0.0)) < 1e-9


@given(st.floats(-3.0, 3.0))
def test_bowls_are_held_by_the_rim_with_the_fingers_across_the_wall(present_angle: float) -> None:
    bowl = only("akita_black_bowl_1", FLAT)
    grasp = choose_grasp(bowl, [], present_angle, [])
    x, y, height = grasp.offset
    assert np.hypot(x, y) == pytest.approx(0.0515, abs=0.001)
    assert half_turn_difference(grasp.finger_angle, float(np.arctan2(y, x))) == pytest.approx(0.0, abs=1e-9)
    assert bowl.centre[2] + height == pytest.approx(bowl.top + FINGERTIP)


def test_a_tall_neighbour_makes_the_hand_turn_and_a_low_one_does_not() -> None:
    can = ("alphabet_soup_1", (0.0, 0.0, 0.0), np.array([0.0, np.sqrt(0.5), np.sqrt(0.5), 0.0]))
    tall = scene(can, ("milk_1", (0.0, 0.1, 0.03), UPRIGHT))
    low = scene(can, ("butter_1", (0.0, 0.1, -0.03), FLAT))
    for values, turned in ((tall, True), (low, False)):
        solids = solids_in(values)
        target = solids.pop("alphabet_soup_1")
        grasp = choose_grasp(target, solids.values(), ACROSS_Y, [])
        assert (abs(half_turn_difference(grasp.finger_angle, ACROSS_Y)) > 0.2) == turned
        assert intrusion(target, grasp, solids.values()) == 0.0


def test_a_grasp_that_failed_is_not_tried_again_at_once() -> None:
    can = only("alphabet_soup_1", FLAT)
    first = choose_grasp(can, [], ACROSS_Y, [])
    assert choose_grasp(can, [], ACROSS_Y, [first]) != first


def test_open_drawers_have_walls_and_closed_ones_do_not() -> None:
    values = scene(("wooden_cabinet_1", (0.0, 0.0, 0.9), FLAT))
    for drawer in ("top", "middle", "bottom"):
        values[f"joint:wooden_cabinet_1_{drawer}_level"] = np.array([-0.15 if drawer == "top" else 0.0])
    solids = solids_in(values)
    walls = [solid for name, solid in solids.items() if "/" in name]
    assert len(walls) == 4
    assert {round(wall.top, 3) for wall in walls} == {1.116}
    front = min(walls, key=lambda wall: wall.centre[1])
    assert front.centre[1] == pytest.approx(-0.076 - 0.15)


def test_distance_is_negative_inside_and_euclidean_at_a_corner() -> None:
    box = only("cream_cheese_1", FLAT)
    distances = box.distance(np.array([[0.0, 0.0], [0.041 + 0.03, 0.021 + 0.04], [0.041, 0.0]]))
    np.testing.assert_allclose(distances, [-0.021, 0.05, 0.0], atol=1e-12)


def test_what_the_hand_can_hold() -> None:
    held = {category for category in CATALOGUE if can_hold(category)}
    assert set(CATALOGUE) - held == {"basket", "flat_stove", "plate", "wine_rack", "wooden_cabinet"}
    assert not can_hold("moka_pot")


@pytest.mark.parametrize("category", [category for category in CATALOGUE if can_hold(category)])
def test_every_holdable_category_has_a_grasp_that_fits(category: str) -> None:
    assert candidates(only(f"{category}_1", FLAT), ACROSS_Y)
