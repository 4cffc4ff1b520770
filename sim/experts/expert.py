"""Scripted experts: one state machine per episode that reads simulator truth and answers one action at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from vla_rl.episode import EpisodeSpec, Observation
from vla_rl.sim.experts.noise import ActionNoise
from vla_rl.sim.experts.pick_place import PickPlace
from vla_rl.sim.experts.shapes import CATALOGUE, category_of

Predicate = list[str]


class UnsupportedGoal(ValueError):
    """No scripted expert knows how to reach this goal."""


class Skill(Protocol):
    """A closed-loop state machine for one goal predicate."""

    def act(self, privileged: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32[7]: the clean action for the present state."""
        ...


class ScriptedExpert:
    """Acts in one episode; `act` must be called once per control step, in order."""

    def __init__(self, goal: list[Predicate], noise: float, seed: int, burst_rate: float = 0.0) -> None:
        self.skill = _skill_for(goal)
        self.noise = ActionNoise(noise, burst_rate, seed)

    def act(self, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
        """(action float32[7] to execute, label float32[7] as meant), from `observation.privileged` alone."""
        label = self.skill.act(observation.privileged)
        return self.noise.perturb(label), label


def _skill_for(goal: list[Predicate]) -> Skill:
    if len(goal) == 1:
        for matches, make in SKILLS:
            if matches(goal[0]):
                return make(goal[0])
    raise UnsupportedGoal(
        f"no scripted expert for the goal {goal}; supported: one predicate, 'in <object> <basket region>' or 'on <object> <place>'"
    )


def _is_pick_place(predicate: Predicate) -> bool:
    return predicate[0] in ("in", "on") and len(predicate) == 3 and category_of(predicate[1]) in CATALOGUE


SKILLS: tuple[tuple[Callable[[Predicate], bool], Callable[[Predicate], Skill]], ...] = ((_is_pick_place, PickPlace),)


def make_expert(spec: EpisodeSpec, goal: list[Predicate], noise: float, seed: int) -> ScriptedExpert:
    return ScriptedExpert(goal, noise, seed)
