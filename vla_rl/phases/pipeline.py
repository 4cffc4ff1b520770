"""`vla-rl run`: a list of phases in order, each resumable, then one report over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from vla_rl.collection import collect
from vla_rl.collection.collect import CollectConfig, run_collect
from vla_rl.collection.operators import ReplayOperator
from vla_rl.collection.plan import plan_demonstrations
from vla_rl.config import ConfigError, build, to_plain
from vla_rl.engine.world import device_kind
from vla_rl.eval.config import EvalConfig
from vla_rl.eval.plan import plan_episodes
from vla_rl.eval.protocol import get_protocol
from vla_rl.eval.report import write_report
from vla_rl.eval.runner import run_eval
from vla_rl.phases import rl, sft
from vla_rl.phases.dagger import DaggerConfig, dagger_recipes
from vla_rl.phases.evaluation import check_evaluation
from vla_rl.phases.rl import run_rl
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_specs import training_scenes
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.telemetry.run_directory import RunDirectory, require_same_recipe

PLACEHOLDER = "{run_dir}"
"""Replaced by the pipeline's `run_dir` in every text value of its phases, so that one key moves the whole run."""


@dataclass(frozen=True)
class CollectPhase:
    """Record demonstrations."""

    command: Literal["collect"]
    """What this phase runs."""
    recipe: CollectConfig
    """Its recipe."""


@dataclass(frozen=True)
class SftPhase:
    """Supervised fine-tuning."""

    command: Literal["sft"]
    """What this phase runs."""
    recipe: SftConfig
    """Its recipe."""


@dataclass(frozen=True)
class RlPhase:
    """Reinforcement learning."""

    command: Literal["rl"]
    """What this phase runs."""
    recipe: RlConfig
    """Its recipe."""


@dataclass(frozen=True)
class EvalPhase:
    """An evaluation."""

    command: Literal["eval"]
    """What this phase runs."""
    recipe: EvalConfig
    """Its recipe."""


@dataclass(frozen=True)
class DaggerPhase:
    """Rounds of correcting the policy, training on the corrections, and evaluation."""

    command: Literal["dagger"]
    """What this phase runs."""
    recipe: DaggerConfig
    """Its recipe."""


Phase = CollectPhase | SftPhase | RlPhase | EvalPhase | DaggerPhase
Recipe = CollectConfig | SftConfig | RlConfig | EvalConfig
COMMANDS: Mapping[type, str] = {CollectConfig: "collect", SftConfig: "sft", RlConfig: "rl", EvalConfig: "eval"}
"""For messages."""


@dataclass(frozen=True)
class PipelineConfig:
    """The recipe of `vla-rl run`."""

    run_dir: str
    """Folder of the whole run; `{run_dir}` in the phases' text values stands for it."""
    phases: Annotated[tuple[Phase, ...], tyro.conf.Fixed]
    """What runs, in order; set in the recipe file only."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise ConfigError("phases is empty; give at least one, such as {command: eval, recipe: {...}}")
        folders = [str(Path(_filled(phase.recipe.run_dir, str(Path(self.run_dir))))) for phase in self.phases]
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        if twice:
            raise ConfigError(f"two phases share the run_dir {', '.join(twice)}; give each its own")
        if str(Path(self.run_dir)) in folders:
            raise ConfigError(
                f"a phase has the run_dir of the whole pipeline, {self.run_dir}; give it a folder in it, such as {PLACEHOLDER}/sft"
            )


def run_pipeline(config: PipelineConfig) -> int:
    """Run every phase in order and write the report; stops at the first phase whose exit status is not 0 and returns it.

    Each phase resumes in its own run directory, so starting the pipeline again goes on where it stopped. What may change in a recipe
    meanwhile is what its command lets change.
    """
    console = Console(stderr=True)
    recipes = [recipe for phase in config.phases for recipe in _recipes(_in_run_dir(phase.recipe, config.run_dir))]
    for recipe in recipes:
        check_phase(recipe)
    phase_recipes = [f"phases[{number}].recipe" for number in range(len(config.phases))]  # checked one by one
    with RunDirectory.open(config.run_dir, config, phase_recipes) as run:
        for number, recipe in enumerate(recipes, start=1):
            console.rule(f"[{number}/{len(recipes)}] {COMMANDS[type(recipe)]}: {recipe.run_dir}", align="left")
            status = _run_phase(recipe)
            if status:
                console.print(f"{COMMANDS[type(recipe)]} ended with status {status}; start the same command again to go on.")
                return status
        console.print(f"Report: {write_report(run.path)}")
    return 0


def _recipes(recipe: Recipe | DaggerConfig) -> Sequence[Recipe]:
    """What a phase consists of."""
    return dagger_recipes(recipe) if isinstance(recipe, DaggerConfig) else [recipe]


def check_phase(recipe: Recipe) -> None:
    """Find what can be found before anything runs, so that a misspelt task of the last phase does not cost the first ones.

    Raises SpecError, ProtocolError or ConfigError for suites, tasks, protocols, goals and devices that do not exist, and for a phase that
    has already run with another recipe.
    """
    require_same_recipe(Path(recipe.run_dir), recipe, _free_to_change(recipe))
    if isinstance(recipe, CollectConfig):
        if not isinstance(recipe.operator, ReplayOperator):  # what it replays may be recorded by an earlier phase
            plan_demonstrations(recipe)
    elif isinstance(recipe, RlConfig):
        training_scenes(recipe)
        check_evaluation(recipe.evaluation, recipe.env.resolution)
    elif isinstance(recipe, SftConfig):
        device_kind(recipe.engine.device, "engine.device")
        check_evaluation(recipe.evaluation, None)  # the size of pictures is the data's, which an earlier phase may record
    elif recipe.actor != "replay":  # what it replays may be recorded by an earlier phase
        plan_episodes(recipe, get_protocol(recipe.protocol))


def _free_to_change(recipe: Recipe) -> Sequence[str]:
    """The key paths that the phase's own command lets change when it goes on."""
    if isinstance(recipe, CollectConfig):
        return collect.free_to_change(recipe)
    if isinstance(recipe, SftConfig):
        return sft.free_to_change(recipe)
    return rl.FREE_TO_CHANGE if isinstance(recipe, RlConfig) else ()


def _run_phase(recipe: Recipe) -> int:
    if isinstance(recipe, CollectConfig):
        return run_collect(recipe)
    if isinstance(recipe, RlConfig):
        return run_rl(recipe)
    return run_sft(recipe) if isinstance(recipe, SftConfig) else run_eval(recipe)


def _in_run_dir[T](recipe: T, run_dir: str) -> T:
    """The recipe with `{run_dir}` filled in."""
    return build(type(recipe), _filled(to_plain(recipe), str(Path(run_dir))))


def _filled(value: Any, run_dir: str) -> Any:
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, run_dir)
    if isinstance(value, Mapping):
        return {key: _filled(item, run_dir) for key, item in value.items()}
    return [_filled(item, run_dir) for item in value] if isinstance(value, list) else value
