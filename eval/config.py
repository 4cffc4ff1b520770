"""The recipe of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_rl.config import ConfigError
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig


@dataclass(frozen=True)
class EvaluatedPolicy:
    """Which policy acts, and how it computes; for actor `policy`."""

    checkpoint: str | None = None
    """Folder of a policy: ours, LeRobot's, or openpi's PyTorch form; or its name on the Hugging Face hub (`owner/model`)."""
    remote: str | None = None
    """A policy server in place of a folder: `ws://HOST:PORT` (openpi's protocol) or `tcp://HOST:PORT` (GR00T's)."""
    executed_horizon: int | None = None
    """Actions of each predicted chunk that are executed, at least 1; None: what the policy was made for."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the policy of `checkpoint` computes; `auto` takes CUDA where there is a GPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` computes in bfloat16 with half the memory for weights: other actions, by a few per cent of their range."""
    compile: bool = False
    """Compile the networks of flow policies (pi0, pi0.5, GR00T) with `torch.compile`; the first chunk waits for the compiler."""
    timeout_s: float = 60.0
    """Seconds that a server may take to connect and for each answer; above 0."""

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.remote is not None:
            raise ConfigError(f"checkpoint is {self.checkpoint!r} and remote is {self.remote!r}; give one of them")
        if self.executed_horizon is not None and self.executed_horizon < 1:
            raise ConfigError(f"executed_horizon is {self.executed_horizon}; it must be at least 1")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0 seconds")

    @property
    def given(self) -> bool:
        """Whether a policy is named at all."""
        return self.checkpoint is not None or self.remote is not None


@dataclass(frozen=True)
class EvalConfig:
    """Who is evaluated, on what, and how."""

    run_dir: str
    """Where rows, summary and videos go; starting again with the same directory resumes."""
    suite: str = "libero_object"
    """A LIBERO suite, or `reach`."""
    tasks: tuple[int, ...] = ()
    """Indices of the tasks; empty: all tasks of the suite."""
    protocol: str = "openvla-oft"
    """Step limits, settling, inits: `openvla-oft`, `openpi`, `lerobot`, `libero` or `sampled` (held-out seeds)."""
    episodes_per_task: int | None = None
    """Inits of each task, the first ones in order; None: as many as the protocol says."""
    split: Literal["test", "validation"] = "test"
    """`validation` (only with the protocol `sampled`) is for choosing checkpoints, so that tests stay unseen."""
    seed: int = 0
    """Index of the policy's noise (`EpisodeSpec.sample`): another seed, the same scenes."""
    actor: Literal["policy", "noop", "random", "expert", "replay"] = "policy"
    """Who acts. `noop` and `replay` are controls: about 0 % and 100 %."""
    policy: EvaluatedPolicy = field(default_factory=EvaluatedPolicy)
    """Which policy, for actor `policy`."""
    dataset: str | None = None
    """HDF5 file or folder whose successful episodes are re-executed, for actor `replay`; they replace the inits."""
    prompt: Literal["own", "blank", "swap"] = "own"
    """`blank`: an empty instruction. `swap`: the instruction names another object of the scene; two episodes per init
    then ask for the named object and for the scene's original one."""
    condition: str = ""
    """Label of the rows, such as `before`; empty: actor and prompt."""
    videos: int = 2
    """Episodes of each task (the first ones) of which a video is written; at least 0."""
    video_every: int = 2
    """Control steps between two frames of a video; at least 1."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The simulator."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """How many of them, and their deadlines."""
    show_progress: bool = True
    """Show a progress bar with a time estimate on standard error."""

    def __post_init__(self) -> None:
        belongs = {"policy.checkpoint or policy.remote": ("policy", self.policy.given), "dataset": ("replay", self.dataset is not None)}
        for name, (actor, given) in belongs.items():
            if given and self.actor != actor:
                raise ConfigError(f"actor {self.actor!r} takes no {name}; {name} belongs to actor {actor!r}")
        if self.actor == "replay" and self.dataset is None:
            raise ConfigError("actor 'replay' needs dataset")
        least = {"episodes_per_task": (self.episodes_per_task, 1)}
        least |= {"videos": (self.videos, 0), "video_every": (self.video_every, 1), "seed": (self.seed, 0)}
        for name, (value, minimum) in least.items():
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
        if self.policy.executed_horizon is not None and self.actor != "policy":
            raise ConfigError(
                f"policy.executed_horizon is {self.policy.executed_horizon}, but actor {self.actor!r} is no policy; leave it out"
            )
        if self.actor == "replay" and (self.prompt != "own" or self.split != "test"):
            raise ConfigError("actor 'replay' re-executes recorded episodes: prompt must be 'own' and split 'test'")
        if (self.suite == "reach") != (self.env.kind == "reach"):
            raise ConfigError(f"suite {self.suite!r} does not run in env.kind {self.env.kind!r}; 'reach' belongs to 'reach'")

    def require_policy(self) -> None:
        """Raise ConfigError if a policy shall act and none is named: a recipe may leave that to the command line."""
        if self.actor == "policy" and not self.policy.given:
            raise ConfigError(
                "actor 'policy' needs policy.checkpoint or policy.remote; give --policy.checkpoint DIR or --policy.remote URL"
            )

    @property
    def label(self) -> str:
        """The condition of the rows."""
        return self.condition or (self.actor if self.prompt == "own" else f"{self.actor}, {self.prompt} prompt")
