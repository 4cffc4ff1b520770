"""Which demonstrations a recipe consists of, and who gives them. The list depends on the recipe alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from vla_rl.actors import Expert
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.operators import PageOperator, ReplayOperator
from vla_rl.config import ConfigError
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import EpisodeSpec, StepProtocol, noise_seed

REACH_MAX_STEPS = 60
"""Reach's blocks are at most 20 steps away."""


def plan_demonstrations(config: CollectConfig) -> list[EpisodeSpec]:
    """The episodes of a recipe, task by task; position in the list is the episode's number.

    Raises SpecError or ConfigError for a suite, task or goal that does not exist or that no expert can reach.
    """
    if isinstance(config.operator, ReplayOperator):
        return [info.spec for info in recorded_episodes(config, config.operator)]
    specs = [spec for task in task_numbers(config) for spec in _of_task(config, task)]
    goals: dict[tuple[int, str], EpisodeSpec] = {(spec.task, spec.goal): spec for spec in specs}
    if not isinstance(config.operator, PageOperator):  # a person can show what no script can
        for spec in goals.values():
            _require_expert(config, spec)
    return specs


def recorded_episodes(config: CollectConfig, operator: ReplayOperator) -> list[EpisodeInfo]:
    """The recorded episodes that a replay executes, task by task. Raises DatasetError, ConfigError if there are none."""
    infos = list_episodes([operator.dataset])
    chosen = [
        info
        for task in task_numbers(config)
        for info in [info for info in infos if (info.spec.suite, info.spec.task) == (config.suite, task)][: config.episodes_per_task]
    ]
    scenes = Counter(info.spec.key for info in chosen)
    twice = [info.name for info in chosen if scenes[info.spec.key] > 1]
    if twice:
        raise ConfigError(
            f"operator.dataset {operator.dataset} holds the scene of {twice[0]} more than once ({', '.join(twice[1:4])} ...); what is "
            "replayed is found by its scene: leave all but one out (vla-rl data filter --without-numbers)"
        )
    if not chosen:
        there = ", ".join(sorted({f"{info.spec.suite} task {info.spec.task}" for info in infos}))
        raise ConfigError(
            f"operator.dataset {operator.dataset} holds no episode of {config.suite} tasks {list(config.tasks)}; it holds {there}"
        )
    return chosen


def task_numbers(config: CollectConfig) -> Sequence[int]:
    """The tasks of a recipe. Raises SpecError or ConfigError for one that does not exist."""
    if config.suite == "reach":
        from vla_rl.sim.reach_layout import COLOURS

        count = len(COLOURS)
    else:
        from vla_rl.sim.libero.tasks import num_tasks

        count = num_tasks(config.suite)
    beyond = [task for task in config.tasks if task not in range(count)]
    if beyond:
        raise ConfigError(f"tasks has {beyond}; suite {config.suite!r} has tasks 0 to {count - 1}")
    return config.tasks or range(count)


def _of_task(config: CollectConfig, task: int) -> list[EpisodeSpec]:
    """`episodes_per_task` specs: a seed for each, or, with `goals: all`, every goal in the scene of a seed before the next one."""
    goals = [("", ""), *_other_goals(config, task)] if config.goals == "all" else [("", "")]
    protocol = StepProtocol(max_steps=config.max_steps or _max_steps(config.suite))
    specs = []
    for number in range(config.episodes_per_task):
        scene, which = divmod(number, len(goals))
        prompt, goal = goals[which]
        init = f"sampled:{config.first_seed + scene}"
        specs.append(EpisodeSpec(config.suite, task, init, "demonstrations", protocol, goal=goal, prompt=prompt))
    return specs


def _other_goals(config: CollectConfig, task: int) -> list[tuple[str, str]]:
    """(instruction, goal) of the suite's other tasks that the scene of `task` can host."""
    if config.suite == "reach":
        raise ConfigError(
            "goals is 'all' and suite 'reach': its scenes differ in which blocks they hold; use goals 'own' and several tasks"
        )
    from vla_rl.sim.libero.other_goals import other_goals

    return other_goals(config.suite, task)


def instruction(config: CollectConfig, spec: EpisodeSpec) -> str:
    """What the env will say that is to be done."""
    if spec.prompt:
        return spec.prompt
    if spec.suite == "reach":
        from vla_rl.sim.reach_layout import task_prompt

        return task_prompt(spec.task)
    from vla_rl.sim.libero.tasks import prompt

    return prompt(spec.suite, spec.task, config.env.prompt_source)


def _max_steps(suite: str) -> int:
    if suite == "reach":
        return REACH_MAX_STEPS
    from vla_rl.sim.libero.tasks import max_steps

    return max_steps(suite)


def action_noise(config: CollectConfig, spec: EpisodeSpec) -> float:
    """Standard deviation of the noise in this episode, uniform in the recipe's range, from the spec alone."""
    return float(np.random.default_rng(noise_seed(spec, 0, "noise level")).uniform(*config.noise_std))


def noisy_expert(config: CollectConfig, spec: EpisodeSpec) -> Expert:
    """The scripted expert of an episode, with its mistakes. Raises UnsupportedGoal if there is none for its goal."""
    noise, seed = action_noise(config, spec), noise_seed(spec, 0, "expert")
    if spec.suite == "reach":
        from vla_rl.sim.reach_expert import ReachExpert

        return ReachExpert(spec, noise, seed, config.burst_rate, config.speed)
    from vla_rl.sim.experts.expert import ScriptedExpert
    from vla_rl.sim.libero.tasks import goal_of

    return ScriptedExpert(goal_of(spec), noise, seed, config.burst_rate)


def _require_expert(config: CollectConfig, spec: EpisodeSpec) -> None:
    from vla_rl.sim.experts.expert import UnsupportedGoal

    try:
        noisy_expert(config, spec)
    except UnsupportedGoal as error:
        raise ConfigError(f"tasks has {spec.task}, {spec.suite} task {spec.task}: {error}") from error


def provenance_of(config: CollectConfig, spec: EpisodeSpec) -> dict[str, Any]:
    """JSON values about who acted, and LIBERO's names of the task."""
    actor: dict[str, Any] = {"name": "operator"} if config.checkpoint is None else {"name": "policy", "checkpoint": config.checkpoint}
    if isinstance(config.operator, ReplayOperator):
        actor = {"name": "replay", "dataset": config.operator.dataset}
    elif not isinstance(config.operator, PageOperator):
        expert = {"noise_std": action_noise(config, spec), "burst_rate": config.burst_rate, "speed": config.speed}
        actor = {"name": "expert", **expert} if config.operator is None else {**actor, "scripted_operator": expert}
    return {"actor": actor, "task": {} if spec.suite == "reach" else _libero_names(spec.suite, spec.task)}


@cache
def _libero_names(suite: str, task: int) -> dict[str, str]:
    from vla_rl.sim.libero import packaging, tasks

    path = tasks.load_task(suite, task).bddl_path
    problem = packaging.bddl_parser().get_problem_info(str(path))["problem_name"]
    return {"problem": problem, "bddl_file": path.name}
