"""The scripted operator: a scripted expert that takes over from the policy and hands back, without a person.

When it does so depends on (spec, how often it has switched) alone, so that a recipe gives the same episodes every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.actors import Expert
from vla_rl.collection.devices.base import Event, Reading
from vla_rl.episode import EpisodeSpec, Observation, noise_seed


@dataclass(frozen=True)
class Switching:
    """When the scripted operator takes over, and for how long. Part of a recipe."""

    policy_steps: tuple[int, int] = (0, 40)
    """Fewest and most control steps that the policy acts before the operator takes over, drawn anew each time; at least 0."""
    operator_steps: tuple[int, int] | None = None
    """Fewest and most control steps that the operator acts before it hands back, at least 1; none: to the end of the episode."""

    def __post_init__(self) -> None:
        for name, least in (("policy_steps", 0), ("operator_steps", 1)):
            bounds = getattr(self, name)
            if bounds is not None and not least <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name} is {list(bounds)}, must be [fewest, most] with {least} <= fewest <= most")

    def length(self, spec: EpisodeSpec, phase: int) -> int | None:
        """Control steps of phase `phase` of an episode (even: the policy acts, odd: the operator); None: to its end."""
        bounds = self.policy_steps if phase % 2 == 0 else self.operator_steps
        if bounds is None:
            return None
        generator = np.random.default_rng(noise_seed(spec, phase, "take over"))
        return int(generator.integers(bounds[0], bounds[1] + 1))


@dataclass
class _Phase:
    spec: EpisodeSpec
    number: int = 0
    left: int | None = 0
    """Control steps until the next switch; None: no more."""


class ScriptedOperator:
    """A `Device` whose hand is a scripted expert, made anew at each take-over: it meets a scene that the policy has changed."""

    def __init__(self, switching: Switching, make_expert: Callable[[EpisodeSpec], Expert]) -> None:
        self._switching, self._make_expert = switching, make_expert
        self._phases: dict[int, _Phase] = {}
        self._experts: dict[int, Expert] = {}

    def begin(self, env: int, spec: EpisodeSpec) -> None:
        """An episode starts in `env`, with the policy."""
        self._phases[env] = _Phase(spec, 0, self._switching.length(spec, 0))
        self._next_phase_if_due(self._phases[env])

    def wants_control(self, env: int) -> bool:
        """Whether it should be the one who acts next."""
        return self._phases[env].number % 2 == 1

    def steps_left(self, env: int) -> int | None:
        """Control steps until who acts changes; None: no more in this episode."""
        return self._phases[env].left

    def stepped(self, env: int, steps: int) -> None:
        """`steps` control steps were executed, whoever acted."""
        phase = self._phases[env]
        if phase.left is not None:
            phase.left -= steps
            self._next_phase_if_due(phase)

    def take(self, env: int, spec: EpisodeSpec, gripper: float) -> None:
        """See `Device.take`."""
        self._experts[env] = self._make_expert(spec)

    def read(self, env: int, observation: Observation) -> Reading:
        """See `Device.read`; the observation carries privileged information."""
        action_A, label_A = self._experts[env].act(observation)
        return Reading(action_A, label_A)

    def events(self) -> Sequence[Event]:
        """None: it takes over through `wants_control`, and the simulator judges."""
        return ()

    def close(self) -> None:
        """Forget all episodes."""
        self._phases.clear()
        self._experts.clear()

    def _next_phase_if_due(self, phase: _Phase) -> None:
        while phase.left is not None and phase.left <= 0:
            phase.number += 1
            phase.left = self._switching.length(phase.spec, phase.number)
