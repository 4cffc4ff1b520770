"""Suites, tasks, prompts, goals and step limits, without creating a simulator."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from vla_rl.conventions import PromptSource
from vla_rl.episode import EpisodeSpec, SpecError
from vla_rl.sim.libero import packaging

BASE_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
PRO_SUITES = tuple(f"{base}_{kind}" for base in BASE_SUITES[:4] for kind in ("lan", "object", "swap", "task"))
"""LIBERO-PRO's suites that ship with all their files: changed language, objects, positions and tasks."""
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Default step limit by base suite, as OpenVLA-OFT and openpi evaluate."""
GOAL_PREDICATES = {"on": 3, "in": 3, "open": 2, "close": 2, "turnon": 2, "turnoff": 2}
"""Predicates that LIBERO's tasks use, with the number of words of a goal clause."""


@dataclass(frozen=True)
class Task:
    """One task of one suite."""

    suite: str
    index: int
    name: str
    """The file name without extension."""
    bddl_path: Path
    init_states_path: Path

    def init_states(self) -> np.ndarray:
        """float64[K, D]: published states."""
        return packaging.load_init_states(self.init_states_path)


def list_suites() -> list[str]:
    """Names of the suites that can run, base suites first."""
    return [suite for suite in (*BASE_SUITES, *PRO_SUITES) if suite in packaging.task_map()]


def num_tasks(suite: str) -> int:
    """Number of tasks of a suite. Raises SpecError for an unknown suite."""
    return len(_task_names(suite))


def load_task(suite: str, index: int) -> Task:
    """The task's files. Raises SpecError with the nearest name or the range for what does not exist."""
    names = _task_names(suite)
    if not 0 <= index < len(names):
        raise SpecError(f"task {index} of suite {suite!r} does not exist: it has tasks 0 to {len(names) - 1}")
    name = names[index]
    return Task(suite, index, name, packaging.bddl_path(suite, name), packaging.init_states_path(suite, name))


def max_steps(suite: str) -> int:
    """Default step limit of a suite, by its base suite."""
    return MAX_STEPS[base_suite(suite)]


def base_suite(suite: str) -> str:
    """`libero_10_lan` -> `libero_10`. Raises SpecError for an unknown suite."""
    _task_names(suite)
    return next(base for base in sorted(BASE_SUITES, key=len, reverse=True) if suite == base or suite.startswith(base + "_"))


def prompt(suite: str, task: int, source: PromptSource = PromptSource.SUITE) -> str:
    """The task's instruction from the chosen source."""
    found = load_task(suite, task)
    if source is PromptSource.SUITE:
        source = PromptSource.BDDL if suite.endswith(("_lan", "_task")) else PromptSource.FILENAME
    return _language_of_bddl(found.bddl_path) if source is PromptSource.BDDL else language_of_name(found.name)


def language_of_name(name: str) -> str:
    """`KITCHEN_SCENE3_turn_on_the_stove` -> `turn on the stove`: LIBERO's `Task.language`."""
    words = name.split("_")
    if name[0].isupper():
        scene = next(position for position, word in enumerate(words) if word.startswith("SCENE"))
        words = words[scene + 1 :]
    return " ".join(words)


def goal_of(spec: EpisodeSpec) -> list[list[str]]:
    """Goal clauses of an episode: `[["in", "milk_1", "basket_1_contain_region"]]`; `spec.goal` if given, else the task's own."""
    task = load_task(spec.suite, spec.task)
    return parse_goal(spec.goal) if spec.goal else _goal_of_bddl(task.bddl_path)


def parse_goal(text: str) -> list[list[str]]:
    """Clauses of a BDDL goal such as `(And (In milk_1 basket_1_contain_region))`.

    Raises SpecError for text that is no conjunction of `GOAL_PREDICATES`.
    """
    parser = packaging.bddl_parser()
    if not _is_one_expression(text):
        raise SpecError(f"goal {text!r} needs balanced parentheses, as in '(And (In milk_1 basket_1_contain_region))'")
    clauses: list[list[str]] = []
    parser.package_predicates(parser.scan_tokens(string=text) or [[]], clauses, "", "goals")
    if not clauses:
        raise SpecError(f"goal {text!r} has no clause; write '(And (In milk_1 basket_1_contain_region))'")
    for clause in clauses:
        _check_clause(text, clause)
    return clauses


def _is_one_expression(text: str) -> bool:
    """Whether the text is one parenthesised expression (the parser's own errors are bare exceptions)."""
    text, depths, depth = text.strip(), [], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        depths.append(depth)
    return bool(depths) and depths[-1] == 0 and all(value > 0 for value in depths[:-1])


def _check_clause(text: str, clause: list[str]) -> None:
    if not isinstance(clause, list) or not clause or not isinstance(clause[0], str):
        raise SpecError(f"goal {text!r}: {clause!r} is no clause; write '(And (In milk_1 basket_1_contain_region))'")
    if clause[0] not in GOAL_PREDICATES:
        raise SpecError(
            f"goal {text!r}: predicate {clause[0]!r} is not one of {', '.join(GOAL_PREDICATES)}{_nearest(clause[0], GOAL_PREDICATES)}"
        )
    if len(clause) != GOAL_PREDICATES[clause[0]]:
        raise SpecError(f"goal {text!r}: {clause[0]!r} takes {GOAL_PREDICATES[clause[0]] - 1} names, got {len(clause) - 1}")


@cache
def _goal_of_bddl(path: Path) -> list[list[str]]:
    return packaging.bddl_parser().robosuite_parse_problem(str(path))["goal_state"]


@cache
def _language_of_bddl(path: Path) -> str:
    return packaging.bddl_parser().get_problem_info(str(path))["language_instruction"]


def _task_names(suite: str) -> list[str]:
    if suite not in list_suites():
        raise SpecError(f"suite {suite!r} is not one of {', '.join(list_suites())}{_nearest(suite, list_suites())}")
    return packaging.task_map()[suite]


def _nearest(name: str, names: object) -> str:
    close = difflib.get_close_matches(name, list(names), 1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return f"; did you mean {close[0]!r}?" if close else ""
