"""A fake env pool whose envs answer in a shuffled order, for everything about evaluation that needs no simulator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from vla_rl.conventions import Conventions
from vla_rl.episode import (
    ROBOT_STATE_DIM,
    STATE_DIM,
    VIEWS,
    ActionChunk,
    ChunkStep,
    Episode,
    EpisodeSpec,
    Observation,
    Outcome,
    StepProtocol,
)
from vla_rl.sim.base import ChunkReply, EnvFault, EnvReply, EnvSpec, Look, ResetReply

FAKE_SPEC = EnvSpec("libero", Conventions(), VIEWS, 16, {"mujoco": "3.3.2", "renderer": "none"})


def number_of(text: str, below: int) -> int:
    """A fixed pseudo-random number of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % below


def observation_of(spec: EpisodeSpec, step: int, views: Iterable[str] = VIEWS) -> Observation:
    """Pictures whose grey level is the step."""
    images = {view: np.full((16, 16, 3), step % 256, np.uint8) for view in views}
    return Observation(images, np.zeros(STATE_DIM, np.float32), spec.prompt or f"task {spec.task}")


@dataclass
class FakeEpisode:
    """An episode of `length` steps that succeeds or runs into its limit."""

    spec: EpisodeSpec
    look: Look
    step: int = 0

    @property
    def length(self) -> int:
        """Steps until success or the limit; depends on the spec alone."""
        return self.spec.protocol.max_steps if self.fails else 3 + number_of(self.spec.key, 40)

    @property
    def fails(self) -> bool:
        """One spec in four fails."""
        return number_of("fails" + self.spec.key, 4) == 0

    def advance(self, env: int, actions_CA: np.ndarray) -> ChunkReply:
        """Execute a chunk, up to the end of the episode."""
        executed = actions_CA[: self.length - self.step]
        wanted = [t for t in range(self.step, self.step + len(executed)) if self.look.record_every and t % self.look.record_every == 0]
        frames = {t: observation_of(self.spec, t) for t in wanted}
        self.step += len(executed)
        ended = self.step >= self.length
        reward_E = np.zeros(len(executed), np.float32)
        reward_E[-1] = ended and not self.fails
        return ChunkReply(
            env=env,
            observation=observation_of(self.spec, self.step, self.look.views),
            executed_EA=executed,
            reward_E=reward_E,
            success=ended and not self.fails,
            terminated=ended and not self.fails,
            truncated=ended and self.fails,
            frames=frames,
        )


@dataclass
class FakePool:
    """An `EnvPool` that answers pending requests one at a time, in an order drawn from `seed`."""

    num_envs: int
    seed: int = 0
    crashes: dict[str, int] = field(default_factory=dict)
    """`EpisodeSpec.key` -> how many more of its resets end in a fault."""
    spec: EnvSpec = FAKE_SPEC
    started: list[str] = field(default_factory=list)
    """Keys of all resets, in order."""

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)
        self._episodes: dict[int, FakeEpisode] = {}
        self._pending: list[Callable[[], EnvReply]] = []
        self.closed = 0

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        self.started.append(spec.key)
        self._pending.append(lambda: self._reset(env, spec, look))

    def _reset(self, env: int, spec: EpisodeSpec, look: Look) -> EnvReply:
        if self.crashes.get(spec.key, 0) > 0:
            self.crashes[spec.key] -= 1
            return EnvFault(env, spec, "raised", "GLError: no context left")
        self._episodes[env] = FakeEpisode(spec, look)
        provenance = {"initial_state_sha256": hashlib.sha256(spec.key.encode()).hexdigest()}
        return ResetReply(env, spec, observation_of(spec, 0, look.views), provenance)

    def step(self, env: int, chunk: ActionChunk) -> None:
        self._pending.append(lambda: self._episodes[env].advance(env, chunk.actions_CA))

    def ready(self, timeout_s: float) -> list[EnvReply]:
        if not self._pending:
            return []
        return [self._pending.pop(int(self._generator.integers(len(self._pending))))()]

    def waitables(self) -> list[Any]:
        return []

    def preempt(self, env: int) -> None:
        raise AssertionError("nobody preempts an evaluation")

    def close(self) -> None:
        self.closed += 1


def finished_episode(
    spec: EpisodeSpec, outcome: Outcome = Outcome.SUCCESS, record_every: int = 2, provenance: Mapping[str, Any] | None = None
) -> Episode:
    """An episode of one chunk of 8, with frames."""
    frames = {t: observation_of(spec, t) for t in range(0, 8, record_every)}
    actions = np.zeros((8, 7), np.float32)
    step = ChunkStep(
        observation=observation_of(spec, 0),
        proposed=ActionChunk(actions),
        executed_EA=actions,
        labels_EA=actions,
        reward_E=np.zeros(8, np.float32),
        intervention_E=np.zeros(8, bool),
        success=outcome is Outcome.SUCCESS,
        terminated=outcome is Outcome.SUCCESS,
        truncated=outcome is Outcome.FAILURE,
        frames=frames,
        robot_states_ER=np.zeros((8, ROBOT_STATE_DIM)),
    )
    return Episode(spec, [step], observation_of(spec, 8), outcome, provenance=provenance or {}, wall_s=1.5)


def spec_of(init: int = 0, task: int = 0, **more: Any) -> EpisodeSpec:
    """A published state of libero_object."""
    values = {"protocol": StepProtocol(max_steps=60)} | more
    return EpisodeSpec("libero_object", task, f"benchmark:{init}", "test", **values)


@dataclass(frozen=True)
class Fakes:
    """What the tests of this folder build on."""

    Pool: type[FakePool] = FakePool
    spec: Callable[..., EpisodeSpec] = spec_of
    episode: Callable[..., Episode] = finished_episode
    observation: Callable[..., Observation] = observation_of


@pytest.fixture(scope="session")
def fakes() -> Fakes:
    """Fake pool, specs and episodes."""
    return Fakes()
