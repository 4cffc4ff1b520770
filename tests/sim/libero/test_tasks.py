"""Suites, prompts and goals, against LIBERO's own benchmark classes and files."""

from __future__ import annotations

import contextlib
import io

import pytest

from vla_rl.conventions import PromptSource
from vla_rl.episode import EpisodeSpec, SpecError
from vla_rl.sim.libero import packaging, tasks


def test_suites_and_counts() -> None:
    suites = tasks.list_suites()
    assert len(suites) == 5 + 16
    assert {suite: tasks.num_tasks(suite) for suite in suites} == {suite: 90 if suite == "libero_90" else 10 for suite in suites}


def test_every_task_has_its_files_and_liberos_language() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import benchmark

        for suite in tasks.list_suites():
            theirs = benchmark.get_benchmark(suite)()
            for index in range(tasks.num_tasks(suite)):
                task = tasks.load_task(suite, index)
                assert task.bddl_path.is_file() and task.init_states_path.is_file()
                assert tasks.prompt(suite, index, PromptSource.FILENAME) == theirs.get_task(index).language


def test_published_states() -> None:
    assert tasks.load_task("libero_object", 0).init_states().shape == (50, 110)
    assert tasks.load_task("libero_spatial", 9).init_states().shape == (50, 92)


@pytest.mark.parametrize(
    ("suite", "source", "words"),
    [
        ("libero_object", PromptSource.SUITE, "pick up the alphabet soup and place it in the basket"),
        ("libero_object", PromptSource.BDDL, "pick the alphabet soup and place it in the basket"),
        ("libero_object_lan", PromptSource.SUITE, "grab alphabet soup and put it into basket"),
        ("libero_object_lan", PromptSource.FILENAME, "pick up the alphabet soup and place it in the basket"),
        ("libero_object_swap", PromptSource.SUITE, "pick up the alphabet soup and place it in the basket"),
    ],
)
def test_prompt_source(suite: str, source: PromptSource, words: str) -> None:
    assert tasks.prompt(suite, 0, source) == words


def test_task_suites_ask_for_their_own_task() -> None:
    """LIBERO-PRO #27: file names of `_task` suites name the unperturbed task."""
    unlike = [i for i in range(10) if tasks.prompt("libero_object_task", i) != tasks.prompt("libero_object_task", i, PromptSource.FILENAME)]
    assert len(unlike) == 10


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'libero_object'"):
        tasks.load_task("libero_objekt", 0)
    with pytest.raises(SpecError, match="task 10 of suite 'libero_goal' does not exist: it has tasks 0 to 9"):
        tasks.load_task("libero_goal", 10)
    with pytest.raises(SpecError, match="task -1"):
        tasks.load_task("libero_goal", -1)


@pytest.mark.parametrize(
    ("suite", "base", "steps"),
    [
        ("libero_10_lan", "libero_10", 520),
        ("libero_90", "libero_90", 400),
        ("libero_spatial_swap", "libero_spatial", 220),
        ("libero_object", "libero_object", 280),
    ],
)
def test_step_limit_by_base_suite(suite: str, base: str, steps: int) -> None:
    assert (tasks.base_suite(suite), tasks.max_steps(suite)) == (base, steps)


def test_goals_of_task_and_of_spec() -> None:
    spec = EpisodeSpec("libero_object", 0, "benchmark:0", "test")
    assert tasks.goal_of(spec) == [["in", "alphabet_soup_1", "basket_1_contain_region"]]
    other = EpisodeSpec("libero_object", 0, "benchmark:0", "test", goal="(And (In milk_1 basket_1_contain_region) (On butter_1 basket_1))")
    assert tasks.goal_of(other) == [["in", "milk_1", "basket_1_contain_region"], ["on", "butter_1", "basket_1"]]
    single = EpisodeSpec("libero_object", 0, "benchmark:0", "test", goal="(In milk_1 basket_1_contain_region)")
    assert tasks.goal_of(single) == [["in", "milk_1", "basket_1_contain_region"]]


def test_every_goal_uses_known_predicates() -> None:
    for suite in tasks.list_suites():
        for index in range(tasks.num_tasks(suite)):
            goal = packaging.bddl_parser().robosuite_parse_problem(str(tasks.load_task(suite, index).bddl_path))["goal_state"]
            assert all(tasks.GOAL_PREDICATES[clause[0]] == len(clause) for clause in goal)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(And (In milk_1 basket_1_contain_region)", "balanced parentheses"),
        ("milk", "balanced parentheses"),
        ("(And (Inn milk_1 basket_1))", "did you mean 'in'"),
        ("(And (In milk_1))", "'in' takes 2 names, got 1"),
        ("(And milk_1)", "is no clause"),
        ("()", "is no clause"),
        ("(And)", "no clause"),
    ],
)
def test_bad_goals(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tasks.parse_goal(text)


@pytest.mark.parametrize("text", ["", "  ", ")(", "(On a b) (On c d)", "(And (On a b)))"])
def test_goals_that_are_no_expression(text: str) -> None:
    with pytest.raises(SpecError, match="balanced parentheses"):
        tasks.parse_goal(text)
