"""The recipe of `vla-rl rl`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.algorithms.batches import require_divisible
from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.config import ConfigError, nearest_name
from vla_rl.datasets.loader import DataConfig
from vla_rl.engine.config import EngineConfig, Precision
from vla_rl.phases.evaluation import EvaluationConfig
from vla_rl.phases.loggers import LoggerConfig
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.noise_head import NoiseHeadConfig
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.tokens.sglang_engine import SglangConfig
from vla_rl.policies.tokens.vllm_engine import VllmConfig
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig


@dataclass(frozen=True)
class RlConfig:
    """Reinforcement learning of a saved policy in simulation."""

    run_dir: str
    """Where checkpoints, metrics and spans go; starting again with the same directory resumes."""
    initial_policy: str
    """Folder of the saved policy to start from, such as `runs/sft/checkpoints/last/policy`. It also is the reference of `algorithm.kl`."""
    initial_sizes: str | None = None
    """Named sizes that the initial policy must have, such as `pi05_base`; a dry run takes them from here while the folder is not made."""
    suite: str = "libero_object"
    """A LIBERO suite, or `reach`."""
    tasks: tuple[int, ...] = ()
    """Indices of the tasks, which take turns; empty: all tasks of the suite."""
    max_steps: int | None = None
    """Control steps after which an episode has failed; none takes the suite's own limit. At least 1."""
    steps: int = 100
    """RL steps (rollout and update); at least 1. A run that is over goes on when it is started again with more."""
    seed: int = 0
    """Of scenes, new heads and the order of rows; 0 to 49."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """How episodes become an update."""
    exploration: Exploration = field(default_factory=Exploration)
    """How the policy explores during rollouts."""
    vllm: VllmConfig | None = None
    """A vLLM process per rollout worker, which writes the tokens of an autoregressive token policy; none: the worker does it itself."""
    sglang: SglangConfig | None = None
    """An SGLang server that does the same, and that somebody else runs; for a single rollout worker."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value head, where the algorithm has a critic and the initial policy has none."""
    noise_head: NoiseHeadConfig = field(default_factory=NoiseHeadConfig)
    """The noise head, for exploration.method `flow_noise`."""
    teacher: str | None = None
    """Folder of the policy that `algorithm.distillation` learns from; none without distillation."""
    demonstrations: DataConfig | None = None
    """Recorded episodes for `algorithm.cloning`; none without cloning."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(lr=1e-5, schedule="constant", warmup_fraction=0.0))
    """Optimizer, precision, what learns. The schedule must be constant: how many updates a run makes is known when it is over."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The simulator of the rollouts."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """How many of them, and their deadlines."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Which roles there are, and where they run; `env` and `pool` are each rollout worker's."""
    rollout_batch_size: int | None = None
    """Rows of every forward pass during rollouts; none: pool.workers. At least 1."""
    gradient_noise_every: int = 0
    """RL steps between two measurements of the gradient's signal-to-noise ratio, which cost one more pass over the rows; 0: none."""
    gradient_noise_parts: int = 8
    """Parts into which the episodes are dealt for that measurement; at least 2."""
    checkpoint_every: int = 10
    """RL steps between two checkpoints; at least 1. The last step always gets one."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept, newest first; at least 1. The best policy on validation scenes is kept apart, in `best/`."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Success rates on validation scenes during training; `every` counts RL steps."""
    loggers: LoggerConfig = field(default_factory=LoggerConfig)
    """TensorBoard and W&B beside `metrics.jsonl`."""
    show_progress: bool = True
    """A progress bar with a time estimate, and what each step did, on standard error."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_engine()
        self._check_companions()
        self._check_cluster()

    @property
    def rollout_rows(self) -> int:
        """Rows of a rollout's forward pass."""
        return self.rollout_batch_size or self.pool.workers

    @property
    def rollout_precision(self) -> Precision:
        """What rollout workers compute in: as the trainer does, unless an engine that has a precision of its own writes the tokens."""
        return self.engine.precision if self.vllm is None and self.sglang is None else "fp32"

    def _check_ranges(self) -> None:
        least = {"steps": 1, "seed": 0, "checkpoint_every": 1, "keep_checkpoints": 1, "max_steps": 1, "rollout_batch_size": 1}
        for name, minimum in (least | {"gradient_noise_every": 0, "gradient_noise_parts": 2}).items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
        if self.initial_sizes is not None and self.initial_sizes not in PI0_PRESETS:
            raise ConfigError(f"initial_sizes is {self.initial_sizes!r}{nearest_name(self.initial_sizes, list(PI0_PRESETS))}")
        if self.seed > 49:
            raise ConfigError(f"seed is {self.seed}; allowed: 0 to 49, because each has 20,000 of the million training scenes to itself")
        if (self.suite == "reach") != (self.env.kind == "reach"):
            raise ConfigError(f"suite {self.suite!r} does not run in env.kind {self.env.kind!r}; 'reach' belongs to 'reach'")
        if self.evaluation.every % self.checkpoint_every:
            raise ConfigError(
                f"evaluation.every is {self.evaluation.every} and checkpoint_every {self.checkpoint_every}: "
                "checkpoints are what is evaluated, so the first must be a multiple of the second"
            )

    def _check_engine(self) -> None:
        if self.engine.schedule != "constant" or self.engine.warmup_fraction:
            raise ConfigError(
                f"engine.schedule is {self.engine.schedule!r} and engine.warmup_fraction {self.engine.warmup_fraction}; reinforcement "
                "learning does not know its number of updates: set schedule: constant and warmup_fraction: 0"
            )
        if self.engine.ema_decay is not None:
            raise ConfigError(
                f"engine.ema_decay is {self.engine.ema_decay}; the policy that acts must be the one that learns, so leave it out"
            )

    def _check_cluster(self) -> None:
        if self.cluster.placement == "colocated" and self.algorithm.max_staleness:
            raise ConfigError(
                f"cluster.placement is 'colocated' and algorithm.max_staleness {self.algorithm.max_staleness}: roles that take turns on "
                "a device do not overlap; set max_staleness: 0, or placement: split"
            )
        require_divisible(
            "algorithm.global_batch_size",
            self.algorithm.global_batch_size,
            "algorithm.micro_batch_size_per_rank x cluster.trainer_ranks",
            self.algorithm.micro_batch_size_per_rank * self.cluster.trainer_ranks,
        )
        if self.demonstrations is not None:
            require_divisible(
                "algorithm.cloning.global_batch_size",
                self.algorithm.cloning.global_batch_size,
                "cluster.trainer_ranks",
                self.cluster.trainer_ranks,
            )

    def _check_companions(self) -> None:
        algorithm = self.algorithm
        pairs = (
            ("teacher", self.teacher, "algorithm.distillation.kind", algorithm.distillation.kind != "none"),
            ("demonstrations", self.demonstrations, "algorithm.cloning.coefficient", algorithm.cloning.coefficient > 0),
        )
        for name, given, needed_by, needed in pairs:
            if (given is not None) != needed:
                verb = "is needed" if needed else "is given, but nothing uses it"
                raise ConfigError(f"{name} {verb}: it belongs to {needed_by}, which is {'on' if needed else 'off'}")
        engines = [name for name in ("vllm", "sglang") if getattr(self, name) is not None]
        if len(engines) > 1:
            raise ConfigError("vllm and sglang are both given; one engine writes the tokens: leave the other out")
        if engines and self.exploration.method != "tokens":
            raise ConfigError(
                f"{engines[0]} is given and exploration.method is {self.exploration.method!r}; set exploration.method: tokens"
            )
        if self.sglang is not None and self.cluster.rollout_workers > 1:
            raise ConfigError(
                f"sglang is given and cluster.rollout_workers is {self.cluster.rollout_workers}; a server serves one: set it to 1"
            )
        if self.exploration.method == "tokens" and "velocity" in (algorithm.kl.kind, algorithm.distillation.kind):
            raise ConfigError(
                f"algorithm.kl.kind is {algorithm.kl.kind!r}, algorithm.distillation.kind {algorithm.distillation.kind!r}, and "
                "exploration.method 'tokens': tokens have no velocity; use another kind"
            )
        over_chunk = self.exploration.noise_over == "chunk" and self.exploration.likelihood == "chain"
        if over_chunk and (algorithm.log_prob.unit, algorithm.log_prob.actions) != ("chunk", "mean"):
            raise ConfigError(
                f"exploration.noise_over is 'chunk', algorithm.log_prob.unit {algorithm.log_prob.unit!r} and algorithm.log_prob.actions "
                f"{algorithm.log_prob.actions!r}: one draw for a chunk has one likelihood, which each of its actions carries; set them to "
                "'chunk' and 'mean'"
            )
        if self.exploration.likelihood == "matching" and algorithm.log_prob.denoise_steps == "mean":
            raise ConfigError(
                "exploration.likelihood is 'matching' and algorithm.log_prob.denoise_steps 'mean': it is a mean over its draws already; "
                "set it to 'sum'"
            )
        if self.exploration.method == "flow_sde" and algorithm.entropy_coefficient > 0:
            raise ConfigError(
                f"algorithm.entropy_coefficient is {algorithm.entropy_coefficient} and exploration.method 'flow_sde', whose entropy no "
                "weight changes; set it to 0, or use 'flow_noise'"
            )
