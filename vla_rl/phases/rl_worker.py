"""The rollout worker: a policy replica together with its env pool, so that pictures stay on its machine until an episode is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vla_rl.algorithms.rewards import episode_rewards
from vla_rl.cluster.backend import Parcel, Sealed
from vla_rl.engine.world import device_kind
from vla_rl.episode import Episode, EpisodeSpec, Float32
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_heads import load_initial, with_heads
from vla_rl.phases.rl_rollout import without_arrays
from vla_rl.policies.accelerate import BFloat16Policy
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.tokens.engines import open_engine
from vla_rl.policies.tokens.policy import TokenPolicy
from vla_rl.policy_actor import PolicyActor
from vla_rl.rollout import look_of, run_episodes
from vla_rl.sim.pool import MakeEnv, make_pool
from vla_rl.telemetry.spans import span
from vla_rl.weights.transport import Receiver, open_receiver


@dataclass(frozen=True)
class Work:
    """What a worker's policy did in one rollout."""

    final_values: dict[str, float]
    """`EpisodeSpec.key` -> the critic's value of the final observation."""
    forwards: int
    """Batches of the policy."""
    busy_s: float
    """Seconds spent on them."""
    vllm_starts: int
    """vLLM processes that it has had so far; 0 without."""


class DealtSpecs:
    """A `SpecSource` that holds what the driver has dealt out and this worker has not begun."""

    def __init__(self) -> None:
        self._queue: deque[EpisodeSpec] = deque()

    def deal(self, specs: Sequence[EpisodeSpec]) -> None:
        """Put specs at the end."""
        self._queue += specs

    def next(self) -> EpisodeSpec | None:
        """See `SpecSource.next`."""
        return self._queue.popleft() if self._queue else None

    def report(self, episode: Episode) -> None:
        """Nothing here depends on how an episode ended; the driver does."""


class RolloutWorker:
    """Runs the episodes that it is dealt, with the weights that it pulled last."""

    def __init__(self, config: RlConfig, index: int, make_env: MakeEnv) -> None:
        self._config, self._index = config, index
        device = device_kind(config.engine.device, "engine.device")
        self.policy: PolicyModule = with_heads(config, load_initial(config)).to(device)
        acting = BFloat16Policy(self.policy) if config.rollout_precision == "bf16" else self.policy
        engine = config.vllm or config.sglang
        self._engine = None if engine is None else open_engine(self.policy, engine, config.rollout_rows)
        self._pool = make_pool(config.pool, config.env, make_env)
        self._acting: BFloat16Policy | PolicyModule = acting
        self._actor = PolicyActor(acting, config.rollout_rows, config.initial_policy, 0, device, config.exploration)
        self._look = look_of(self._actor.needs, privileged=config.algorithm.reward.privileged)
        self._specs = DealtSpecs()
        self._episodes: Iterator[Episode] = iter(())
        self._receiver: Receiver | None = None
        self._verified = False
        self._forwards, self._busy_s = 0, 0.0

    def connect(self, address: Any) -> None:
        """Join the weight sync at `address`; `begin` pulls from there."""
        acted_with = self._receiver.version if self._receiver is not None else None
        self._receiver = open_receiver(address, self.policy, self._index, acted_with)

    def receive(self) -> None:
        """Take part in a push that needs its receivers; the policy goes on acting with what it has."""
        assert self._receiver is not None, "connected first"
        self._receiver.receive()

    def begin(self) -> int:
        """A rollout begins: pull the newest weights; returns their version. The first ones are compared by digest."""
        assert self._receiver is not None, "connected first"
        with span("weight_sync"):
            self._actor.weights_version = self._receiver.pull(self.policy, verify=not self._verified)
            self._verified = True
            if self._engine is not None and isinstance(self.policy, TokenPolicy) and self._engine.version < self._actor.weights_version:
                self._engine.load(self.policy.model.language, self._actor.weights_version)
        self._forwards, self._busy_s = self._actor.forwards, self._actor.busy_s
        return self._actor.weights_version

    def advance(self, specs: Sequence[EpisodeSpec]) -> Sealed:
        """Queue `specs`, run until an episode ends, and return `Sealed((episode without arrays, its rewards), episode)`.

        Raises IndexError where nothing is left to run.
        """
        self._specs.deal(specs)
        episode = next(self._episodes, None)
        if episode is None:  # all envs had ended; start again with what was dealt since
            self._episodes = run_episodes(self._pool, self._actor, self._specs, lambda spec: self._look)
            episode = next(self._episodes, None)
        if episode is None:
            raise IndexError(f"worker {self._index} was asked for an episode, and none is dealt")
        with span("rewards"):
            earned: list[Float32] = episode_rewards(episode, self._config.algorithm.reward)
        return Sealed((without_arrays(episode, self._pool.spec.provenance.get("renderer")), earned), episode)

    def finish(self, unfinished: Sequence[Parcel]) -> Work:
        """The rollout is over: the critic's value after the last action of each of these episodes, and what the policy did."""
        forwards, busy_s = self._actor.forwards - self._forwards, self._actor.busy_s - self._busy_s
        values: dict[str, float] = {}
        if unfinished:
            with span("final_values"):
                values = final_values(self._acting, [parcel.fetch() for parcel in unfinished], self._config.rollout_rows)
        return Work(values, forwards, busy_s, 0 if self._engine is None else self._engine.starts)

    def close(self) -> None:
        """End the policy's thread, the envs and the engine that writes for it."""
        self._actor.close()
        self._pool.close()
        if self._engine is not None:
            self._engine.close()
        if self._receiver is not None:
            self._receiver.close()


def final_values(policy: BFloat16Policy | PolicyModule, ended: Sequence[Episode], rows: int) -> dict[str, float]:
    """The critic's value after the last action of each episode, in batches of the rollout's shape."""
    values: dict[str, float] = {}
    for start in range(0, len(ended), rows):
        part = ended[start : start + rows]
        observations = [episode.final_observation for episode in part]
        padded = [replace(observation, privileged={}) for observation in observations if observation is not None]
        if len(padded) < len(part):
            raise ValueError(f"{part[0].spec.key} and others ended without a final observation, so the value to bootstrap from is missing")
        padded += [padded[0]] * (rows - len(padded))
        with torch.no_grad():
            value_B = policy.value(policy.preprocess(padded))
        values |= {episode.spec.key: float(value) for episode, value in zip(part, value_B)}
    return values
