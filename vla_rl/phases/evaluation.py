"""Success rates in simulation during training: a small evaluation of each checkpoint on seeds that nothing trains or tests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.config import ConfigError
from vla_rl.errors import UserError
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.eval.plan import plan_episodes
from vla_rl.eval.protocol import get_protocol
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig

PROTOCOL = "sampled"
"""Of evaluations during training."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Periodic evaluation; off unless `every` is above 0."""

    every: int = 0
    """Updates between two evaluations, a multiple of the checkpoint interval; 0: none."""
    suite: str = "libero_object"
    """A LIBERO suite, or `reach`."""
    tasks: tuple[int, ...] = ()
    """Indices of the tasks; empty: all tasks of the suite."""
    episodes_per_task: int = 10
    """Episodes of each task, on sampled scenes of the validation split; at least 1."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The simulator."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """How many of them, and their deadlines."""

    def __post_init__(self) -> None:
        for name, minimum in (("every", 0), ("episodes_per_task", 1)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")


def check_evaluation(config: EvaluationConfig, resolution: int | None) -> None:
    """Find before anything is trained what would end the first evaluation. `resolution` is the policy's, in pixels; None: not known yet.

    Raises ConfigError for suites, tasks and numbers of episodes that do not exist, and for pictures of another size.
    """
    if config.every == 0:
        return
    try:
        plan_episodes(_recipe(config, Path("policy"), Path("evaluation")), get_protocol(PROTOCOL))
    except UserError as error:
        raise ConfigError(f"evaluation: {error}") from error
    if resolution is not None and config.env.resolution != resolution:
        raise ConfigError(
            f"evaluation.env.resolution is {config.env.resolution}, and the policy's pictures have {resolution} px; set it to {resolution}"
        )


def evaluate_checkpoint(config: EvaluationConfig, policy: Path, run_dir: Path) -> dict[str, float]:
    """`success_rate` (tasks weighted equally) and `crashes` of the policy in a folder; rows and summary go to `run_dir`."""
    from vla_rl.eval.runner import evaluate

    summary = evaluate(_recipe(config, policy, run_dir))
    return {"success_rate": summary.rate, "crashes": float(summary.crashes), "missing_episodes": float(len(summary.missing))}


def _recipe(config: EvaluationConfig, policy: Path, run_dir: Path) -> EvalConfig:
    return EvalConfig(
        run_dir=str(run_dir),
        suite=config.suite,
        tasks=config.tasks,
        protocol=PROTOCOL,
        split="validation",
        episodes_per_task=config.episodes_per_task,
        policy=EvaluatedPolicy(checkpoint=str(policy)),
        videos=0,
        env=config.env,
        pool=config.pool,
        show_progress=False,
    )
