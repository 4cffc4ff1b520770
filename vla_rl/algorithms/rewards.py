"""What an episode is rewarded for, per control step.

Shape legend: T chunks of an episode;  E executed actions of one chunk;  N control steps of an episode (the sum of the E).
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vla_rl.config import ConfigError, nearest_name
from vla_rl.episode import Episode, Float32, TokenRecord
from vla_rl.errors import UserError

RewardKind = Literal["success", "success_minus_steps", "progress", "function"]


class RewardError(UserError):
    """A reward function that cannot be found, fails, takes too long, or returns something else than rewards."""


@dataclass(frozen=True)
class RewardSettings:
    """What an episode is rewarded for."""

    kind: RewardKind = "success"
    """`success`: 1 at the last control step of a successful episode. `success_minus_steps`: the same, minus `step_penalty` at every
    control step. `progress`: success, plus `progress_coefficient` times the change of a measure over each chunk, paid at its last
    step. `function`: what your function says."""
    step_penalty: float = 0.001
    """Of `success_minus_steps`, per control step; at least 0. Times the step limit it should stay below 1."""
    progress_coefficient: float = 1.0
    """Of `progress`; above 0."""
    function: str = ""
    """`module:name`. For `function`: Episode -> float[N], a reward for every executed control step. For `progress`:
    Episode -> float[T + 1], the measure before every chunk and at the end."""
    privileged: bool = False
    """`function` reads `Observation.privileged` (simulator truth): the env fills it in, for the reward alone. The policy never sees it."""
    format_coefficient: float = 0.0
    """Added times the share of chunks whose reasoning has the right form (DeepThinkVLA: 0.4), paid at the last control step; for token
    policies that reason. At least 0."""
    time_limit_s: float = 10.0
    """Longest time that `function` may take for one episode (s); above 0."""

    def __post_init__(self) -> None:
        needed = self.kind in ("progress", "function")
        if needed and not self.function:
            raise ConfigError(f"reward.kind is {self.kind!r}, which needs reward.function: the import path 'module:name' of your function")
        if self.function and not needed:
            raise ConfigError(f"reward.function is {self.function!r}, but reward.kind {self.kind!r} does not call it; remove one of them")
        if self.privileged and not self.function:
            raise ConfigError(f"reward.privileged is true, but reward.kind {self.kind!r} calls no function that could read it; remove it")
        if not self.step_penalty >= 0:
            raise ConfigError(f"reward.step_penalty is {self.step_penalty}; allowed: at least 0 (it is subtracted)")
        if not self.progress_coefficient > 0:
            raise ConfigError(f"reward.progress_coefficient is {self.progress_coefficient}; allowed: above 0")
        if not self.format_coefficient >= 0:
            raise ConfigError(f"reward.format_coefficient is {self.format_coefficient}; allowed: at least 0")
        if not self.time_limit_s > 0:
            raise ConfigError(f"reward.time_limit_s is {self.time_limit_s}; allowed: above 0")


def episode_rewards(episode: Episode, settings: RewardSettings) -> list[Float32]:
    """float32[E] of every chunk, for the executed actions only. Raises RewardError for a user function that goes wrong."""
    if not episode.num_steps:
        return [np.zeros(0, np.float32) for _ in episode.steps]
    if settings.kind == "function":
        rewards = _call(settings, episode, episode.num_steps).astype(np.float32)
    else:
        rewards = np.zeros(episode.num_steps, np.float32)
        rewards[-1] = float(episode.success)
    if settings.kind == "success_minus_steps":
        rewards -= np.float32(settings.step_penalty)
    if settings.format_coefficient:
        rewards[-1] += np.float32(settings.format_coefficient * _well_formed_share(episode))
    ends = np.cumsum([len(step.executed_EA) for step in episode.steps])
    if settings.kind == "progress":
        change_T = np.diff(_call(settings, episode, len(episode.steps) + 1))
        np.add.at(rewards, np.maximum(ends - 1, 0), settings.progress_coefficient * change_T)
    return np.split(rewards, ends[:-1])


def _well_formed_share(episode: Episode) -> float:
    """Share of the chunks that ran whose reasoning has the right form; chunks after the episode's end do not exist, so none counts."""
    records = [step.proposed.record for step in episode.steps if len(step.executed_EA)]
    forms = [record.well_formed if isinstance(record, TokenRecord) else None for record in records]
    if None in forms:
        raise RewardError(
            "reward.format_coefficient is above 0, but the policy writes no reasoning whose form could be judged; set it to 0, or train "
            "a token policy with policy.reasoning_tokens"
        )
    return float(np.mean(np.array(forms, dtype=np.float64)))


def load_function(path: str) -> Callable[[Episode], Any]:
    """The function at `module:name`. Raises RewardError, with the nearest name, where there is none."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise RewardError(f"reward.function is {path!r}; it must be 'module:name', as in 'my_rewards:smooth_success'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(f"reward.function {path!r}: module {module_name!r} cannot be imported ({error}); is it on PYTHONPATH?") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f"reward.function {path!r}: {module_name} has no function {name!r}{nearest_name(name, functions)}")
    return function


def _call(settings: RewardSettings, episode: Episode, length: int) -> np.ndarray:
    """float64[length] from the user's function. Raises RewardError that says what came instead."""
    returned = _within_time_limit(load_function(settings.function), episode, settings)
    where = f"reward.function {settings.function!r} returned"
    try:
        values = np.asarray(returned, np.float64)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} {returned!r} for {episode.spec.key}, which are not numbers") from error
    if values.shape != (length,):
        what = "one number per control step" if settings.kind == "function" else "one number per chunk and one for the end"
        raise RewardError(f"{where} shape {list(values.shape)} for {episode.spec.key}; it must be [{length}]: {what}")
    if not np.all(np.isfinite(values)):
        raise RewardError(
            f"{where} {values[~np.isfinite(values)][0]} at index {np.flatnonzero(~np.isfinite(values))[0]} for {episode.spec.key}"
        )
    return values


def _within_time_limit(function: Callable[[Episode], Any], episode: Episode, settings: RewardSettings) -> Any:
    """Call in a thread of its own, so that a function that hangs cannot hang the run; the error shows where it was.

    Python cannot stop a thread. It is a daemon, and the error ends the phase.
    """
    answer: list[Any] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            answer.append(function(episode))
        except BaseException as error:  # noqa: BLE001 - the user's own; raised again in the caller with the function's name
            failure.append(error)

    thread = threading.Thread(target=target, name=f"reward {settings.function}", daemon=True)
    thread.start()
    thread.join(settings.time_limit_s)
    name = f"reward.function {settings.function!r}"
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
        raise RewardError(
            f"{name} took more than reward.time_limit_s = {settings.time_limit_s:g} s for {episode.spec.key}; it was at\n{stack}"
        )
    if failure:
        raise RewardError(f"{name} raised {type(failure[0]).__name__}: {failure[0]} for {episode.spec.key}") from failure[0]
    return answer[0]
