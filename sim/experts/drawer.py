"""Open a drawer of a wooden cabinet: turn the hand to the front, close it on the bar of the handle, pull."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, osc_action, rotation_error, rotation_matrix
from vla_rl.sim.experts.hand import Hand, approach, close_on, closed, near
from vla_rl.sim.experts.shapes import drawer_slide

HANDLES: Mapping[str, tuple[float, float, float]] = {
    "top": (-0.003, -0.102, 0.184),
    "middle": (-0.003, -0.102, 0.110),
    "bottom": (-0.003, -0.102, 0.041),
}
"""Middle of each closed drawer's bar in the cabinet's frame (m)."""
STANDOFF = np.array([0.0, 0.05, -0.13])
"""Where the hand turns, from the bar in the axes of the turned hand (m): above it and in front, clear of the other handles."""
STANDOFF_TOLERANCE = 0.02
TURN_TOLERANCE = 0.1
"""Distance (m) and angle (rad) from the standoff pose at which the hand goes on to the bar."""
PULL = 0.05
"""The pull aims this far (m) ahead of the hand."""
SLIP = 0.04
"""A bar that is this far (m) from the hand has slipped out of the fingers."""


class Phase(Enum):
    """What the hand is doing."""

    TURN = "turn"
    REACH = "reach"
    CLOSE = "close"
    PULL = "pull"


class OpenDrawer:
    """Turn, reach, close, pull; after a slip begin anew."""

    def __init__(self, cabinet: str, drawer: str) -> None:
        self.cabinet, self.drawer = cabinet, drawer
        self.phase = Phase.TURN
        self.steps = 0
        self.width = 0.0

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        hand, bar = Hand.read(privileged), self._bar(privileged)
        target = facing(rotation_matrix(privileged[f"{self.cabinet}_quat"])[:, 1])
        rotation = rotation_error(target, hand.quaternion)
        standoff = bar + target @ STANDOFF
        self._advance(hand, bar, standoff, rotation)
        self.steps += 1
        self.width = hand.width
        match self.phase:
            case Phase.TURN:
                return osc_action(standoff - hand.position, rotation, OPEN)
            case Phase.REACH:
                return approach(hand, bar, target, rotation)
            case Phase.CLOSE:
                return close_on(hand, bar)
            case Phase.PULL:
                return osc_action(bar - hand.position - PULL * target[:, 2], np.zeros(3), CLOSE)

    def _advance(self, hand: Hand, bar: np.ndarray, standoff: np.ndarray, rotation: np.ndarray) -> None:
        """Leave the present phase if it is done or has failed."""
        turned = np.linalg.norm(rotation) < TURN_TOLERANCE
        if self.phase is Phase.TURN and turned and np.linalg.norm(standoff - hand.position) < STANDOFF_TOLERANCE:
            self._enter(Phase.REACH)
        elif self.phase is Phase.REACH and near(hand, bar):
            self._enter(Phase.CLOSE)
        elif self.phase is Phase.CLOSE and closed(self.width, hand, self.steps):
            self._enter(Phase.PULL)
        elif self.phase is Phase.PULL and np.linalg.norm(bar - hand.position) > SLIP:
            self._enter(Phase.TURN)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.steps = phase, 0

    def _bar(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float64[3]: middle of the handle's bar (m)."""
        x, y, z = HANDLES[self.drawer]
        slide = drawer_slide(self.cabinet, self.drawer, privileged)
        return privileged[f"{self.cabinet}_pos"] + rotation_matrix(privileged[f"{self.cabinet}_quat"]) @ [x, y + slide, z]


def facing(direction: np.ndarray) -> np.ndarray:
    """float64[3, 3]: the hand pointing in a horizontal unit `direction`, one finger above the other."""
    up = np.array([0.0, 0.0, 1.0])
    return np.stack([np.cross(up, direction), up, direction], axis=1)
