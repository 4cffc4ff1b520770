"""What else can be asked for in a task's scene: the goals of the suite's other tasks."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.episode import SpecError
from vla_rl.sim.libero import packaging, tasks


def other_goals(suite: str, task: int) -> list[tuple[str, str]]:
    """(instruction, BDDL goal) of every other task of the suite whose objects are all in this task's scene.

    Raises SpecError if the scene can host no other goal.
    """
    scene = packaging.bddl_parser().robosuite_parse_problem(str(tasks.load_task(suite, task).bddl_path))
    names = [name for group in (scene["objects"], scene["fixtures"]) for instances in group.values() for name in instances]
    found = []
    for other in range(tasks.num_tasks(suite)):
        goal = _goal_clauses(suite, other)
        if goal != scene["goal_state"] and all(_in_scene(word, names) for clause in goal for word in clause[1:]):
            found.append((tasks.prompt(suite, other), _goal_text(goal)))
    if not found:
        raise SpecError(f"the scene of {suite} task {task} can host no other task of the suite: no other instruction makes sense in it")
    return found


def _goal_clauses(suite: str, task: int) -> list[list[str]]:
    return packaging.bddl_parser().robosuite_parse_problem(str(tasks.load_task(suite, task).bddl_path))["goal_state"]


def _in_scene(word: str, names: Sequence[str]) -> bool:
    """Whether a goal's word is an object of the scene or a region of one (`basket_1_contain_region`)."""
    return any(word == name or word.startswith(name + "_") for name in names)


def _goal_text(clauses: Sequence[Sequence[str]]) -> str:
    """`[["in", "milk_1", "basket_1_contain_region"]]` -> `(And (In milk_1 basket_1_contain_region))`."""
    return f"(And {' '.join('(' + ' '.join([clause[0].capitalize(), *clause[1:]]) + ')' for clause in clauses)})"
