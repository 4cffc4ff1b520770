"""The recipe of `vla-rl collect`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vla_rl.collection.operators import OperatorConfig, ReplayOperator, ScriptedOperatorConfig
from vla_rl.datasets.collected import Format
from vla_rl.datasets.hdf5 import DEFAULT_COMPRESSION, Compression
from vla_rl.datasets.lerobot_format import Pictures
from vla_rl.episode import SPLITS
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig


@dataclass(frozen=True)
class CollectConfig:
    """Demonstrations of some tasks of one suite: scripted, by a person, or of a policy that is corrected."""

    run_dir: str
    """Where `episodes/` and `episodes.jsonl` go; starting again with the same directory records only what is missing."""
    suite: str = "libero_object"
    """A LIBERO suite, or `reach` (with env.kind `reach`)."""
    tasks: tuple[int, ...] = (0,)
    """Tasks of the suite; empty for all of them."""
    episodes_per_task: int = 50
    """Episodes that are tried for each task, those that fail and are dropped included; at least 1."""
    first_seed: int = 0
    """Scenes are `sampled:first_seed`, `sampled:first_seed + 1`, ...; 0 to 999999, the range of demonstrations."""
    goals: Literal["own", "all"] = "own"
    """`own`: the task's own goal. `all`: each scene is shown once for every task of the suite that it can host, with that
    task's instruction, so that only the instruction tells what to do (several prompts per scene)."""
    noise_std: tuple[float, float] = (0.25, 0.4)
    """Smallest and largest standard deviation of the noise on executed translations (action units), drawn per episode; 0 to 1.
    Labels stay clean; recoveries from such mistakes are what a policy needs to have seen."""
    burst_rate: float = 0.0
    """Probability per control step that a push of several steps in one direction begins; 0 to 1."""
    speed: float = 1.0
    """Largest action that Reach's scripted expert means to take along an axis: a careful demonstrator is slow. Above 0 and at most 1;
    1 for every other suite."""
    max_steps: int | None = None
    """Control steps after which an episode has failed; none takes the suite's own limit. At least 1."""
    frame_every: int = 3
    """Pictures before control steps 0, k, 2k, ...; 1 is dense. Rendering is most of the cost. At least 1."""
    render: Literal["live", "afterwards"] = "live"
    """`afterwards` renders only episodes that are kept, by exact re-simulation in this process: pays when most are dropped.
    With a page it is always so, in a worker of its own, because control does not wait for pictures."""
    keep_failures: bool = False
    """Also write episodes that did not reach the goal; they are counted in `episodes.jsonl` either way."""
    format: Format = "hdf5"
    """`hdf5` (LIBERO's schema, `episodes/`), `lerobot` (LeRobotDataset v3.0, `lerobot/`) or `both`. LeRobot needs frame_every 1."""
    compression: Compression = DEFAULT_COMPRESSION
    """Of pictures in HDF5: `gzip`, `lzf` (larger, faster; equal episodes then have equal pictures, not always equal bytes) or `none`."""
    pictures: Pictures = "png"
    """In LeRobot's format: `png` (exact) or video, `av1` (small) or `h264` (encodes and plays anywhere)."""
    operator: OperatorConfig | None = None
    """Who may take control: `{kind: page}`, a person at the page; `{kind: scripted}`, the scripted expert that corrects a policy; or
    `{kind: replay}`, what was recorded. None: the scripted expert shows everything."""
    checkpoint: str | None = None
    """Folder of the policy that acts where nobody has taken over (only with an operator); none: environments wait for a person."""
    libero_files: bool = False
    """When everything is recorded, also write LIBERO's form, one `TASK_demo.hdf5` per task, into `libero/` of the run directory."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Simulator and rendering."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Workers."""
    show_progress: bool = True
    """A progress bar with a time estimate on standard error."""

    def __post_init__(self) -> None:
        for name in ("episodes_per_task", "frame_every", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.format != "hdf5" and self.frame_every != 1:
            raise ValueError(
                f"format is {self.format!r} and frame_every {self.frame_every}; LeRobot has a picture in every row: frame_every 1"
            )
        if self.libero_files and self.format == "lerobot":
            raise ValueError("libero_files needs the HDF5 files: format 'hdf5' or 'both'")
        last = self.first_seed + self.episodes_per_task - 1
        if self.first_seed < 0 or last not in SPLITS["demonstrations"]:
            raise ValueError(
                f"first_seed {self.first_seed} with {self.episodes_per_task} episodes leaves the seeds 0 to 999999 of demonstrations"
            )
        low, high = self.noise_std
        if not 0 <= low <= high <= 1:
            raise ValueError(f"noise_std is {list(self.noise_std)}, must be [low, high] with 0 <= low <= high <= 1")
        if self.checkpoint is not None and self.operator is None:
            raise ValueError(f"checkpoint is {self.checkpoint!r} without an operator to correct it; vla-rl eval evaluates a policy")
        if isinstance(self.operator, ScriptedOperatorConfig) and self.checkpoint is None:
            raise ValueError("operator.kind is 'scripted' but no checkpoint is there to correct; leave operator out for demonstrations")
        if isinstance(self.operator, ReplayOperator) and self.checkpoint is not None:
            raise ValueError(f"operator.kind is 'replay', and checkpoint is {self.checkpoint!r}; nothing is left for a policy to do")
        if not 0 <= self.burst_rate <= 1:
            raise ValueError(f"burst_rate is {self.burst_rate}, must be 0 to 1")
        if not 0 < self.speed <= 1 or (self.speed < 1 and self.suite != "reach"):
            raise ValueError(f"speed is {self.speed} for suite {self.suite!r}; allowed: above 0, at most 1 for reach, 1 for other suites")
        if (self.suite == "reach") != (self.env.kind == "reach"):
            raise ValueError(
                f"suite is {self.suite!r} and env.kind is {self.env.kind!r}; 'reach' needs both, LIBERO suites need env.kind 'libero'"
            )
