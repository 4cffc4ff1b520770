"""Scripted experts: one state machine per episode that reads simulator truth and answers one action at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from vla_rl.episode import EpisodeSpec, Observation
from vla_rl.errors import UserError
from vla_rl.sim.experts.drawer import OpenDrawer
from vla_rl.sim.experts.grasp import can_hold
from vla_rl.sim.experts.move_part import MovePart, PlateOnTable, StoveKnob
from vla_rl.sim.experts.noise import ActionNoise
from vla_rl.sim.experts.pick_place import PickPlace
from vla_rl.sim.experts.place import can_place
from vla_rl.sim.experts.shapes import category_of

Goal = list[list[str]]
"""A conjunction of predicates as LIBERO parses them, such as `[["in", "milk_1", "basket_1_contain_region"]]`."""
TABLE_REGION = r"main_table_\w+_region"
DRAWER_REGION = r"(?P<cabinet>wooden_cabinet_\d+)_(?P<drawer>top|middle|bottom)_region"
SUPPORTED = (
    "experts put one object that fits between the fingers, or a bowl, in a basket's contain_region or on a plate, a bowl, "
    "a stove's cook_region, a cabinet's top_side or a wine rack; they slide a plate to a region of "
    "the main table, turn on a stove, and open a drawer of a wooden cabinet"
)


class UnsupportedGoal(UserError):
    """No scripted expert knows how to reach this goal."""


class Skill(Protocol):
    """A closed-loop state machine for one goal predicate."""

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        ...


class ScriptedExpert:
    """Acts in one episode; `act` must be called once per control step, in order.

    noise: standard deviation of the Gaussian noise on the executed translation (action units, 0 to about 0.4).
    seed: of that noise; the same goal, seed and observations give the same actions.
    burst_rate: chance per control step that a push in a random direction begins, see `noise.py`.
    Raises UnsupportedGoal.
    """

    def __init__(self, goal: Goal, noise: float, seed: int, burst_rate: float = 0.0) -> None:
        skill = _skill_for(goal)
        if skill is None:
            raise UnsupportedGoal(f"no scripted expert for the goal {goal}; {SUPPORTED}")
        self.skill = skill
        self.noise = ActionNoise(noise, burst_rate, seed)

    def act(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """(action float32[7] to execute, label float32[7] as meant), from `observation.privileged` alone."""
        label = self.skill.act(observation.privileged)
        return self.noise.perturb(label), label


def supports(goal: Goal) -> bool:
    """Whether there is an expert for this goal."""
    return _skill_for(goal) is not None


def _skill_for(goal: Goal) -> Skill | None:
    match goal:
        case [["in" | "on" as relation, name, destination]] if can_hold(category_of(name)) and can_place(relation, destination):
            return PickPlace(relation, name, destination)
        case [["on", name, site]] if category_of(name) == "plate" and re.fullmatch(TABLE_REGION, site):
            return MovePart(PlateOnTable(name, site))
        case [["turnon", stove]] if category_of(stove) == "flat_stove":
            return MovePart(StoveKnob(stove))
        case [["open", region]] if drawer := re.fullmatch(DRAWER_REGION, region):
            return OpenDrawer(drawer["cabinet"], drawer["drawer"])
        case _:
            return None


def make_expert(spec: EpisodeSpec, goal: Goal, noise: float, seed: int, burst_rate: float = 0.0) -> ScriptedExpert:
    """The expert of an episode. Raises UnsupportedGoal naming the episode."""
    if not supports(goal):
        raise UnsupportedGoal(f"{spec.key}: no scripted expert for the goal {goal}; {SUPPORTED}")
    return ScriptedExpert(goal, noise, seed, burst_rate)
