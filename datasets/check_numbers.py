"""Checks of actions, states and times.

Shape legend: see `vla_rl/episode.py`; K lags, M equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.findings import Finding
from vla_rl.datasets.samples import require_motion
from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import Episode, Float64, Outcome

LAGS = range(-2, 4)
"""Actions of which control steps a displacement is explained by: two that come after it, its own, and three before it."""
RESPONSE = 0.3
"""The first lag whose response is this share of the strongest one is where the arm begins to move. A LIBERO arm answers an action
with 5.2, 4.9, 1.3 mm in its own and the next steps, and 0.2 mm two steps before (autocorrelation that the fit leaves)."""
LEAST_RESPONSE_M = 5e-4
"""Motion per unit of action below which an arm does not follow its actions at all (m)."""
EXPLAINED = 0.2
"""Share of the motion that the actions must explain (R squared), or the order cannot be told."""
GRIPPER_MOVES_M, GRIPPER_CORRELATION = 1e-4, 0.05
"""Change of the gap between the fingers that counts as motion (m); correlation with the action that decides its sign."""
TIME_TOLERANCE_S = 1e-4
"""LeRobot's own tolerance of timestamps."""


def finite(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """NaN or infinity anywhere."""
    arrays = {"actions": episode.actions_NA(), "labels": episode.labels_NA(), "states": _observed(episode)}
    for name in ("sim_states_ED", "robot_states_ER"):
        parts = [getattr(step, name) for step in episode.steps]
        arrays |= {name: np.concatenate(parts)} if all(part is not None for part in parts) else {}
    for name, values in arrays.items():
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            text = f"{name} are not finite at {len(bad)} control steps, first {bad[0]}"
            yield Finding("not-finite", info.name, text, "leave the episode out: vla-rl data filter --without-numbers")


def no_ops_only(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """A demonstration that shows nothing (LIBERO #120)."""
    try:
        require_motion(episode.actions_NA(), info.name, f"{info.spec.suite} task {info.spec.task} ({info.prompt!r})")
    except DatasetError as error:
        yield Finding("no-ops-only", info.name, str(error), "leave it out: vla-rl data filter --without-numbers")


def gripper_range(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """Gripper actions that are not -1 (open) to 1 (close), and other actions beyond what the controller takes."""
    actions_NA = episode.actions_NA()
    gripper_N = actions_NA[:, 6]
    low, high = float(gripper_N.min()), float(gripper_N.max())
    if low < -1 or high > 1 or (low == 0 and high > 0):
        text = f"gripper actions lie in {low:g} ... {high:g}, expected -1 (open) ... 1 (close)"
        yield Finding("gripper-range", info.name, text, "convert them: data of RLDS and GR00T has g in 0 ... 1, which is -sign(2 g - 1)")
    beyond = int((np.abs(actions_NA[:, :6]) > 1).sum())
    if beyond:
        text = f"{beyond} motions lie outside [-1, 1] (up to {np.abs(actions_NA[:, :6]).max():.3g}), which the controller cuts off"
        yield Finding("gripper-range", info.name, text, "clip before recording: what is recorded must be what was executed")


def simulated_time(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """The simulator's clock between control steps against the control rate; dropped steps show as a jump."""
    parts = [step.sim_states_ED for step in episode.steps if step.sim_states_ED is not None]
    if not parts or len(parts) != len(episode.steps) or "filtered" in episode.provenance:
        return
    steps_s = np.diff(np.concatenate(parts)[:, 0])
    expected = 1 / info.conventions.control_rate_hz
    wrong = np.flatnonzero(np.abs(steps_s - expected) > TIME_TOLERANCE_S)
    if len(wrong):
        t, rate = int(wrong[0]), info.conventions.control_rate_hz
        text = f"between control steps {t} and {t + 1} the simulator's clock moves {steps_s[t]:.4f} s, "
        text += f"at {rate} Hz it is {expected:.4f} s; {len(wrong)} such places"
        yield Finding("timestamps", info.name, text, "steps are missing, or the declared rate is another one; record again")


def ends_whole(info: EpisodeInfo, episode: Episode) -> Iterator[Finding]:
    """A success whose last step did not succeed: the end was cut off."""
    rewards_N = np.concatenate([step.reward_E for step in episode.steps])
    judged = episode.reason not in ("predicate", "published", "")
    if info.outcome is Outcome.SUCCESS and not judged and rewards_N[-1] != 1:
        text = f"it ended in success ({episode.reason}), but the last of its {len(rewards_N)} steps has reward {rewards_N[-1]:g}"
        yield Finding("dropped-tail", info.name, text, "its end is missing: record it again, or leave it out")


def _observed(episode: Episode) -> np.ndarray:
    frames = episode.frames()
    return np.stack([frame.state for frame in frames.values()])


class Motion:
    """What all episodes together tell about the order of actions and observations, and about the gripper's sign."""

    def __init__(self) -> None:
        count = len(LAGS)
        self._products: Float64 = np.zeros((count, count))
        self._targets: Float64 = np.zeros(count)
        self._total = 0.0
        self._gripper: list[np.ndarray] = []
        self._first: EpisodeInfo | None = None

    def add(self, info: EpisodeInfo, episode: Episode) -> None:
        """Take up one episode."""
        self._first = self._first or info
        states_NS = states_of(episode)
        actions_NA = episode.actions_NA()
        if states_NS is None or "filtered" in episode.provenance or not (np.isfinite(states_NS).all() and np.isfinite(actions_NA).all()):
            return
        self._add_motion(actions_NA[:, :3].astype(np.float64), np.diff(states_NS[:, :3].astype(np.float64), axis=0))
        gap_N = np.abs(states_NS[:, 6] - states_NS[:, 7])
        change = np.diff(gap_N)
        moving = np.abs(change) > GRIPPER_MOVES_M
        self._gripper.append(np.stack([np.sign(actions_NA[:-1, 6][moving]), change[moving]]))

    def _add_motion(self, actions_N3: Float64, moved_M3: Float64) -> None:
        rows = range(LAGS.stop - 1, len(moved_M3) + LAGS.start)
        if len(rows) < 1:
            return
        for axis in range(3):
            lagged_MK = np.stack([actions_N3[rows.start - lag : rows.stop - lag, axis] for lag in LAGS], axis=1)
            moved_M = moved_M3[rows.start : rows.stop, axis]
            self._products += lagged_MK.T @ lagged_MK
            self._targets += lagged_MK.T @ moved_M
            self._total += float(moved_M @ moved_M)

    def responses(self) -> tuple[Float64, float]:
        """float64[K], m of motion per unit of each lag's action, and the share of the motion that they explain."""
        responses = np.linalg.lstsq(self._products, self._targets, rcond=None)[0].astype(np.float64)
        return responses, float(responses @ self._targets / self._total) if self._total else 0.0

    def begins_at(self) -> int | None:
        """The lag at which the arm begins to answer an action, None where it cannot be told. 0 is right."""
        responses, explained = self.responses()
        strongest = float(responses.max())
        if strongest < LEAST_RESPONSE_M or explained < EXPLAINED:
            return None
        return LAGS[int(np.argmax(responses >= RESPONSE * strongest))]

    def findings(self) -> Iterator[Finding]:
        """Misaligned actions and a wrong gripper sign."""
        if self._first is None:
            return
        where = str(self._first.path.parent if self._first.path.suffix == ".hdf5" else self._first.path)
        yield from self._alignment(where)
        yield from self._gripper_sign(where)

    def _alignment(self, where: str) -> Iterator[Finding]:
        begins, (responses, explained) = self.begins_at(), self.responses()
        shown = ", ".join(f"{1000 * value:.1f}" for value in responses)
        by_lag = f"mm per unit of action at lags {LAGS.start} to {LAGS.stop - 1}: {shown}"
        if begins is None:
            text = f"order of actions and observations cannot be told: actions explain {100 * explained:.0f} % of the arm's motion"
            yield Finding("misaligned-actions", where, f"{text} ({by_lag})", "an arm that follows its actions shows it", level="note")
        elif begins:
            when, how = ("before", "after their actions") if begins < 0 else ("after", "too long before their actions")
            text = f"the arm moves {abs(begins)} control step(s) {when} the action that moves it, so observations lie {how} ({by_lag})"
            yield Finding("misaligned-actions", where, text, "LIBERO's published files are late by one: vla-rl data convert corrects them")

    def _gripper_sign(self, where: str) -> Iterator[Finding]:
        signs, changes = np.concatenate(self._gripper, axis=1) if self._gripper else np.zeros((2, 0))
        if len(signs) < 2 or signs.std() == 0 or changes.std() == 0:
            return
        correlation = float(np.corrcoef(signs, changes)[0, 1])
        if correlation > max(GRIPPER_CORRELATION, 3 / np.sqrt(len(signs))):  # three standard errors of no correlation at all
            text = f"the fingers open when the action says close (correlation {correlation:+.2f} of action and opening, expected below 0)"
            yield Finding("gripper-sign", where, text, "turn the sign of the last action dimension: -1 opens, +1 closes")


def states_of(episode: Episode) -> np.ndarray | None:
    """float32[N, 8]: position and fingers before every step; None where only some steps were observed and no robot state is kept."""
    parts: list[Any] = [step.robot_states_ER for step in episode.steps]
    if all(part is not None for part in parts):
        robot_NR = np.concatenate(parts)
        return np.concatenate([robot_NR[:, 2:5], np.zeros((len(robot_NR), 3)), robot_NR[:, :2]], axis=1)
    frames = episode.frames()
    return np.stack([frame.state for frame in frames.values()]) if len(frames) == episode.num_steps else None
