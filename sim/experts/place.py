"""Where an object must come to rest so that a goal predicate holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_rl.sim.experts.shapes import Solid, category_of, solid_of

BASKET_DEPTH = 0.05
"""Aim this far above the centre of a basket's region (m): inside it, with the hand still over the basket's wall."""
WALL_CLEARANCE = 0.02
"""An object's lowest point passes this far (m) over the wall of a basket."""
TABLE_CLEARANCE = 0.08
"""How high (m) a carried object travels over a flat destination."""
SEATS: Mapping[str, float] = {"plate": 0.008, "akita_black_bowl": 0.008}
"""Objects that another one can be put on, and how high (m) it then rests over their origin."""
SURFACES: Mapping[str, float] = {
    r"flat_stove_\d+_cook_region": 0.022,
    r"wooden_cabinet_\d+_top_side": 0.0,
    r"wine_rack_\d+_top_region": 0.0,
}
"""Sites that an object can be put on, as patterns, and the height (m) of the surface over the site."""
BASKET = re.compile(r"(basket_\d+)_contain_region")


@dataclass(frozen=True)
class Placement:
    """Where the carried object's body origin should go, and from how high it comes down."""

    position: np.ndarray
    """float64[3]: target of the object's `<name>_pos` (m)."""
    clearance: float
    """The object travels this far above `position` (m)."""


def can_place(relation: str, destination: str) -> bool:
    """Whether `placement_of` knows this relation and destination."""
    if relation == "in":
        return BASKET.fullmatch(destination) is not None
    return relation == "on" and (category_of(destination) in SEATS or _surface_height(destination) is not None)


def placement_of(relation: str, destination: str, solid: Solid, privileged: Mapping[str, np.ndarray]) -> Placement:
    """The placement that puts the carried `solid` in or on `destination`, from the present state.

    Raises ValueError for a relation and destination that `can_place` refuses.
    """
    below_origin = float(solid.position[2] - solid.bottom)
    basket, surface = BASKET.fullmatch(destination), _surface_height(destination)
    if relation == "in" and basket:
        position = privileged[f"site:{destination}_pos"] + np.array([0.0, 0.0, BASKET_DEPTH])
        return Placement(position, solid_of(basket[1], privileged).top + WALL_CLEARANCE + below_origin - float(position[2]))
    if relation == "on" and category_of(destination) in SEATS:
        return _onto(privileged[f"{destination}_pos"], SEATS[category_of(destination)] + below_origin)
    if relation == "on" and surface is not None:
        return _onto(privileged[f"site:{destination}_pos"], surface + below_origin)
    raise ValueError(
        f"cannot place an object {relation!r} {destination!r}: only in a basket's region, on {', '.join(SEATS)} or on {', '.join(SURFACES)}"
    )


def _onto(origin: np.ndarray, height: float) -> Placement:
    return Placement(origin + np.array([0.0, 0.0, height]), TABLE_CLEARANCE)


def _surface_height(site: str) -> float | None:
    return next((height for pattern, height in SURFACES.items() if re.fullmatch(pattern, site)), None)
