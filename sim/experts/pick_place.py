"""Pick an object up and put it down: one closed-loop state machine for every shape and destination."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, funnel, osc_action
from vla_rl.sim.experts.grasp import Grasp, choose_grasp
from vla_rl.sim.experts.hand import HOVER, Hand, arrived, close_on, closed, descend
from vla_rl.sim.experts.place import placement_of
from vla_rl.sim.experts.shapes import Solid, solid_of, solids_in

HELD_WIDTH = 0.0015
"""Fingers closer than this (m) hold nothing."""
SLIP = 0.03
"""An object that moved this far (m) relative to the hand since it was grasped is lost."""
LIFT = 0.06
"""An object rises this far (m) before it moves sideways: out of a drawer, over the rim of what it stood on."""
LIFTED = 0.01
"""It may move sideways this far (m) below the height of `LIFT`."""
PLACE_CONE = 0.015
"""Horizontal error (m) from which on a carried object keeps its height."""
PLACE_TOLERANCE = 0.012
"""Distance to the placement (m) at which the fingers open."""
STUCK_STEPS, STUCK_DISTANCE = 20, 0.01
"""A hand that came less than this far (m) in this many control steps of reaching stands on something, or is out of reach."""
RELEASE_STEPS = 10
"""Control steps to open the fingers, and to rise before a new attempt."""


class Phase(Enum):
    """What the hand is doing."""

    REACH = "reach"
    CLOSE = "close"
    LIFT = "lift"
    CARRY = "carry"
    RELEASE = "release"
    RETREAT = "retreat"


class PickPlace:
    """Reach, close, lift, carry, release, retreat; back to reaching, with another grasp, when the object is not where it should be."""

    def __init__(self, relation: str, name: str, destination: str) -> None:
        self.relation, self.name, self.destination = relation, name, destination
        self.phase = Phase.REACH
        self.steps = 0
        self.grasp: Grasp | None = None
        self.tried: list[Grasp] = []
        self.hold = np.zeros(3)
        self.travel_height = 0.0
        self.width = 0.0
        self.trail: deque[np.ndarray] = deque(maxlen=STUCK_STEPS)

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        hand, solid = Hand.read(privileged), solid_of(self.name, privileged)
        grasp = self.grasp
        if grasp is None or self._failed(hand, solid):
            grasp = self._start_over(hand, solid, privileged)
        point = solid.centre + grasp.offset
        self._advance(hand, solid, point, grasp.finger_angle, privileged)
        self.steps += 1
        self.width = hand.width
        self.trail.append(hand.position)
        return self._command(hand, solid, point, grasp.finger_angle, privileged)

    def _start_over(self, hand: Hand, solid: Solid, privileged: Mapping[str, np.ndarray]) -> Grasp:
        """Reach, with a grasp that did not fail before if there is a choice."""
        if self.grasp is not None:
            self.tried.append(self.grasp)
        neighbours = [other for name, other in solids_in(privileged).items() if name != self.name]
        self.grasp = choose_grasp(solid, neighbours, hand.finger_angle, self.tried)
        self._enter(Phase.REACH)
        return self.grasp

    def _failed(self, hand: Hand, solid: Solid) -> bool:
        """The object is not in the hand while it should be, could not be reached, or was put down without reaching the goal."""
        if self.phase in (Phase.LIFT, Phase.CARRY):
            slipped = np.linalg.norm(solid.position - hand.position - self.hold) > SLIP
            return bool(hand.width < HELD_WIDTH or slipped)
        return self.phase is Phase.RETREAT and self.steps >= RELEASE_STEPS

    def _advance(self, hand: Hand, solid: Solid, point: np.ndarray, angle: float, privileged: Mapping[str, np.ndarray]) -> None:
        """Leave the present phase if it is done."""
        if self.phase is Phase.REACH and arrived(hand, point, angle):
            self._enter(Phase.CLOSE)
        elif self.phase is Phase.REACH and self._stuck(hand):
            self._enter(Phase.RETREAT)
        elif self.phase is Phase.CLOSE and closed(self.width, hand, self.steps):
            self.hold = solid.position - hand.position
            self.travel_height = float(solid.position[2]) + LIFT
            self._enter(Phase.LIFT)
        elif self.phase is Phase.LIFT and solid.position[2] > self.travel_height - LIFTED:
            self._enter(Phase.CARRY)
        elif self.phase is Phase.CARRY and self._at_destination(solid, privileged):
            self._enter(Phase.RELEASE)
        elif self.phase is Phase.RELEASE and self.steps >= RELEASE_STEPS:
            self._enter(Phase.RETREAT)

    def _command(self, hand: Hand, solid: Solid, point: np.ndarray, angle: float, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        still = np.zeros(3)
        match self.phase:
            case Phase.REACH:
                return descend(hand, point, angle)
            case Phase.CLOSE:
                return close_on(hand, point)
            case Phase.LIFT:
                return osc_action(np.array([0.0, 0.0, LIFT]), still, CLOSE)
            case Phase.CARRY:
                return osc_action(self._towards_destination(solid, privileged), still, CLOSE)
            case Phase.RELEASE:
                return osc_action(still, still, OPEN)
            case Phase.RETREAT:
                return osc_action(np.array([0.0, 0.0, HOVER]), still, OPEN)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.steps = phase, 0
        self.trail.clear()

    def _stuck(self, hand: Hand) -> bool:
        return len(self.trail) == STUCK_STEPS and float(np.linalg.norm(hand.position - self.trail[0])) < STUCK_DISTANCE

    def _at_destination(self, solid: Solid, privileged: Mapping[str, np.ndarray]) -> bool:
        target = placement_of(self.relation, self.destination, solid, privileged).position
        return float(np.linalg.norm(target - solid.position)) < PLACE_TOLERANCE

    def _towards_destination(self, solid: Solid, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float64[3] displacement: above all obstacles until over the destination, then down."""
        target = placement_of(self.relation, self.destination, solid, privileged)
        height = max(target.clearance, self.travel_height - float(target.position[2]))
        return funnel(target.position - solid.position, height, PLACE_CONE)
