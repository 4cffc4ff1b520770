"""Which episodes an RL step consists of: groups that share task and scene, handed out and refilled in spec order.

Which specs a step runs depends on (recipe, number of the first group, outcomes in spec order), and never on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vla_rl.algorithms.config import AlgorithmConfig
from vla_rl.algorithms.filters import SamplingPlan, Verdict, judge, plan_sampling
from vla_rl.config import ConfigError
from vla_rl.episode import SPLITS, Episode, EpisodeSpec, Outcome, StepProtocol
from vla_rl.eval.config import EvalConfig
from vla_rl.eval.plan import task_indices
from vla_rl.eval.protocol import get_protocol
from vla_rl.phases.rl_config import RlConfig

SCENES_PER_SEED = 20_000
"""Training scenes of each task that belong to one seed of a recipe."""


class TrainingScenes:
    """Group number -> specs: tasks take turns, every group has a scene of its own, from the seeds of split `train`."""

    def __init__(self, suite: str, tasks: Sequence[int], protocol: StepProtocol, group_size: int, seed: int) -> None:
        self.group_size = group_size
        self._suite, self._tasks, self._protocol, self._seed = suite, list(tasks), protocol, seed

    def group(self, number: int) -> list[EpisodeSpec]:
        """The members of a group; they differ in the policy's noise only. Raises ConfigError when the seed's scenes are used up."""
        scene, task = divmod(number, len(self._tasks))
        if scene >= SCENES_PER_SEED:
            raise ConfigError(f"the {SCENES_PER_SEED} training scenes of seed {self._seed} are used up; go on with another seed")
        init = f"sampled:{SPLITS['train'].start + self._seed * SCENES_PER_SEED + scene}"
        return [
            EpisodeSpec(self._suite, self._tasks[task], init, "train", self._protocol, sample=member) for member in range(self.group_size)
        ]


class StepSource:
    """The `SpecSource` of one RL step. Where groups are filtered with `refill`, a rejected group calls for another one."""

    def __init__(self, scenes: TrainingScenes, first_group: int, algorithm: AlgorithmConfig) -> None:
        self._scenes, self._first, self._algorithm = scenes, first_group, algorithm
        self._queue: list[EpisodeSpec] = []
        self._place: dict[str, int] = {}
        self._ended: list[list[Episode]] = []
        self._issue_up_to(algorithm.groups_per_step)

    def next(self) -> EpisodeSpec | None:
        """The next spec in order; None when none is wanted now."""
        return self._queue.pop(0) if self._queue else None

    def report(self, episode: Episode) -> None:
        """Take the outcome in; a group that ends may call for another one."""
        self._ended[self._place[episode.spec.key]].append(episode)
        self._issue_up_to(self.plan().issue)

    @property
    def next_group(self) -> int:
        """Number of the first group that this step did not use."""
        return self._first + len(self._ended)

    def plan(self) -> SamplingPlan:
        """Where the sampling stands."""
        verdicts = [self._verdict(group) for group in self._ended]
        if self._algorithm.group is not None:
            return plan_sampling(verdicts, self._algorithm.groups_per_step, self._algorithm.group.filter)
        every = tuple(range(len(verdicts)))
        return SamplingPlan(issue=len(every), complete=None not in verdicts, train=every, masked=(), counts={})

    def episodes(self) -> tuple[list[Episode], list[Episode]]:
        """(episodes to train on with their weights, episodes to train on with weight 0), in spec order, crashes left out.

        Raises RuntimeError while groups are running.
        """
        plan = self.plan()
        if not plan.complete:
            raise RuntimeError("episodes were asked for while groups are running; run the source to its end first")
        kept = [self._of_group(group) for group in plan.train if group not in plan.masked]
        masked = [self._of_group(group) for group in plan.masked]
        return [episode for group in kept for episode in group], [episode for group in masked for episode in group]

    def all_episodes(self) -> list[Episode]:
        """Every episode that ended, crashes included, in spec order."""
        return [episode for group in self._ended for episode in sorted(group, key=lambda e: e.spec.sample)]

    def _of_group(self, group: int) -> list[Episode]:
        finished = [episode for episode in self._ended[group] if episode.outcome is not Outcome.CRASH]
        return sorted(finished, key=lambda episode: episode.spec.sample)

    def _verdict(self, group: Sequence[Episode]) -> Verdict | None:
        if len(group) < self._scenes.group_size:
            return None
        finished = [episode.success for episode in group if episode.outcome is not Outcome.CRASH]
        return judge(finished, self._algorithm.group.filter) if self._algorithm.group is not None else Verdict.KEPT

    def _issue_up_to(self, groups: int) -> None:
        while len(self._ended) < groups:
            specs = self._scenes.group(self._first + len(self._ended))
            self._place |= {spec.key: len(self._ended) for spec in specs}
            self._ended.append([])
            self._queue += specs


def training_scenes(config: RlConfig) -> TrainingScenes:
    """The scenes of a recipe. Raises SpecError or ConfigError for a suite or task that does not exist."""
    asked = EvalConfig(run_dir=config.run_dir, suite=config.suite, tasks=config.tasks, protocol="sampled", actor="noop", env=config.env)
    protocol = get_protocol("sampled").step_protocol(config.suite)
    if config.max_steps is not None:
        protocol = replace(protocol, max_steps=config.max_steps)
    size = 1 if config.algorithm.group is None else config.algorithm.group.size
    return TrainingScenes(config.suite, task_indices(asked), protocol, size, config.seed)
