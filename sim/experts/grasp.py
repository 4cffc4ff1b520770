"""Where to take hold of an object from above: by its shape, and clear of its neighbours.

The hand is described in its own frame: f along the finger line, c across it, heights relative to the grip site
(from the collision geometry of robosuite's Panda hand, fingers open).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vla_rl.sim.experts.controller import half_turn_difference
from vla_rl.sim.experts.shapes import CATALOGUE, Solid

FINGERTIP = -0.012
"""Lowest point of the fingers relative to the grip site (m)."""
PALM = 0.026
"""Underside of the hand relative to the grip site (m): an object may stand this far above it between the fingers."""
FLOOR_CLEARANCE = 0.002
WIDEST = 0.075
"""Widest side (m) that fits between the finger pads, which open to 0.08."""
PALM_OUTLINE_FC = np.stack(np.meshgrid(np.linspace(-0.104, 0.104, 9), [-0.032, 0.0, 0.032]), -1).reshape(-1, 2)
FINGER_OUTLINE_FC = np.array([[side * along, across] for side in (-1, 1) for along in (0.034, 0.05, 0.068) for across in (-0.011, 0.011)])
NEIGHBOUR_MARGIN = 0.012
"""Distance to a neighbour (m) below which a grasp is marked down."""
SKEWS = np.radians([0.0, -12.0, 12.0, -24.0, 24.0])
TABLE_ARM_SHOULDER = np.array([-0.66, 0.0, 1.245])
"""Where the second joint of LIBERO's table-mounted Panda is (m)."""
WRIST_SETBACK, WRIST_HEIGHT = 0.088, 0.204
"""The wrist's centre relative to the grip site of a hand that points down: towards the base, and up (m)."""
COMFORTABLE_STRETCH = 0.62
FLOOR_SCENE = 0.5
"""Below this height (m) an object is in a scene on the floor; tables are 0.9 high, other ones at least 0.4 with their arm lower."""
SKEW_COST = 0.6
"""Awkwardness per radian between the finger line and the side of a box: closing turns the box."""
RIM_ANGLES = np.radians(np.arange(0, 360, 15))
RIM_INSETS = (0.0, 0.01)
"""Distances (m) of the grip site inward from the wall: further in, the outer finger needs less room and pushes the bowl while it closes."""


@dataclass(frozen=True)
class Grasp:
    """One way to take hold of an object."""

    finger_angle: float
    """World angle of the finger line (rad), modulo half a turn."""
    offset: tuple[float, float, float]
    """Grip site relative to the object's centre, world axes (m)."""
    awkwardness: float = 0.0
    """Cost of not being the most natural grasp of this shape (1 is as bad as turning the hand by 3.3 rad)."""


def can_hold(category: str) -> bool:
    """Whether the hand can take hold of objects of this category from above."""
    shape = CATALOGUE.get(category)
    if shape is None:
        return False
    second_widest = sorted(high - low for low, high in zip(shape.low, shape.high))[1]
    return shape.wall > 0 or second_widest <= WIDEST


def choose_grasp(solid: Solid, neighbours: Iterable[Solid], present_angle: float, tried: Iterable[Grasp]) -> Grasp:
    """The cheapest candidate: little turning of the hand, no neighbour in the way, not one that failed before."""
    neighbours, tried = list(neighbours), list(tried)

    def cost(grasp: Grasp) -> float:
        turning = abs(half_turn_difference(grasp.finger_angle, present_angle))
        return (
            grasp.awkwardness
            + 0.3 * turning
            + 40.0 * intrusion(solid, grasp, neighbours)
            + 20.0 * strain(solid.centre + grasp.offset)
            + 0.5 * tried.count(grasp)
        )

    return min(candidates(solid, present_angle), key=cost)


def strain(point: np.ndarray) -> float:
    """How far (m) the arm stretches beyond comfort with the hand pointing down at `point` (float64[3]).

    The distance from the shoulder to the wrist, for the arm mounted behind a table (0.70 is a straight arm, and joint limits
    come earlier). Scenes on the floor, where the arm stands elsewhere, lie within reach as a whole.
    """
    if point[2] < FLOOR_SCENE:
        return 0.0
    from_base = point - TABLE_ARM_SHOULDER
    return max(
        0.0, float(np.hypot(np.hypot(from_base[0], from_base[1]) - WRIST_SETBACK, from_base[2] + WRIST_HEIGHT)) - COMFORTABLE_STRETCH
    )


def candidates(solid: Solid, present_angle: float) -> list[Grasp]:
    """All grasps that fit the object's shape, the most natural first."""
    if solid.hollow:
        return [rim_grasp(solid, angle, inset) for inset in RIM_INSETS for angle in RIM_ANGLES]
    height = grip_height(solid)
    if solid.round:
        return [Grasp(present_angle + skew, (0.0, 0.0, height)) for skew in np.radians([0, -15, 15, -30, 30, -45, 45, -60, 60, 90])]
    angles = [solid.angle, solid.angle + np.pi / 2]
    widths = [2 * solid.half_u, 2 * solid.half_v]
    fitting = [angle for width, angle in zip(widths, angles) if width <= WIDEST] or [angles[int(np.argmin(widths))]]
    return [Grasp(angle + skew, (0.0, 0.0, height), SKEW_COST * abs(skew)) for angle in fitting for skew in SKEWS]


def grip_height(solid: Solid) -> float:
    """Height of the grip site over the object's centre: at the centre, unless the palm or the floor needs it higher."""
    return max(0.0, _lowest_grip(solid), solid.half_z - PALM + 0.004)


def rim_grasp(solid: Solid, angle: float, inset: float) -> Grasp:
    """Hold the wall of a bowl at world angle `angle` seen from its centre, the grip site `inset` inward of the wall."""
    radius = (solid.half_u + solid.half_v) / 2 - solid.wall / 2 - inset
    height = max(solid.half_z + FINGERTIP, _lowest_grip(solid))
    return Grasp(angle, (radius * np.cos(angle), radius * np.sin(angle), height), 5.0 * inset)


def _lowest_grip(solid: Solid) -> float:
    """Height of the grip site over the object's centre with the fingertips just over what it stands on."""
    return -solid.half_z - FINGERTIP + FLOOR_CLEARANCE


def intrusion(solid: Solid, grasp: Grasp, neighbours: Iterable[Solid]) -> float:
    """How far (m) the open hand at `grasp` would reach into the margin around its neighbours, worst point."""
    along = np.array([np.cos(grasp.finger_angle), np.sin(grasp.finger_angle)])
    axes = np.stack([along, [-along[1], along[0]]])
    centre = solid.centre + grasp.offset
    worst = 0.0
    for neighbour in neighbours:
        for outline_FC, height in ((PALM_OUTLINE_FC, PALM), (FINGER_OUTLINE_FC, FINGERTIP)):
            if neighbour.top > centre[2] + height:
                distance = neighbour.distance(centre[:2] + outline_FC @ axes).min()
                worst = max(worst, NEIGHBOUR_MARGIN - float(distance))
    return worst
