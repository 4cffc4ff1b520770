"""Every choice of a reinforcement-learning update, by name, with contradictions refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_rl.algorithms.advantages import GaeSettings, GroupScale
from vla_rl.algorithms.batches import require_divisible
from vla_rl.algorithms.corrections import Correction
from vla_rl.algorithms.filters import GroupFilter
from vla_rl.algorithms.losses import ClipSettings
from vla_rl.algorithms.reductions import LogProbReduction
from vla_rl.algorithms.rewards import RewardSettings
from vla_rl.algorithms.weights import Aggregation
from vla_rl.config import ConfigError


@dataclass(frozen=True)
class CriticSettings:
    """The value function of `advantage: gae`."""

    coefficient: float = 1.0
    """Weight of the value loss; above 0."""
    learning_rate: float | None = None
    """Rate of the critic's own parameters; above 0, none takes the engine's. Published recipes use 20 times the policy's."""
    value_clip: float | None = 0.2
    """Largest change of the value in one step, as the PPO code clips it; above 0, none turns it off."""
    huber_delta: float | None = 10.0
    """Error from which the loss grows linearly; above 0, none keeps it quadratic."""
    warmup_steps: int = 0
    """First RL steps in which only the critic learns (the policy's terms have weight 0); at least 0."""

    def __post_init__(self) -> None:
        for name in ("coefficient", "learning_rate", "value_clip", "huber_delta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"critic.{name} is {value}; allowed: above 0{'' if name == 'coefficient' else ', or none'}")
        if self.warmup_steps < 0:
            raise ConfigError(f"critic.warmup_steps is {self.warmup_steps}; allowed: at least 0")


@dataclass(frozen=True)
class GroupSettings:
    """Groups of episodes that share task and initial state and differ in the policy's noise (GRPO, RLOO)."""

    size: int = 8
    """Episodes per group; at least 2."""
    scale: GroupScale = "unbiased"
    """Divide by the group's standard deviation, `unbiased` (n - 1) or `biased` (n), or by `none`."""
    filter: GroupFilter = field(default_factory=GroupFilter)
    """Which groups are trained on."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ConfigError(f"group.size is {self.size}; allowed: at least 2, because episodes are compared within their group")


@dataclass(frozen=True)
class KlSettings:
    """Holding the policy near a reference: the weights that the run started from."""

    kind: Literal["none", "k1", "k2", "k3", "velocity"] = "none"
    """Estimator from log-probabilities (`k1`, `k2`, `k3`), or the squared difference of velocities (`velocity`)."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from each chunk's reward."""
    coefficient: float = 0.0
    """Its weight; above 0 for every kind but `none`."""

    def __post_init__(self) -> None:
        if (self.kind == "none") != (self.coefficient == 0) or self.coefficient < 0:
            raise ConfigError(
                f"kl.kind is {self.kind!r} and kl.coefficient is {self.coefficient}; give a kind and a coefficient above 0, or neither"
            )
        if self.kind == "k1" and self.place == "loss":
            raise ConfigError(
                "kl.kind 'k1' has no gradient in expectation, so kl.place 'loss' does nothing; use k2 or k3, or place 'reward'"
            )
        if self.kind == "velocity" and self.place == "reward":
            raise ConfigError("kl.kind 'velocity' works through its gradient, which kl.place 'reward' would drop; use place 'loss'")


@dataclass(frozen=True)
class CloningSettings:
    """Behaviour cloning on demonstrations beside RL."""

    coefficient: float = 0.0
    """Weight of the SFT loss; 0 turns it off."""
    full_at_kl: float | None = None
    """KL to the old policy at which the weight is reached, growing from 0 (VLA-RFT uses 0.2); above 0, none keeps it constant."""
    global_batch_size: int = 64
    """Demonstration samples per update, over all ranks; at least 1."""

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ConfigError(f"cloning.coefficient is {self.coefficient}; allowed: at least 0")
        if self.full_at_kl is not None and not self.full_at_kl > 0:
            raise ConfigError(f"cloning.full_at_kl is {self.full_at_kl}; allowed: above 0, or none")
        if self.global_batch_size < 1:
            raise ConfigError(f"cloning.global_batch_size is {self.global_batch_size}; allowed: at least 1")


@dataclass(frozen=True)
class DistillationSettings:
    """Learning from a teacher policy on the student's own episodes."""

    kind: Literal["none", "policy_gradient", "velocity"] = "none"
    """`policy_gradient`: log teacher - log student is added to the advantage (reverse KL). `velocity`: regression to the teacher's
    velocity at the points the student visited."""
    coefficient: float = 0.0
    """Its weight; above 0 for every kind but `none`."""
    bound: float = 10.0
    """Largest absolute distillation advantage (nats); above 0."""

    def __post_init__(self) -> None:
        if (self.kind == "none") != (self.coefficient == 0) or self.coefficient < 0:
            raise ConfigError(
                f"distillation.kind is {self.kind!r} and distillation.coefficient is {self.coefficient}; "
                "give a kind and a coefficient above 0, or neither"
            )
        if not self.bound > 0:
            raise ConfigError(f"distillation.bound is {self.bound}; allowed: above 0")


@dataclass(frozen=True)
class AlgorithmConfig:
    """How episodes become an update. The defaults are PPO for flow policies on one machine."""

    advantage: Literal["gae", "group_mean", "leave_one_out"] = "gae"
    """`gae`: a critic (PPO). `group_mean`: against the group's mean (GRPO). `leave_one_out`: against the others' mean (RLOO)."""
    episodes_per_step: int = 64
    """Episodes of one RL step, over all rollout workers; a multiple of `group.size` where there are groups."""
    gae: GaeSettings = field(default_factory=GaeSettings)
    """For `advantage: gae`; the discount also shapes chunk rewards."""
    critic: CriticSettings | None = field(default_factory=CriticSettings)
    """For `advantage: gae`; none for groups, which have no critic."""
    group: GroupSettings | None = None
    """For `group_mean` and `leave_one_out`; none for `gae`."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and standard deviation 1, over all ranks."""
    reward: RewardSettings = field(default_factory=RewardSettings)
    """What an episode is rewarded for."""
    log_prob: LogProbReduction = field(default_factory=LogProbReduction)
    """What one importance ratio is taken of."""
    aggregation: Aggregation = "element_mean"
    """How ratios are averaged, see `weights.py`: `element_mean`, `episode_mean`, `episode_sum`, `fixed_divisor`."""
    fixed_divisor: float | None = None
    """Elements per episode that `fixed_divisor` divides by; above 0, none for the other aggregations."""
    clip: ClipSettings = field(default_factory=ClipSettings)
    """PPO's clipping."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; at least 0. Flow-SDE's entropy is constant, so it does nothing there."""
    kl: KlSettings = field(default_factory=KlSettings)
    """Regularisation towards the weights the run started from."""
    cloning: CloningSettings = field(default_factory=CloningSettings)
    """Behaviour cloning on demonstrations beside RL."""
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    """On-policy distillation from a teacher."""
    epochs: int = 2
    """Passes over the rows of a step; at least 1."""
    target_kl: float | None = 0.02
    """Mean KL to the old policy at which (times 1.5) the passes over a step stop; above 0, none never stops."""
    global_batch_size: int = 256
    """Chunks per optimizer update, over all ranks; the last update of a pass takes what is left, and is not dropped."""
    micro_batch_size_per_rank: int = 64
    """Chunks of one forward and backward pass; divides `global_batch_size`."""
    max_staleness: int = 0
    """Weight versions by which data may be older than the weights it trains; 0 is synchronous."""
    correction: Correction = field(default_factory=Correction)
    """How data of older weights is used; must be chosen where `max_staleness` is above 0."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """The PPO ratio's denominator: as recorded by the `rollout`, or `recompute`d by the trainer before the first update."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_advantage()
        self._check_staleness()

    @property
    def groups_per_step(self) -> int:
        """Groups of one step; an episode is its own group where there are none."""
        return self.episodes_per_step // (self.group.size if self.group else 1)

    def policy_coefficient(self, step: int) -> float:
        """Weight of the policy's terms at RL step `step` (from 0): 0 while the critic warms up."""
        return 0.0 if self.critic is not None and step < self.critic.warmup_steps else 1.0

    def _check_ranges(self) -> None:
        for name in ("episodes_per_step", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: at least 1")
        for name in ("max_staleness", "entropy_coefficient"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: at least 0")
        for name in ("target_kl", "fixed_divisor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; allowed: above 0, or none")
        require_divisible("global_batch_size", self.global_batch_size, "micro_batch_size_per_rank", self.micro_batch_size_per_rank)
        if (self.aggregation == "fixed_divisor") != (self.fixed_divisor is not None):
            raise ConfigError(
                f"aggregation is {self.aggregation!r} and fixed_divisor is {self.fixed_divisor}; give the divisor for "
                "aggregation 'fixed_divisor', and for no other"
            )

    def _check_advantage(self) -> None:
        if self.advantage == "gae":
            if self.critic is None or self.group is not None:
                raise ConfigError("advantage 'gae' needs a critic and has no groups: give critic: {} and group: null")
            return
        if self.critic is not None or self.group is None:
            raise ConfigError(f"advantage {self.advantage!r} needs groups and has no critic: give group: {{size: 8}} and critic: null")
        require_divisible("episodes_per_step", self.episodes_per_step, "group.size", self.group.size)
        if self.normalize_advantages and self.group.scale != "none":
            raise ConfigError(
                f"normalize_advantages is true and group.scale is {self.group.scale!r}: advantages would be scaled twice; "
                "set normalize_advantages: false, or group.scale: none"
            )

    def _check_staleness(self) -> None:
        if self.max_staleness > 0 and self.correction.kind == "none":
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, so data comes from older weights, and correction.kind is 'none'; choose "
                "'behaviour_clip' (a good first choice), 'truncated' or 'decoupled', or set max_staleness: 0"
            )
        if self.correction.needs_proximal and self.old_log_prob == "rollout":
            raise ConfigError(
                f"correction.kind {self.correction.kind!r} compares with recomputed log-probabilities; set old_log_prob: recompute"
            )
        if self.correction.kind == "behaviour_clip" and self.old_log_prob == "recompute":
            raise ConfigError(
                "correction.kind 'behaviour_clip' takes the ratio against who acted; recomputed log-probabilities would hide "
                "the difference: set old_log_prob: rollout"
            )
