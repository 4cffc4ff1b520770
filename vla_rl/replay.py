"""`vla-rl replay`: recorded actions once more, from the recorded scene, and how far the simulator goes astray.

A recording of our own replays with state error 0 and the same outcome, whatever machine it runs on, because the executed
actions, the scene's seed and the versions are in the file. Anything else names where it begins to differ.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.collection.control import BY_OPERATOR
from vla_rl.collection.recorder import fill_frames
from vla_rl.config import ConfigError
from vla_rl.conventions import PromptSource
from vla_rl.datasets.edit import new_folder, removed_steps
from vla_rl.datasets.episode_rows import EpisodeInfo, rows_of
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import EpisodeStore, list_episodes, require_some
from vla_rl.episode import Episode, Float64, Outcome
from vla_rl.sim.base import Env, EnvConfig, Look
from vla_rl.sim.factory import make_env
from vla_rl.telemetry.files import write_text


@dataclass(frozen=True)
class Replayed:
    """One episode, executed again."""

    number: int
    """Position in the dataset."""
    info: EpisodeInfo
    errors_N: Float64
    """float64[N]: largest difference of a joint position or velocity before each action (m, rad, m/s, rad/s)."""
    outcome: Outcome
    """What the simulator says that it came to now."""
    by_operator: bool
    """Whether a person said what the recorded episode came to: that is not the simulator's word, and need not agree with it."""

    @property
    def same(self) -> bool:
        """Whether it happened again bit for bit, with the same outcome where the simulator had judged."""
        judged = self.info.outcome in (Outcome.SUCCESS, Outcome.FAILURE) and not self.by_operator
        return not self.errors_N.any() and (self.outcome is self.info.outcome or not judged)

    def line(self) -> str:
        """For the terminal."""
        astray = np.flatnonzero(self.errors_N)
        where = f", begins at control step {astray[0]}" if len(astray) else ""
        who = "the operator said" if self.by_operator else "recorded"
        same = "" if self.outcome is self.info.outcome else f" ({who}: {self.info.outcome.value})"
        error = f"largest state error {self.errors_N.max():.3g}{where}"
        return f"{self.number:>5}  {self.info.spec.key}: {len(self.errors_N)} steps, {error}, {self.outcome.value}{same}"


def main(arguments: Sequence[str]) -> int:
    """Replay a dataset; 0 if every episode happened again exactly, 1 if not."""
    parser = argparse.ArgumentParser(prog="vla-rl replay", description="Execute recorded actions again and compare every state.")
    parser.add_argument("dataset", nargs="+", help="HDF5 files, folders of them, LeRobot folders, or collect runs")
    parser.add_argument("--episodes", type=int, nargs="+", help="positions in the dataset (default: all)")
    parser.add_argument("--csv", type=Path, help="write the state error of every control step here")
    parser.add_argument("--fill-into", type=Path, help="write the episodes with a picture before every step into this folder (HDF5)")
    options = parser.parse_args(arguments)
    infos = list_episodes(options.dataset)
    require_some(infos)
    chosen = range(len(infos)) if options.episodes is None else options.episodes
    beyond = [number for number in chosen if number not in range(len(infos))]
    if beyond:
        raise ConfigError(f"--episodes has {beyond[0]}; the dataset has episodes 0 to {len(infos) - 1}")
    if options.fill_into is not None:
        with new_folder(options.fill_into):
            return _fill([infos[number] for number in chosen], options.fill_into)
    return _report(list(_replay_all(infos, chosen)), options.csv)


def _replay_all(infos: Sequence[EpisodeInfo], chosen: Sequence[int]) -> Iterator[Replayed]:
    """Replay and print, one line an episode as it ends."""
    envs = Envs()
    with closing(envs):
        for number in chosen:
            replayed = replay(number, infos[number], load_episode(infos[number]), envs)
            print(replayed.line(), flush=True)
            yield replayed


def _report(replayed: Sequence[Replayed], csv: Path | None) -> int:
    same = sum(entry.same for entry in replayed)
    print(f"{same} of {len(replayed)} episodes replay exactly: state error 0 at every step, same outcome")
    if csv is not None:
        rows = [f"{entry.number},{t},{error!r}" for entry in replayed for t, error in enumerate(entry.errors_N.tolist())]
        write_text(csv, "\n".join(["episode,control_step,state_error", *rows]) + "\n")
        print(csv)
    return 0 if same == len(replayed) else 1


def _fill(infos: Sequence[EpisodeInfo], folder: Path) -> int:
    envs, store = Envs(), EpisodeStore(folder)
    with closing(envs), store.writing():
        for number, info in enumerate(infos):
            episode = load_episode(info)
            require_replayable(info, episode)
            store.write(number, fill_frames(episode, envs.of(info, episode)), frame_every=1)
    print(f"{len(infos)} episodes with a picture before every step in {folder}")
    return 0


class Envs:
    """One env for each kind of recording, made when it is first needed."""

    def __init__(self) -> None:
        self._envs: dict[EnvConfig, Env] = {}

    def of(self, info: EpisodeInfo, episode: Episode) -> Env:
        """The env that an episode was recorded in."""
        recorded = episode.provenance["env"]
        config = EnvConfig(
            kind=recorded["kind"],
            resolution=info.resolution,
            render_profile=recorded["render_profile"],
            orientation=info.conventions.orientation,
            prompt_source=PromptSource(recorded.get("prompt_source", PromptSource.SUITE.value)),
            packaging=recorded.get("packaging_name", EnvConfig.packaging),
        )
        if config not in self._envs:
            self._envs[config] = make_env(config)
        return self._envs[config]

    def close(self) -> None:
        """Close them."""
        while self._envs:
            self._envs.popitem()[1].close()


def replay(number: int, info: EpisodeInfo, episode: Episode, envs: Envs) -> Replayed:
    """Execute an episode's actions again. Raises DatasetError for one whose scene cannot be restored."""
    require_replayable(info, episode)
    env = envs.of(info, episode)
    env.reset(episode.spec, Look(record_states=True))
    states, ended, success = [], False, False
    for step in episode.steps:
        if ended:
            break
        reply = env.step_chunk(step.executed_EA)
        assert reply.sim_states_ED is not None, "asked for in Look"
        states.append(reply.sim_states_ED)
        ended, success = reply.terminated or reply.truncated, reply.terminated
    errors_N = state_errors(rows_of(episode, "sim_states_ED"), np.concatenate(states))
    return Replayed(number, info, errors_N, Outcome.SUCCESS if success else Outcome.FAILURE, episode.reason == BY_OPERATOR)


def state_errors(recorded_ND: Float64, now_ND: Float64) -> Float64:
    """float64[N]: largest difference of each row but for its time; infinite where the replay ended earlier or has other joints."""
    errors_N = np.full(len(recorded_ND), np.inf)
    if recorded_ND.shape[1] == now_ND.shape[1]:
        count = min(len(recorded_ND), len(now_ND))
        errors_N[:count] = np.abs(recorded_ND[:count, 1:] - now_ND[:count, 1:]).max(axis=1)
    return errors_N


def require_replayable(info: EpisodeInfo, episode: Episode) -> None:
    """Raise DatasetError for an episode whose scene or steps are not all there."""
    removed = removed_steps(episode.provenance)
    if removed:
        raise DatasetError(f"{info.name}: {len(removed)} steps were filtered out of it, so it cannot happen again; replay the original")
    if "env" not in episode.provenance:
        raise DatasetError(f"{info.name}: does not say in which environment it was recorded; the scene of imported data cannot be restored")
