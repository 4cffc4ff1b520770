"""A measure of progress for LIBERO's pick-and-place tasks, for `reward.kind: progress`.

The reward knows where things are (`reward.privileged`), the policy does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vla_rl.episode import Episode, EpisodeSpec, Float64
from vla_rl.sim.experts.place import can_place, placement_of
from vla_rl.sim.experts.shapes import solid_of
from vla_rl.sim.libero.tasks import goal_of

UNIT = 0.2
"""Metres of hand or object that count 1: about half of the way to an object."""
ASIDE = 0.06
"""Horizontal distance of hand and object (m) over which being above it counts from 0 to 1: a tiny pi0 closed its hand 2.6 cm from
the middle of a soup can (median) where it succeeded and 4.5 cm where it failed, which in `UNIT`s is next to nothing."""
LIFT = 0.05
"""Rise of the object (m) that counts 1: an object that rises has been grasped, the one moment that decides an episode."""
OVER_DESTINATION = 0.06
"""Horizontal distance to the destination (m) within which an object counts as lifted, so that letting it go costs nothing."""


def pick_and_place(episode: Episode) -> Float64:
    """float64[T + 1]: how far the object has come, before every chunk and at the end; more is better.

    The sum of minus the distance from hand to object, minus the horizontal distance from object to destination (both in `UNIT`s), how
    little the hand is beside the object (from 0 at `ASIDE` to 1), and the object's rise since the start (in `LIFT`s, at most 1).
    Needs `reward.privileged`. Raises ValueError for an episode whose goal is another than one object in or on a destination that the
    scripted expert knows, or that never started.
    """
    name, relation, destination = _object_and_destination(episode.spec)
    if episode.final_observation is None:
        raise ValueError(f"{episode.spec.key} never started, so there is no progress to measure")
    truths = [observation.privileged for observation in (*(step.observation for step in episode.steps), episode.final_observation)]
    if not truths[0]:
        raise ValueError(f"{episode.spec.key} holds no simulator truth; set reward.privileged: true")
    resting_height = float(truths[0][f"{name}_pos"][2])
    return np.array([_measure(truth, name, relation, destination, resting_height) for truth in truths])


def _object_and_destination(spec: EpisodeSpec) -> tuple[str, str, str]:
    match goal_of(spec):
        case [["in" | "on" as relation, name, destination]] if can_place(relation, destination):
            return name, relation, destination
        case goal:
            raise ValueError(f"{spec.key}: the goal {goal} is not one object that is put in a basket or on something the expert knows")


def _measure(truth: Mapping[str, np.ndarray], name: str, relation: str, destination: str, resting_height: float) -> float:
    solid = solid_of(name, truth)
    from_hand = truth["robot0_eef_pos"] - solid.centre
    above = 1.0 - min(float(np.linalg.norm(from_hand[:2])) / ASIDE, 1.0)
    target = placement_of(relation, destination, solid, truth).position
    to_destination = float(np.linalg.norm(target[:2] - solid.position[:2]))
    lifted = 1.0 if to_destination < OVER_DESTINATION else float(np.clip((solid.position[2] - resting_height) / LIFT, 0.0, 1.0))
    return above + lifted - (float(np.linalg.norm(from_hand)) + to_destination) / UNIT
