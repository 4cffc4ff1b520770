"""Who is evaluated: from a recipe to an actor, with the digest of what acted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vla_rl.actors import Actor, Expert, no_op_actor, random_actor, replay_actor, scripted_actor
from vla_rl.config import ConfigError
from vla_rl.episode import EpisodeSpec, Float32, noise_seed
from vla_rl.eval.config import EvalConfig


@dataclass(frozen=True)
class Contestant:
    """An actor and what identifies it."""

    actor: Actor
    weights: str
    """Digest of its weights; empty for actors without any."""
    executed_horizon: int | None
    """Actions executed before it looks again; None where the protocol's horizon means nothing (controls)."""
    notes: tuple[str, ...] = ()
    """What a reader of the result should know, such as a horizon that the policy was not made for."""


def make_contestant(config: EvalConfig, recorded: Mapping[str, Float32]) -> Contestant:
    """The actor of a recipe; `recorded` are the actions by `EpisodeSpec.key` for actor `replay`.

    Raises the checkpoint's own errors for a missing or damaged one.
    """
    if config.actor == "policy":
        return _policy(config)
    controls: dict[str, Callable[[], Actor]] = {
        "noop": no_op_actor,
        "random": random_actor,
        "expert": lambda: scripted_actor(noise_free_expert),
        "replay": lambda: replay_actor(recorded),
    }
    return Contestant(controls[config.actor](), weights="", executed_horizon=None)


def _policy(config: EvalConfig) -> Contestant:
    from vla_rl.engine.world import device_kind
    from vla_rl.policies.checkpoint import load_policy
    from vla_rl.policy_actor import PolicyActor

    assert config.checkpoint is not None, "EvalConfig checks it"
    device = device_kind(config.device, "device")
    policy = load_policy(config.checkpoint, device=device)
    notes = ()
    made_for = policy.spec.executed_horizon
    if config.executed_horizon not in (None, made_for):
        notes = (f"executed_horizon is {config.executed_horizon}, but the policy was made for {made_for}: success may fall by many points",)
        policy.spec = replace(policy.spec, executed_horizon=config.executed_horizon)
    policy.eval()
    actor = PolicyActor(policy, batch_size=config.pool.workers, name=config.checkpoint, device=device)
    return Contestant(actor, weights_of(config), policy.spec.executed_horizon, notes)


def weights_of(config: EvalConfig) -> str:
    """The digest of the recipe's checkpoint; empty for actors without weights."""
    return "" if config.checkpoint is None else folder_digest(Path(config.checkpoint))


def folder_digest(folder: Path) -> str:
    """The first 16 hex digits of the sha256 of a checkpoint's files: weights, sizes, statistics and tokenizer, and their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def noise_free_expert(spec: EpisodeSpec) -> Expert:
    """The scripted expert of an episode, without action noise. Raises ConfigError if there is none for its goal."""
    if spec.suite == "reach":
        from vla_rl.sim.reach_expert import ReachExpert

        return ReachExpert(spec, noise=0.0, seed=0)
    from vla_rl.sim.experts.expert import UnsupportedGoal, make_expert
    from vla_rl.sim.libero.tasks import goal_of

    try:
        return make_expert(spec, goal_of(spec), noise=0.0, seed=noise_seed(spec, 0, "expert"))
    except UnsupportedGoal as error:
        raise ConfigError(f"actor 'expert' cannot act in {spec.suite} task {spec.task}: {error}; leave the task out of `tasks`") from error


def require_experts(specs: Iterable[EpisodeSpec]) -> None:
    """Raise ConfigError for the first task whose goal no scripted expert can reach, before anything runs."""
    for spec in {(spec.suite, spec.task, spec.goal): spec for spec in specs}.values():
        noise_free_expert(spec)
