"""Pick an object up and put it down: one closed-loop state machine for every shape and destination."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np

from vla_rl.sim.experts.controller import CLOSE, OPEN, finger_angle, funnel, half_turn_difference, osc_action, rotation_error, straight_down
from vla_rl.sim.experts.grasp import Grasp, choose_grasp
from vla_rl.sim.experts.place import Placement, placement_of
from vla_rl.sim.experts.shapes import Solid, solid_of, solids_in

REACH_TOLERANCE = 0.008
"""Distance to the grasp (m) at which the fingers begin to close."""
YAW_TOLERANCE = 0.12
OPEN_WIDTH = 0.07
"""Distance of the fingers (m) from which on they count as open."""
HELD_WIDTH = 0.0015
"""Fingers closer than this (m) hold nothing."""
SLIP = 0.03
"""An object that moved this far (m) relative to the hand since it was grasped is lost."""
HOVER = 0.10
"""The hand comes down to a grasp from this height (m)."""
LIFT = 0.06
"""An object rises this far (m) before it moves sideways: out of a drawer, over the rim of what it stood on."""
WAIT_HEIGHT = 0.06
"""While the fingers still open or the hand still turns, it waits this far (m) above the grasp."""
PLACE_TOLERANCE = 0.012
RELEASE_STEPS = 10
MAX_CLOSE_STEPS = 16


class Phase(Enum):
    """What the hand is doing."""

    REACH = "reach"
    CLOSE = "close"
    LIFT = "lift"
    CARRY = "carry"
    RELEASE = "release"
    RETREAT = "retreat"


class PickPlace:
    """Reach, close, lift, carry, release; back to reaching when the object is not in the hand."""

    def __init__(self, predicate: list[str]) -> None:
        self.predicate = predicate
        self.name = predicate[1]
        self.phase = Phase.REACH
        self.steps = 0
        self.grasp: Grasp | None = None
        self.tried: list[Grasp] = []
        self.hold = np.zeros(3)
        self.travel_height = 0.0
        self.width = 0.0

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        hand = privileged["robot0_eef_pos"]
        solid = solid_of(self.name, privileged)
        if self.grasp is None:
            self.grasp = self._choose(solid, privileged)
        self._advance(hand, solid, privileged)
        self.steps += 1
        self.width = _width(privileged)
        return self._command(hand, solid, privileged)

    def _choose(self, solid: Solid, privileged: Mapping[str, np.ndarray]) -> Grasp:
        neighbours = [other for name, other in solids_in(privileged).items() if name != self.name]
        return choose_grasp(solid, neighbours, finger_angle(privileged["robot0_eef_quat"]), self.tried)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.steps = phase, 0

    def _advance(self, hand: np.ndarray, solid: Solid, privileged: Mapping[str, np.ndarray]) -> None:
        """Leave the present phase if it is done or has failed."""
        assert self.grasp is not None
        if self.phase is Phase.REACH:
            if self._at_grasp(hand, solid, privileged):
                self._enter(Phase.CLOSE)
        elif self.phase is Phase.CLOSE:
            if self._closed(privileged):
                self.hold = solid.position - hand
                self.travel_height = solid.position[2] + LIFT
                self._enter(Phase.LIFT)
        elif self.phase in (Phase.LIFT, Phase.CARRY):
            if _width(privileged) < HELD_WIDTH or np.linalg.norm(solid.position - hand - self.hold) > SLIP:
                self._give_up()
            elif self.phase is Phase.LIFT:
                if solid.position[2] > self.travel_height - 0.01:
                    self._enter(Phase.CARRY)
            elif np.linalg.norm(self._target(solid, privileged).position - solid.position) < PLACE_TOLERANCE:
                self._enter(Phase.RELEASE)
        elif self.phase is Phase.RELEASE:
            if self.steps >= RELEASE_STEPS:
                self._enter(Phase.RETREAT)
        elif self.steps >= RELEASE_STEPS:
            self._give_up()

    def _give_up(self) -> None:
        """Start over with another grasp."""
        assert self.grasp is not None
        self.tried.append(self.grasp)
        self.grasp = None
        self._enter(Phase.REACH)

    def _at_grasp(self, hand: np.ndarray, solid: Solid, privileged: Mapping[str, np.ndarray]) -> bool:
        assert self.grasp is not None
        error = solid.centre + self.grasp.offset - hand
        turn = half_turn_difference(self.grasp.finger_angle, finger_angle(privileged["robot0_eef_quat"]))
        return bool(np.linalg.norm(error) < REACH_TOLERANCE and abs(turn) < YAW_TOLERANCE and _width(privileged) > OPEN_WIDTH)

    def _closed(self, privileged: Mapping[str, np.ndarray]) -> bool:
        still = abs(_width(privileged) - self.width) < 0.0005
        return (self.steps >= 4 and still) or self.steps >= MAX_CLOSE_STEPS

    def _target(self, solid: Solid, privileged: Mapping[str, np.ndarray]) -> Placement:
        return placement_of(self.predicate, solid, privileged)

    def _command(self, hand: np.ndarray, solid: Solid, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.phase is Phase.LIFT:
            return osc_action(np.array([0.0, 0.0, LIFT]), np.zeros(3), CLOSE)
        if self.phase is Phase.CARRY:
            target = self._target(solid, privileged)
            clearance = max(target.clearance, self.travel_height - target.position[2])
            return osc_action(funnel(target.position - solid.position, clearance, tolerance=0.015), np.zeros(3), CLOSE)
        if self.phase is Phase.RELEASE:
            return osc_action(np.zeros(3), np.zeros(3), OPEN)
        if self.phase is Phase.RETREAT:
            return osc_action(np.array([0.0, 0.0, HOVER]), np.zeros(3), OPEN)
        return self._reach(hand, solid, privileged)

    def _reach(self, hand: np.ndarray, solid: Solid, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """Come down over the grasp; stay above it while the fingers still open or the hand still turns."""
        if self.grasp is None:
            self.grasp = self._choose(solid, privileged)
        quaternion = privileged["robot0_eef_quat"]
        error = solid.centre + self.grasp.offset - hand
        if self.phase is Phase.CLOSE:
            return osc_action(error, np.zeros(3), CLOSE)
        turn = half_turn_difference(self.grasp.finger_angle, finger_angle(quaternion))
        if _width(privileged) < OPEN_WIDTH or abs(turn) > 2 * YAW_TOLERANCE:
            error = error + np.array([0.0, 0.0, WAIT_HEIGHT])
        rotation = np.zeros(3)
        if abs(turn) > YAW_TOLERANCE / 2:
            rotation = rotation_error(straight_down(self.grasp.finger_angle, quaternion), quaternion)
        return osc_action(funnel(error, HOVER, tolerance=0.006), rotation, OPEN)


def _width(privileged: Mapping[str, np.ndarray]) -> float:
    left, right = privileged["robot0_gripper_qpos"]
    return float(left - right)
