"""DAgger: the policy acts, an operator corrects it, and it learns from the corrections; in rounds.

Ross, Gordon and Bagnell, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning" (2011): the
dataset grows by what the operator does in states that the policy itself has reached. As in HG-DAgger (Kelly et al. 2019), the
operator takes over completely, and what the policy did before is no target.

Rounds are plain recipes, so that each resumes, is logged and can be run alone like any other:

    RUN_DIR/before           evaluation of the given policy
    RUN_DIR/round_1/collect  sft  eval        and so on
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vla_rl.collection.config import CollectConfig
from vla_rl.config import ConfigError
from vla_rl.eval.config import EvalConfig
from vla_rl.phases.sft import SftConfig

Recipe = CollectConfig | SftConfig | EvalConfig


@dataclass(frozen=True)
class DaggerConfig:
    """Rounds of correction, training and evaluation. The rounds fill in folders, seeds and checkpoints of the recipes below."""

    run_dir: str
    """Folder of all rounds."""
    collect: CollectConfig
    """One round's episodes: `checkpoint` is the policy of the first round, `operator` who corrects it. Each round takes the seeds
    after those of the round before, from `first_seed` on."""
    sft: SftConfig
    """One round's training. `data.paths` are the demonstrations that stay in the dataset; every round adds its episodes to them."""
    evaluation: EvalConfig
    """Evaluation before the first round and after each."""
    rounds: int = 2
    """How often; at least 1."""
    start_from: Literal["previous", "scratch"] = "previous"
    """Training of a round starts from the `previous` policy, or from random weights (`scratch`)."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; it must be at least 1")
        if self.collect.operator is None or self.collect.checkpoint is None:
            raise ConfigError(
                f"collect has operator {self.collect.operator} and checkpoint {self.collect.checkpoint}; it needs both: a policy, and "
                "{kind: page} or {kind: scripted} to correct it"
            )


def dagger_recipes(config: DaggerConfig) -> list[Recipe]:
    """The recipes of all rounds, in order: an evaluation, then collect, SFT and evaluation of every round."""
    policy = config.collect.checkpoint
    assert policy is not None, "DaggerConfig checks it"
    base = Path(config.run_dir)
    recipes: list[Recipe] = [_evaluation(config, base / "before", policy, "before")]
    paths = list(config.sft.data.paths)
    for number in range(1, config.rounds + 1):
        folder = base / f"round_{number}"
        first_seed = config.collect.first_seed + (number - 1) * config.collect.episodes_per_task
        collect = replace(config.collect, run_dir=str(folder / "collect"), checkpoint=policy, first_seed=first_seed)
        paths.append(collect.run_dir)
        start = policy if config.start_from == "previous" else None
        data = replace(config.sft.data, paths=tuple(paths))
        sft = replace(config.sft, run_dir=str(folder / "sft"), data=data, initial_policy=start)
        policy = str(folder / "sft" / "checkpoints" / "last" / "policy")
        recipes += [collect, sft, _evaluation(config, folder / "eval", policy, f"round {number}")]
    return recipes


def _evaluation(config: DaggerConfig, run_dir: Path, policy: str, condition: str) -> EvalConfig:
    choice = replace(config.evaluation.policy, checkpoint=policy)
    return replace(config.evaluation, run_dir=str(run_dir), policy=choice, condition=condition)
