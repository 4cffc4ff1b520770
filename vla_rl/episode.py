"""The data schema: what an actor sees, what it answers, what really happened.

Time runs in control steps (one action of the environment, 1/20 s). An `Observation` is always
*before* the action it belongs to; rewards and success are *after* it.

Shape legend, used here and wherever episodes are handled:
    H, W  image height and width (pixels)
    C     proposed actions of a chunk; E executed ones (E <= C)
    A     action dimensions (7);  S state dimensions (8)
    T     chunks of an episode;   N control steps of an episode
    D     numbers in a simulator state (1 + nq + nv);  R numbers in a robot state (16)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_rl.errors import UserError

UInt8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

VIEW_AGENT = "image"
"""The third-person camera (`agentview`); LeRobot's key is `observation.images.image`."""
VIEW_WRIST = "image2"
"""The wrist camera (`robot0_eye_in_hand`); LeRobot's key is `observation.images.image2`."""
VIEWS = (VIEW_AGENT, VIEW_WRIST)
STATE_DIM = 8
"""`state`: end effector position (m, 3), axis-angle (rad, 3), gripper joint positions (m, 2)."""
ACTION_DIM = 7
"""`actions`: OSC position delta (3) and rotation delta (3) in [-1, 1], gripper (-1 opens, +1 closes)."""
ROBOT_STATE_DIM = 16
"""`robot_states`: gripper qpos (2), eef position (3), eef quaternion xyzw (4), joint positions (7)."""

SPLITS: Mapping[str, range] = {
    "demonstrations": range(1_000_000),
    "train": range(1_000_000, 2_000_000),
    "validation": range(2_000_000, 3_000_000),
    "test": range(3_000_000, 4_000_000),
}
"""Disjoint ranges of `sampled:SEED`; `benchmark:K` (the published states) always belongs to `test`."""


class SpecError(UserError):
    """An episode specification that names nothing, or contradicts itself."""


@dataclass(frozen=True)
class StepProtocol:
    """How an episode starts and when it ends; part of an `EpisodeSpec`."""

    max_steps: int = 280
    """Control steps after settling at which the episode is truncated; at least 1."""
    settle_steps: int = 10
    """Control steps executed before the first observation, so that objects come to rest."""
    settle_action: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
    """The action of each settle step, environment units."""


@dataclass(frozen=True)
class EpisodeSpec:
    """Everything that determines a scene and its noise, wherever and whenever it runs."""

    suite: str
    """A LIBERO suite (`libero_object`, ...) or `reach`."""
    task: int
    """Index of the task in its suite."""
    init: str
    """`benchmark:K` (published state K) or `sampled:SEED` (LIBERO's own placement samplers and robot noise)."""
    split: str
    """One of `SPLITS`; a sampled seed must lie in the range of its split."""
    protocol: StepProtocol = field(default_factory=StepProtocol)
    """Time limit and settling."""
    sample: int = 0
    """Index of the policy noise only: the members of a GRPO group differ in nothing else."""
    goal: str = ""
    """A BDDL goal such as `(And (In milk_1 basket_1_contain_region))` in place of the task's own; empty for the task's."""
    prompt: str = ""
    """An instruction in place of the task's own; empty for the task's."""

    def __post_init__(self) -> None:
        kind, number = self.init_kind, self.init_number
        if self.split not in SPLITS:
            raise SpecError(f"split {self.split!r} is not one of {', '.join(SPLITS)}")
        if kind == "benchmark" and self.split != "test":
            raise SpecError(f"init {self.init!r} is a published test state, so split must be 'test', not {self.split!r}")
        if kind == "sampled" and number not in SPLITS[self.split]:
            span = SPLITS[self.split]
            raise SpecError(f"init {self.init!r} is outside the seeds of split {self.split!r} ({span.start} to {span.stop - 1})")

    @property
    def init_kind(self) -> str:
        """`benchmark` or `sampled`."""
        kind = self.init.partition(":")[0]
        if kind not in ("benchmark", "sampled"):
            raise SpecError(f"init {self.init!r} must be 'benchmark:K' or 'sampled:SEED'")
        return kind

    @property
    def init_number(self) -> int:
        """K of `benchmark:K`, SEED of `sampled:SEED`."""
        number = self.init.partition(":")[2]
        if not number.isdecimal():
            raise SpecError(f"init {self.init!r} must end in a whole number, as in 'benchmark:3' or 'sampled:1000017'")
        return int(number)

    @property
    def scene_seed(self) -> int:
        """The seed of everything that is sampled at reset (fixtures included): a 32-bit hash of suite, task and init.

        Published scripts seed once per environment, so that a scene depends on which ones came before; deriving
        the seed from the init is a declared deviation that makes a scene the same in any order and on any worker.
        """
        text = f"scene:{self.suite}:{self.task}:{self.init}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    @property
    def key(self) -> str:
        """A short readable name, unique among specs of one run."""
        parts = [self.suite, str(self.task), self.init, f"s{self.sample}"]
        if self.goal or self.prompt:
            parts.append(hashlib.sha256(f"{self.goal}|{self.prompt}".encode()).hexdigest()[:8])
        return "/".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the derived `scene_seed`."""
        return asdict(self) | {"scene_seed": self.scene_seed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpisodeSpec:
        """Inverse of `to_dict`. Raises SpecError if a recorded scene seed is not the derived one."""
        values = dict(values)
        recorded = values.pop("scene_seed", None)
        protocol = dict(values.pop("protocol"))
        protocol["settle_action"] = tuple(protocol["settle_action"])
        spec = cls(protocol=StepProtocol(**protocol), **values)
        if recorded is not None and recorded != spec.scene_seed:
            raise SpecError(f"{spec.key}: recorded scene_seed {recorded} is not the derived {spec.scene_seed}")
        return spec


def noise_seed(spec: EpisodeSpec, chunk_index: int, stream: str = "policy") -> int:
    """A 63-bit seed that depends on the spec, the chunk index and the stream's name, and on nothing else."""
    text = f"{stream}:{spec.key}:{chunk_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Observation:
    """What an actor sees before it acts."""

    images: Mapping[str, UInt8]
    """View name -> uint8[H, W, 3], RGB, in the orientation of the environment's conventions; empty if nobody looks."""
    state: Float32
    """float32[8], see `STATE_DIM`; shares the images' (lagged) substep."""
    prompt: str
    """The instruction."""
    privileged: Mapping[str, Float64] = field(default_factory=dict[str, Float64])
    """float64 simulator truth (object poses ...) for actors that declare they need it; processors of policies refuse it."""


@dataclass(frozen=True)
class FlowRecord:
    """What a learner needs to recompute the log-probability of a sampled chunk (normalised model space)."""

    x_t: Float32
    """float32[K, C, A']: the states of the stochastic denoise transitions (K = 1, or the whole chain); with the flow-matching likelihood
    the noise of each draw."""
    x_next: Float32
    """float32[K, C, A']: where each transition went, unclipped; with the flow-matching likelihood the actions, K times."""
    denoise_index: Int64
    """int64[K]: which denoise steps, or times of the flow-matching loss, these are."""
    log_prob_C: Float32
    """float32[C]: per action, summed over the real action dimensions."""


class Outcome(str, Enum):
    """How an episode ended. A crash is never a failure."""

    SUCCESS = "success"
    FAILURE = "failure"
    CRASH = "crash"
    DISCARDED = "discarded"


@dataclass(frozen=True)
class Verdict:
    """A person's word about an episode."""

    outcome: Outcome
    reason: str
    """As in `Episode.reason`."""


@dataclass(frozen=True)
class TokenRecord:
    """What a learner needs to recompute the log-probability of a chunk that a token policy wrote."""

    tokens: Int64
    """int64[T]: the reasoning's tokens, then the actions'."""
    mask: Bool
    """bool[T]: real tokens."""
    log_prob_C: Float32
    """float32[C]: per action, summed over its tokens; tokens of no single action count with the first."""
    well_formed: bool | None = None
    """Whether the reasoning has the right form; None for a policy that does not reason."""


@dataclass(frozen=True)
class ActionChunk:
    """What an actor proposes."""

    actions_CA: Float32
    """float32[C, 7], environment units."""
    labels_CA: Float32 | None = None
    """float32[C, 7]: the clean intention, where it differs from the action (a noisy expert)."""
    record: FlowRecord | TokenRecord | None = None
    """For learning."""
    value: float | None = None
    """The critic's estimate at this observation."""
    weights_version: int = 0
    """Version of the weights that acted."""
    finished: bool = False
    """The actor has nothing more to do: the loop ends the episode after this chunk (empty chunks allowed)."""
    verdict: Verdict | None = None
    """With `finished`: how a person says that the episode ended; none leaves it a failure (`actor finished`)."""
    intervention: bool = False
    """A person (or the scripted operator) chose these actions in place of the policy."""
    continues: bool = False
    """These actions are the rest of what the actor was doing: they are recorded as part of its previous chunk."""
    views: tuple[str, ...] | None = None
    """Views of the observation after this chunk, in place of the env's `Look.views`: a person looks elsewhere. An empty
    chunk with views asks for nothing but a fresh observation, and leaves no trace in the episode."""


@dataclass
class ChunkStep:
    """One chunk as it really happened."""

    observation: Observation
    """Before the chunk's first action."""
    proposed: ActionChunk
    executed_EA: Float32
    """float32[E, 7]: what the environment executed."""
    labels_EA: Float32
    """float32[E, 7]: the clean intention; equal to `executed_EA` where the actor gave none."""
    reward_E: Float32
    """float32[E]: after each action; 1 where the goal holds."""
    intervention_E: Bool
    """bool[E]: a person acted."""
    success: bool
    """The goal held after the last executed action."""
    terminated: bool
    """The episode ended by success."""
    truncated: bool
    """The episode ended by the time limit: a value bootstraps across it."""
    timing: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by part: `physics`, `render`, `wait`, ..."""
    frames: Mapping[int, Observation] = field(default_factory=dict[int, Observation])
    """Control step t -> observation before action t, for the steps a recorder asked for."""
    sim_states_ED: Float64 | None = None
    """float64[E, D] before each action: `[time, qpos, qvel]`, not lagged; only when recording."""
    robot_states_ER: Float64 | None = None
    """float64[E, 16] before each action, see `ROBOT_STATE_DIM`; only when recording."""


@dataclass
class Episode:
    """One episode, with everything to replay it bit for bit."""

    spec: EpisodeSpec
    steps: list[ChunkStep]
    final_observation: Observation | None
    """After the last action; with images on truncation, so that its value exists."""
    outcome: Outcome
    reason: str = ""
    """Why it ended: `predicate`, `time limit`, `actor finished`, `operator`, or the fault's text."""
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Versions, conventions, renderer, packaging, fixture poses: see `sim` and `telemetry`."""
    wall_s: float = 0.0
    """Wall time from reset to end (s)."""

    @property
    def success(self) -> bool:
        """Whether the goal was reached at any control step (success ends an episode, so it is sticky)."""
        return self.outcome is Outcome.SUCCESS

    @property
    def num_steps(self) -> int:
        """Executed control steps."""
        return sum(len(step.executed_EA) for step in self.steps)

    def actions_NA(self) -> Float32:
        """float32[N, 7]: all executed actions."""
        return _concatenate([step.executed_EA for step in self.steps], ACTION_DIM)

    def labels_NA(self) -> Float32:
        """float32[N, 7]: all clean intentions."""
        return _concatenate([step.labels_EA for step in self.steps], ACTION_DIM)

    def frames(self) -> dict[int, Observation]:
        """All recorded observations by control step."""
        return {t: frame for step in self.steps for t, frame in step.frames.items()}


def _concatenate(parts: Sequence[Float32], width: int) -> Float32:
    return np.concatenate(parts) if parts else np.zeros((0, width), np.float32)
