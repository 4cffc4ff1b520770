"""Where an object must come to rest so that a goal predicate holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_rl.sim.experts.shapes import CATALOGUE, Solid, category_of, solid_of

BASKET_DEPTH = 0.05
"""Aim this far above the centre of the contain region (m): inside it, with the hand still over the basket's wall."""
BURNER_HEIGHT = 0.022
"""Height (m) of a stove's burner over the origin of its cook region."""
TABLE_CLEARANCE = 0.08
"""How high (m) a carried object travels over a flat destination."""


@dataclass(frozen=True)
class Placement:
    """Where the carried object's body origin should go, and from how high it comes down."""

    position: np.ndarray
    """float64[3]: target of the object's `<name>_pos` (m)."""
    clearance: float
    """The object travels this far above `position` (m)."""


def placement_of(predicate: list[str], solid: Solid, privileged: Mapping[str, np.ndarray]) -> Placement:
    """The placement that makes `[relation, object, destination]` true, from the present state.

    `solid` is the carried object as it hangs in the hand.
    """
    relation, _, destination = predicate
    below_origin = float(solid.position[2] - solid.bottom)
    if relation == "in":
        return _into_basket(destination, below_origin, privileged)
    if category_of(destination) in CATALOGUE:
        return _onto(privileged[f"{destination}_pos"], _seat_height(destination, privileged), below_origin)
    return _onto(privileged[f"site:{destination}_pos"], _site_surface(destination, privileged), below_origin)


def _into_basket(region: str, below_origin: float, privileged: Mapping[str, np.ndarray]) -> Placement:
    basket = solid_of(region.removesuffix("_contain_region"), privileged)
    position = privileged[f"site:{region}_pos"] + [0.0, 0.0, BASKET_DEPTH]
    return Placement(position, clearance=basket.top + 0.02 + below_origin - float(position[2]))


def _onto(middle: np.ndarray, surface: float, below_origin: float) -> Placement:
    return Placement(np.array([middle[0], middle[1], surface + below_origin]), TABLE_CLEARANCE)


def _seat_height(name: str, privileged: Mapping[str, np.ndarray]) -> float:
    """Height (m) at which something rests on a plate or inside a bowl: just over its floor."""
    return float(privileged[f"{name}_pos"][2]) + 0.008


def _site_surface(site: str, privileged: Mapping[str, np.ndarray]) -> float:
    """Height (m) of the surface that belongs to a site; a stove's burner stands above its cook region."""
    above_site = BURNER_HEIGHT if site.endswith("_cook_region") else 0.0
    return float(privileged[f"site:{site}_pos"][2]) + above_site
