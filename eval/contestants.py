"""Who is evaluated: from a recipe to an actor, with the digest of what acted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from vla_rl.actors import Actor, Expert, no_op_actor, random_actor, replay_actor, scripted_actor
from vla_rl.config import ConfigError
from vla_rl.episode import EpisodeSpec, Float32, noise_seed
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.telemetry.files import folder_digest


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
    return _local_policy(config) if config.policy.remote is None else _remote_policy(config, config.policy.remote)


def _local_policy(config: EvalConfig) -> Contestant:
    from vla_rl.engine.world import device_kind
    from vla_rl.policies.accelerate import accelerate
    from vla_rl.policies.checkpoint import load_acting_policy
    from vla_rl.policy_actor import PolicyActor

    asked = config.policy
    assert asked.checkpoint is not None, "EvalConfig checks it"
    device = device_kind(asked.device, "policy.device")
    policy = accelerate(load_acting_policy(asked.checkpoint, device), asked.precision, asked.compile)
    _require_horizon(asked, policy.spec.chunk_length)
    notes = _horizon_notes(asked.executed_horizon, policy.spec.executed_horizon)
    if asked.precision != "fp32":
        notes += (f"the policy computes in {asked.precision}",)
    if asked.executed_horizon is not None:
        policy.spec = replace(policy.spec, executed_horizon=asked.executed_horizon)
    actor = PolicyActor(policy, batch_size=config.pool.workers, name=asked.checkpoint, device=device)
    return Contestant(actor, _digest(asked.checkpoint), policy.spec.executed_horizon, notes)


def _remote_policy(config: EvalConfig, url: str) -> Contestant:
    from vla_rl.remote_actor import RemoteActor

    actor = RemoteActor(url, config.pool.workers, config.policy.timeout_s, config.policy.executed_horizon)
    if actor.served is None:
        return Contestant(actor, f"remote {url}", actor.executed_horizon, (f"{url} does not say which weights act",))
    notes = _horizon_notes(config.policy.executed_horizon, actor.served.spec.executed_horizon)
    return Contestant(actor, actor.served.weights, actor.executed_horizon, notes)


def _require_horizon(asked: EvaluatedPolicy, chunk_length: int) -> None:
    if asked.executed_horizon is not None and asked.executed_horizon > chunk_length:
        raise ConfigError(
            f"policy.executed_horizon is {asked.executed_horizon}; a chunk of {asked.checkpoint} has {chunk_length} actions, "
            "ask for at most that"
        )


def _horizon_notes(asked: int | None, made_for: int) -> tuple[str, ...]:
    """What a reader of the result should know about the horizon."""
    if asked in (None, made_for):
        return ()
    return (f"executed_horizon is {asked}, but the policy was made for {made_for}: success may fall by many points",)


def known_weights(config: EvalConfig) -> str | None:
    """The digest of the recipe's checkpoint, empty for actors without weights; None where only a server can say."""
    if config.policy.remote is not None:
        return None
    return "" if config.policy.checkpoint is None else _digest(config.policy.checkpoint)


def _digest(checkpoint: str) -> str:
    from vla_rl.policies.published import resolve_folder

    return folder_digest(resolve_folder(checkpoint))


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
