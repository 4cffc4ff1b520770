"""Move something without lifting it: a plate slides over the table, the knob of a stove turns."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, osc_action, rotation_matrix
from vla_rl.sim.experts.grasp import Grasp, rim_grasp
from vla_rl.sim.experts.hand import HOVER, Hand, arrived, close_on, closed, descend
from vla_rl.sim.experts.shapes import solid_of

RIM_INSET = 0.003
"""Half the thickness (m) of a plate's rim."""
SLIP = 0.03
"""A rim that is this far (m) from the hand has slipped out of the fingers."""
KNOB_GRASP = np.array([0.038, 0.0, 0.035])
"""Grip site from a stove's origin (m): the fingers on both sides of the outer end of the knob's fin, above its disc."""
KNOB_LEAD = 0.03
"""The push aims this far (m) ahead of the hand."""
KNOB_TRAVEL = 0.10
"""Length (m) of a push that has turned the knob or missed it."""
RAISE_STEPS = 10
"""Control steps to open the fingers and rise before a new attempt."""


class Phase(Enum):
    """What the hand is doing."""

    REACH = "reach"
    CLOSE = "close"
    MOVE = "move"
    RAISE = "raise"


class Part(Protocol):
    """What is moved, and how."""

    gripped: bool
    """Whether the fingers close on it, or push with open fingers."""

    def choose(self, privileged: Mapping[str, np.ndarray]) -> Grasp:
        """The grasp of a new attempt, its offset relative to `origin`."""
        ...

    def origin(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float64[3]: where the part is (m)."""
        ...

    def displacement(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float64[3]: what the hand should do (m) to move the part; `point` is where it took hold, as far as the part has moved since."""
        ...

    def lost(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> bool:
        """Whether moving on is of no use."""
        ...


class MovePart:
    """Reach, close, move; when the part is lost, raise and reach again."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.phase = Phase.REACH
        self.steps = 0
        self.grasp: Grasp | None = None
        self.width = 0.0

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        hand, grasp = Hand.read(privileged), self.grasp
        if grasp is None or (self.phase is Phase.RAISE and self.steps >= RAISE_STEPS):
            grasp = self.grasp = self.part.choose(privileged)
            self._enter(Phase.REACH)
        point = self.part.origin(privileged) + grasp.offset
        self._advance(hand, point, grasp.finger_angle, privileged)
        self.steps += 1
        self.width = hand.width
        return self._command(hand, point, grasp.finger_angle, privileged)

    def _advance(self, hand: Hand, point: np.ndarray, angle: float, privileged: Mapping[str, np.ndarray]) -> None:
        """Leave the present phase if it is done or has failed."""
        if self.phase is Phase.REACH and arrived(hand, point, angle):
            self._enter(Phase.CLOSE if self.part.gripped else Phase.MOVE)
        elif self.phase is Phase.CLOSE and closed(self.width, hand, self.steps):
            self._enter(Phase.MOVE)
        elif self.phase is Phase.MOVE and self.part.lost(hand, point, privileged):
            self._enter(Phase.RAISE)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.steps = phase, 0

    def _command(self, hand: Hand, point: np.ndarray, angle: float, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        match self.phase:
            case Phase.REACH:
                return descend(hand, point, angle)
            case Phase.CLOSE:
                return close_on(hand, point)
            case Phase.MOVE:
                gripper = CLOSE if self.part.gripped else OPEN
                return osc_action(self.part.displacement(hand, point, privileged), np.zeros(3), gripper)
            case Phase.RAISE:
                return osc_action(np.array([0.0, 0.0, HOVER]), np.zeros(3), OPEN)


class PlateOnTable:
    """A plate, too wide and too flat to be lifted: gripped by the rim that faces the goal, and pulled there.

    (A thing that is pulled follows; one that is pushed turns away.)
    """

    gripped = True

    def __init__(self, name: str, site: str) -> None:
        self.name, self.site = name, site

    def choose(self, privileged: Mapping[str, np.ndarray]) -> Grasp:
        """The rim in the direction of the goal."""
        way = self._way(privileged)
        return rim_grasp(solid_of(self.name, privileged), float(np.arctan2(way[1], way[0])), RIM_INSET)

    def origin(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """Centre of the plate."""
        return solid_of(self.name, privileged).centre

    def displacement(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """The plate's way to the goal, at the height of the rim."""
        way = self._way(privileged)
        return np.array([way[0], way[1], point[2] - hand.position[2]])

    def lost(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> bool:
        """The rim is no longer between the fingers."""
        return bool(np.linalg.norm(point - hand.position) > SLIP)

    def _way(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        return privileged[f"site:{self.site}_pos"] - privileged[f"{self.name}_pos"]


class StoveKnob:
    """The fin of a stove's knob, which turns counter-clockwise about the vertical through the stove's origin.

    The flat inner side of an open finger pushes the fin's outer end: a contact of the finger's slanted outside would lock it
    (LIBERO's contacts resist torsion), and over the axis the arm is folded to its limits.
    """

    gripped = False

    def __init__(self, stove: str) -> None:
        self.stove = stove

    def choose(self, privileged: Mapping[str, np.ndarray]) -> Grasp:
        """The fin's end between the open fingers, which move across it."""
        rotation = self._rotation(privileged)
        x, y, z = rotation @ KNOB_GRASP
        return Grasp(float(np.arctan2(rotation[1, 1], rotation[0, 1])), (x, y, z))

    def origin(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """The stove's origin."""
        return privileged[f"{self.stove}_pos"]

    def displacement(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """Across the fin, at the distance from the axis and the height of the start."""
        across, off_course = self._rotation(privileged)[:, 1], point - hand.position
        return off_course + across * (KNOB_LEAD - off_course @ across)

    def lost(self, hand: Hand, point: np.ndarray, privileged: Mapping[str, np.ndarray]) -> bool:
        """The hand has gone as far as the knob turns."""
        return bool((hand.position - point) @ self._rotation(privileged)[:, 1] > KNOB_TRAVEL)

    def _rotation(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        return rotation_matrix(privileged[f"{self.stove}_quat"])
