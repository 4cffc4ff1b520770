"""What stands where in an episode of Reach, and which block is meant; no simulator is imported.

Lengths in metres; z is up; the table's surface is z = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_rl.episode import EpisodeSpec, SpecError

COLOURS = ("red", "green", "blue", "yellow")
"""Block colours; task k of the suite asks for the k-th."""
BENCHMARK_STATES = 50
"""Number of `benchmark:K` initial states per task."""
BLOCK_HALF = 0.02
TABLE_HALF = 0.16
"""Blocks stand at most this far from the table's centre, in x and in y."""
START = np.array([0.0, 0.0, 0.12])
START_SPREAD = 0.03
"""Largest distance of the first tip position from `START` in each axis."""
MIN_SEPARATION = 0.1
"""Smallest distance between the centres of the two blocks."""


@dataclass(frozen=True)
class Layout:
    """What stands where at the start of an episode."""

    target: str
    """Colour of the block to be reached."""
    blocks: dict[str, np.ndarray]
    """Colour -> float64[2] position of its centre, for the two blocks on the table."""
    tip: np.ndarray
    """float64[3] gripper tip."""


def sample_layout(spec: EpisodeSpec) -> Layout:
    """The layout of an episode, from `spec` alone.

    Raises SpecError for a suite, task, init or goal that Reach does not have.
    """
    target = target_of(spec)
    if spec.init_kind == "benchmark" and spec.init_number >= BENCHMARK_STATES:
        raise SpecError(f"init {spec.init!r} must be benchmark:0 to benchmark:{BENCHMARK_STATES - 1}")
    random = np.random.default_rng(spec.scene_seed)
    named = COLOURS[spec.task]
    other = random.choice([colour for colour in COLOURS if colour != named])
    blocks = dict(zip((named, str(other)), _separated_pair(random)))
    if target not in blocks:
        raise SpecError(f"{spec.key}: goal {spec.goal!r} asks for a block that is not on the table; there are {', '.join(blocks)}")
    return Layout(target, blocks, START + random.uniform(-START_SPREAD, START_SPREAD, 3))


def target_of(spec: EpisodeSpec) -> str:
    """The colour of the block to be reached: of the goal, such as `(Reach blue_block)`, or of the task.

    Raises SpecError for a suite, task or goal that Reach does not have.
    """
    colours = COLOURS
    if spec.suite != "reach" or not 0 <= spec.task < len(colours):
        raise SpecError(f"{spec.suite} task {spec.task} is not one of reach 0 to {len(colours) - 1} ({', '.join(colours)})")
    goals = {"": colours[spec.task]} | {f"(Reach {colour}_block)": colour for colour in colours}
    if spec.goal not in goals:
        raise SpecError(f"{spec.key}: goal {spec.goal!r} must be empty or one of {', '.join(filter(None, goals))}")
    return goals[spec.goal]


def task_prompt(task: int) -> str:
    """The instruction of a task."""
    return f"reach the {COLOURS[task]} block"


def top_of(position: np.ndarray) -> np.ndarray:
    """float64[3]: the middle of the upper face of a block at a table position."""
    return np.array([*position, 2 * BLOCK_HALF])


def _separated_pair(random: np.random.Generator) -> np.ndarray:
    """float64[2, 2]: two positions on the table at least `MIN_SEPARATION` apart."""
    while True:
        positions = random.uniform(-TABLE_HALF, TABLE_HALF, (2, 2))
        if np.linalg.norm(positions[0] - positions[1]) >= MIN_SEPARATION:
            return positions
