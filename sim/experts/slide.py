"""Slide a plate over the table: too wide and too flat to be lifted, it is held by the rim that faces the goal, and pulled there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, osc_action
from vla_rl.sim.experts.grasp import Grasp, rim_grasp
from vla_rl.sim.experts.hand import HOVER, Hand, arrived, close_on, closed, descend
from vla_rl.sim.experts.shapes import solid_of

RIM_INSET = 0.003
"""Half the thickness (m) of a plate's rim."""
SLIP = 0.03
"""A rim that is this far (m) from the hand has slipped out of the fingers."""
RAISE_STEPS = 10
"""Control steps to open the fingers and rise before a new attempt."""


class Phase(Enum):
    """What the hand is doing."""

    REACH = "reach"
    CLOSE = "close"
    PULL = "pull"
    RAISE = "raise"


class Slide:
    """Reach, close, pull; after a slip raise and reach again. A thing that is pulled follows, one that is pushed turns away."""

    def __init__(self, name: str, site: str) -> None:
        self.name, self.site = name, site
        self.phase = Phase.REACH
        self.steps = 0
        self.grasp: Grasp | None = None
        self.width = 0.0

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        hand, plate = Hand.read(privileged), solid_of(self.name, privileged)
        way = privileged[f"site:{self.site}_pos"] - plate.position
        grasp = self.grasp
        if grasp is None or (self.phase is Phase.RAISE and self.steps >= RAISE_STEPS):
            grasp = self.grasp = rim_grasp(plate, float(np.arctan2(way[1], way[0])), RIM_INSET)
            self._enter(Phase.REACH)
        point = plate.centre + grasp.offset
        self._advance(hand, point, grasp.finger_angle)
        self.steps += 1
        self.width = hand.width
        return self._command(hand, way, point, grasp.finger_angle)

    def _advance(self, hand: Hand, point: np.ndarray, angle: float) -> None:
        """Leave the present phase if it is done or has failed."""
        if self.phase is Phase.REACH and arrived(hand, point, angle):
            self._enter(Phase.CLOSE)
        elif self.phase is Phase.CLOSE and closed(self.width, hand, self.steps):
            self._enter(Phase.PULL)
        elif self.phase is Phase.PULL and np.linalg.norm(point - hand.position) > SLIP:
            self._enter(Phase.RAISE)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.steps = phase, 0

    def _command(self, hand: Hand, way: np.ndarray, point: np.ndarray, angle: float) -> np.ndarray:
        match self.phase:
            case Phase.REACH:
                return descend(hand, point, angle)
            case Phase.CLOSE:
                return close_on(hand, point)
            case Phase.PULL:
                return osc_action(np.array([way[0], way[1], point[2] - hand.position[2]]), np.zeros(3), CLOSE)
            case Phase.RAISE:
                return osc_action(np.array([0.0, 0.0, HOVER]), np.zeros(3), OPEN)
