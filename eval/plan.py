"""Which episodes an evaluation consists of: every (task, init) exactly once, under each of its conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vla_rl.config import ConfigError
from vla_rl.episode import EpisodeSpec
from vla_rl.eval.config import EvalConfig
from vla_rl.eval.protocol import EvalProtocol, build_specs, init_names
from vla_rl.sim.reach_layout import COLOURS, sample_layout, task_prompt

BLANK_PROMPT = " "
"""An instruction without words (`EpisodeSpec.prompt` reads an empty one as "the task's own")."""


@dataclass(frozen=True)
class Planned:
    """One episode to run."""

    spec: EpisodeSpec
    condition: str
    """Label of its row."""

    @property
    def pairing(self) -> tuple[str, str]:
        """What identifies it inside the run, as in `EpisodeRow.pairing`."""
        return self.condition, self.spec.key


def plan_episodes(config: EvalConfig, protocol: EvalProtocol, recorded: Sequence[EpisodeSpec] = ()) -> list[Planned]:
    """The episodes of a recipe in the order in which they start; `recorded` are those of the dataset for actor `replay`.

    Raises ProtocolError, SpecError or ConfigError for tasks, inits or prompts that do not exist.
    """
    if config.actor == "replay":
        return [Planned(spec, config.label) for spec in _recorded(config, recorded)]
    inits = init_names(protocol, config.episodes_per_task or protocol.inits_per_task, config.split)
    specs = build_specs(protocol, config.suite, task_indices(config), inits, split=config.split, sample=config.seed)
    if config.prompt == "blank":
        specs = [replace(spec, prompt=BLANK_PROMPT) for spec in specs]
    if config.prompt == "swap":
        return [planned for spec in specs for planned in _swapped(spec, config.label)]
    return [Planned(spec, config.label) for spec in specs]


def task_indices(config: EvalConfig) -> Sequence[int]:
    """The tasks of a recipe. Raises SpecError for a suite or task that does not exist."""
    if config.suite == "reach":
        beyond = [task for task in config.tasks if task not in range(len(COLOURS))]
        if beyond:
            raise ConfigError(f"tasks has {beyond}; suite 'reach' has tasks 0 to {len(COLOURS) - 1}")
        return config.tasks or range(len(COLOURS))
    from vla_rl.sim.libero.tasks import load_task, num_tasks

    for task in config.tasks:
        load_task(config.suite, task)
    return config.tasks or range(num_tasks(config.suite))


def _recorded(config: EvalConfig, recorded: Sequence[EpisodeSpec]) -> list[EpisodeSpec]:
    """The dataset's episodes that the recipe asks for, at most `episodes_per_task` of each task.

    Raises ConfigError where there are none, or two of one scene.
    """
    wanted = [spec for spec in recorded if spec.suite == config.suite and (not config.tasks or spec.task in config.tasks)]
    if not wanted:
        suites = ", ".join(sorted({f"{spec.suite} task {spec.task}" for spec in recorded})) or "no successful episode"
        asked = f"suite {config.suite!r}, tasks {list(config.tasks) or 'all'}"
        raise ConfigError(f"dataset {config.dataset} has nothing of {asked}; it holds {suites}")
    kept: list[EpisodeSpec] = []
    for spec in wanted:
        if config.episodes_per_task is None or sum(other.task == spec.task for other in kept) < config.episodes_per_task:
            kept.append(spec)
    twice = sorted(key for key, count in Counter(spec.key for spec in kept).items() if count > 1)
    if twice:
        raise ConfigError(
            f"dataset {config.dataset} holds the scene {twice[0]} more than once ({len(twice)} such scenes), and a scene is evaluated once;"
            " leave the others out with vla-rl data filter --without-numbers (vla-rl data inspect lists them)"
        )
    return kept


def _swapped(spec: EpisodeSpec, label: str) -> list[Planned]:
    """The same scene with the instruction of another task that it can host, once for each of the two goals.

    Success ends an episode, so whether the *original* goal is reached under the other instruction needs its own episode.
    Which other task is named goes round with the init's number.
    """
    from vla_rl.sim.libero.other_goals import other_goals

    others = _other_blocks(spec) if spec.suite == "reach" else other_goals(spec.suite, spec.task)
    prompt, goal = others[spec.init_number % len(others)]
    named = replace(spec, prompt=prompt, goal=goal)
    original = replace(spec, prompt=prompt)
    return [Planned(named, f"{label}: named object"), Planned(original, f"{label}: original object")]


def _other_blocks(spec: EpisodeSpec) -> list[tuple[str, str]]:
    """(instruction, goal) of the other blocks that stand on the table of a Reach scene."""
    others = [colour for colour in sample_layout(spec).blocks if colour != COLOURS[spec.task]]
    return [(task_prompt(COLOURS.index(colour)), f"(Reach {colour}_block)") for colour in others]
