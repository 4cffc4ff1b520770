"""The driver's side of rollouts: deals episodes out to workers, replaces workers that die, and stays as far ahead as is allowed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from vla_rl.cluster.backend import Member, Pending
from vla_rl.cluster.errors import RoleLost
from vla_rl.episode import Episode, EpisodeSpec
from vla_rl.phases.rl_config import RlConfig
from vla_rl.phases.rl_crew import Crew
from vla_rl.phases.rl_episodes import rollout_row
from vla_rl.phases.rl_rollout import RolledEpisode, Rollout, busy_seconds, rollout_metrics
from vla_rl.phases.rl_specs import StepSource, TrainingScenes
from vla_rl.phases.rl_worker import Work
from vla_rl.telemetry.spans import span


@dataclass
class _Post:
    """What one rollout worker is doing."""

    dealt: list[EpisodeSpec] = field(default_factory=list[EpisodeSpec])
    """Episodes that it runs or will run."""
    member: Member | None = None
    """The worker's life to which they were dealt."""
    call: Pending | None = None
    """The `advance` that it is in."""


class Collector:
    """Makes rollouts with whichever workers there are. Which worker runs what changes no bit of it."""

    def __init__(self, config: RlConfig, scenes: TrainingScenes, crew: Crew) -> None:
        self._config, self._scenes, self._crew = config, scenes, crew
        self.stopping = False
        """Set from another thread: the rollout that runs is given up."""
        self._posts = [_Post() for _ in crew.workers]
        self._again: deque[EpisodeSpec] = deque()
        self._rolled: dict[str, RolledEpisode] = {}
        self._made_by: dict[str, int] = {}

    def collect(self, step: int, first_group: int) -> Rollout | None:
        """The episodes of an RL step, by the newest weights; None where it was given up. Raises RoleLost for a worker that keeps dying."""
        started = time.perf_counter()
        source = StepSource(self._scenes, first_group, self._config.algorithm)
        self._rolled, self._made_by = {}, {}
        self._crew.begin()
        while not source.plan().complete:
            if self.stopping:
                return None
            self._deal(source)
            with span("wait_env_and_policy"):
                ended = self._crew.backend.wait_any([post.call for post in self._posts if post.call is not None])
            for worker, post in enumerate(self._posts):
                if post.call is not None and post.call in ended:
                    self._take(worker, post, post.call, source)
        return self._rollout(step, source, started)

    def _deal(self, source: StepSource) -> None:
        """Fill the queues of workers that wait for the driver, the shortest first, and let them run.

        A queue has up to twice the worker's envs, so that none of them waits for the driver.
        """
        waiting = {worker: post for worker, post in enumerate(self._posts) if post.call is None}
        fresh: dict[int, list[EpisodeSpec]] = {worker: [] for worker in waiting}
        while waiting:
            worker = min(waiting, key=lambda worker: len(waiting[worker].dealt))
            full = len(waiting[worker].dealt) >= 2 * self._config.pool.workers
            spec = None if full else self._again.popleft() if self._again else source.next()
            if spec is None:
                break
            waiting[worker].dealt.append(spec)
            fresh[worker].append(spec)
        for worker, post in waiting.items():
            if post.dealt:
                post.member = self._crew.workers[worker]
                post.call = post.member.call("advance", fresh[worker])

    def _take(self, worker: int, post: _Post, call: Pending, source: StepSource) -> None:
        """An episode ended, or its worker did: then another life runs again what was lost."""
        assert post.member is not None, "it was called"
        post.call = None
        try:
            sealed = call.result()
        except RoleLost as loss:
            self._lose(post)
            self._crew.replace(worker, post.member, loss)
            return
        episode, earned = sealed.value
        self._crew.proved_alive(worker)
        post.dealt.remove(episode.spec)
        self._made_by[episode.spec.key] = worker
        self._rolled[episode.spec.key] = RolledEpisode(episode, earned, sealed.payload)
        source.report(episode)
        if self._crew.workers[worker] is not post.member:  # it died after its answer, and was replaced together with another one
            self._lose(post)

    def _lose(self, post: _Post) -> None:
        self._again += post.dealt
        post.dealt = []

    def _rollout(self, step: int, source: StepSource, started: float) -> Rollout:
        rows = [rollout_row(episode, self._rolled[episode.spec.key].earned, step + 1) for episode in source.all_episodes()]
        trained, masked = ([self._rolled.pop(episode.spec.key) for episode in part] for part in source.episodes())
        works = self._finish([*trained, *masked])
        for left_out in self._rolled.values():
            left_out.parcel.release()
        every, wall_s = source.all_episodes(), time.perf_counter() - started
        metrics = rollout_metrics(every, wall_s) | {f"groups_{name}": float(count) for name, count in source.plan().counts.items()}
        forwards = sum(work.forwards for work in works)
        if self._config.vllm is not None:
            metrics["vllm_starts"] = float(sum(work.vllm_starts for work in works))
        metrics["batch_fill"] = _chunks(every) / max(forwards * self._config.rollout_rows, 1)
        seconds = busy_seconds(every) | {"policy_forward": sum(work.busy_s for work in works), "wall": wall_s}
        values = {key: value for work in works for key, value in work.final_values.items()}
        return Rollout(step, trained, masked, values, source.next_group, metrics, seconds, rows)

    def _finish(self, rolled: list[RolledEpisode]) -> list[Work]:
        """End the rollout on every worker; with a critic, each values the ends of the episodes that it ran."""
        has_critic = self._config.algorithm.critic is not None
        unfinished = [one for one in rolled if has_critic and not one.episode.success]
        parcels = [
            [one.parcel for one in unfinished if self._made_by[one.episode.spec.key] == worker] for worker in range(len(self._posts))
        ]
        with span("wait_policy"):
            return self._crew.call_each("finish", [(part,) for part in parcels])


class Rollouts:
    """Rollouts in order of RL steps, made up to `ahead` steps before they are trained on.

    With an executor (one thread) they are made beside the updates; without, when they are due, on the same schedule.
    """

    def __init__(self, collector: Collector, executor: Executor | None, steps: int, ahead: int) -> None:
        self._collector, self._executor, self._steps, self._ahead = collector, executor, steps, ahead
        self._futures: deque[Future[Rollout | None]] = deque()
        self._next_step, self._next_group, self.taken_to_group = 0, 0, 0

    def resume(self, step: int, next_group: int, pending: Iterable[Rollout]) -> None:
        """Go on before RL step `step`, with rollouts that were made and not trained on."""
        for rollout in pending:
            self._futures.append(_done(rollout))
            next_group = rollout.next_group
        self._next_step, self._next_group = step + len(self._futures), next_group
        self.taken_to_group = next_group if not self._futures else 0

    def start_due(self, step: int) -> None:
        """Start what may be made while the trainer stands before update `step`."""
        while self._next_step <= min(step + self._ahead, self._steps - 1):
            number, self._next_step = self._next_step, self._next_step + 1
            self._futures.append(self._executor.submit(self._make, number) if self._executor else _done(self._make(number)))

    def take(self) -> Rollout:
        """The oldest one, waiting for it. Raises what went wrong while it was made."""
        with span("wait_env_and_policy"):
            rollout = self._futures.popleft().result()
        assert rollout is not None, "only a run that ends gives rollouts up"
        self.taken_to_group = rollout.next_group
        return rollout

    def made(self) -> tuple[list[Rollout], int]:
        """Those that nobody has taken, as far as they are whole, and the first group after them."""
        rollouts: list[Rollout] = []
        for future in self._futures:
            if not future.done() or future.exception() is not None or (rollout := future.result()) is None:
                break  # what went wrong is raised where the rollout is taken; the step that is being saved is whole
            rollouts.append(rollout)
        return rollouts, rollouts[-1].next_group if rollouts else self.taken_to_group

    def close(self) -> None:
        """Give up the one that runs, and wait until it is."""
        self._collector.stopping = True
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> Rollout | None:
        rollout = self._collector.collect(step, self._next_group)
        if rollout is not None:
            self._next_group = rollout.next_group
        return rollout


def _done(rollout: Rollout | None) -> Future[Rollout | None]:
    future: Future[Rollout | None] = Future()
    future.set_result(rollout)
    return future


def _chunks(episodes: Iterable[Episode]) -> int:
    return sum(len(episode.steps) for episode in episodes)
