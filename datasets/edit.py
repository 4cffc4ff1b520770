"""From datasets to other datasets: converting, merging, filtering. Provenance stays, and what was taken out is added to it.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_rl.datasets.episode_rows import (
    Ending,
    EpisodeInfo,
    EpisodeRows,
    build_steps,
    chunk_columns,
    has_states,
    require_alike,
    rows_of,
)
from vla_rl.datasets.episodes import load_actions, load_episode
from vla_rl.datasets.lerobot_catalog import open_catalog
from vla_rl.datasets.lerobot_copy import copy_episode, in_files, kept_pictures
from vla_rl.datasets.lerobot_format import ROBOT_STATE, Pictures
from vla_rl.datasets.lerobot_parts import EpisodeParts, parts_of
from vla_rl.datasets.lerobot_read import LeRobotInfo
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.samples import NO_OP_MOTION
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.store import EpisodeStore, list_episodes, merge, require_some
from vla_rl.episode import Bool, Episode, Float32, Outcome

Target = Literal["hdf5", "lerobot"]


@dataclass(frozen=True)
class Edited:
    """What an edit wrote."""

    folder: Path
    episodes: int
    steps: int
    dropped_episodes: int = 0
    dropped_steps: int = 0
    notes: tuple[str, ...] = ()
    """What the target cannot hold, or holds otherwise."""


def format_of(infos: Sequence[EpisodeInfo]) -> Target:
    """The one format of some episodes. Raises DatasetError for a mixture, or none at all."""
    require_some(infos)
    formats = {isinstance(info, LeRobotInfo) for info in infos}
    if len(formats) != 1:
        raise DatasetError("HDF5 files and LeRobot folders together: bring them to one format first (vla-rl data convert)")
    return "lerobot" if formats.pop() else "hdf5"


def require_new(folder: Path) -> None:
    """Raise DatasetError unless nothing is in a folder yet."""
    if folder.exists() and any(folder.iterdir()):
        raise DatasetError(f"{folder}: is not empty; name a new folder, datasets are never changed in place")


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """A folder for what the block writes: all of it, or nothing, so that the same command can be given again.

    Raises DatasetError unless nothing is in it yet.
    """
    require_new(folder)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def convert(paths: Sequence[str | Path], folder: Path, target: Target, pictures: Pictures | None = None) -> Edited:
    """Write the episodes of `paths` in another format (or LeRobot's with other pictures, or its v3 from v2).

    Raises DatasetError for episodes that the target cannot hold; then nothing is left in `folder`.
    """
    infos = list_episodes(paths)
    source = format_of(infos)
    if target == "hdf5" and pictures is not None:
        raise DatasetError("--pictures is about LeRobot's format; HDF5 keeps pictures as they are")
    with new_folder(folder):
        if target == "hdf5":
            return _to_hdf5(infos, folder)
        if source == "lerobot" and (pictures is None or set(_pictures_of(infos).values()) == {pictures}):
            return _copy_folders(infos, folder, _same_pictures(infos))
        return _to_lerobot(infos, folder, pictures or "png")


def _to_hdf5(infos: Sequence[EpisodeInfo], folder: Path) -> Edited:
    without = _without_states(infos)
    if without:
        raise DatasetError(
            f"{len(without)} of {len(infos)} episodes have no simulator states and joint positions ({without[0]} ...), which LIBERO's "
            "schema holds for every step; train on the LeRobot folder as it is"
        )
    store = EpisodeStore(folder)
    with store.writing():
        for number, info in enumerate(infos):
            store.write(number, load_episode(info), info.frame_every)
    videos = any(isinstance(info, LeRobotInfo) and info.entry.videos for info in infos)
    notes = ["pictures are those that the video shows: what its codec lost is not there"] if videos else []
    notes += ["per-episode statistics and the fps of the folder have no place in HDF5; both follow from the data"]
    return _edited(folder, infos, notes)


def _without_states(infos: Sequence[EpisodeInfo]) -> list[str]:
    """Names of the episodes of LeRobot folders that do not carry what replays them."""
    folders = {info.path for info in infos if isinstance(info, LeRobotInfo)}
    bare = {folder for folder in folders if ROBOT_STATE not in open_catalog(folder).info["features"]}
    return [info.name for info in infos if info.path in bare]


def _to_lerobot(infos: Sequence[EpisodeInfo], folder: Path, pictures: Pictures) -> Edited:
    sparse = [info for info in infos if info.frame_every != 1]
    if sparse:
        raise DatasetError(
            f"{len(sparse)} of {len(infos)} episodes have pictures before every {sparse[0].frame_every}. step only ({sparse[0].name} ...); "
            "LeRobot has one in every row: fill them in with vla-rl replay DATASET --fill-into FOLDER, or record with frame_every: 1"
        )
    store = LeRobotStore(folder, pictures)
    with store.writing():
        for number, info in enumerate(infos):
            store.write(number, load_episode(info), frame_every=1)
    lossy = [f"pictures went through {pictures}, which is lossy; --pictures png keeps every bit"] if pictures != "png" else []
    return _edited(folder, infos, lossy)


def _copy_folders(infos: Sequence[EpisodeInfo], folder: Path, pictures: Pictures) -> Edited:
    """LeRobot to LeRobot without touching a picture, several episodes to a file."""
    store = LeRobotStore(folder, pictures)
    with store.writing():
        for group in in_files(_copies(infos)):
            store.append(group)
    published = any(isinstance(info, LeRobotInfo) and not info.layout.ours for info in infos)
    notes = ["outcomes are taken as successes, and scenes cannot be restored: nobody published their seeds"] if published else []
    return _edited(folder, infos, notes)


def _copies(infos: Sequence[EpisodeInfo]) -> Iterator[EpisodeParts]:
    catalogs = {path: open_catalog(path) for path in {info.path for info in infos}}
    for number, info in enumerate(infos):
        if isinstance(info, LeRobotInfo):
            yield copy_episode(info, catalogs[info.path], number)


def _edited(folder: Path, infos: Sequence[EpisodeInfo], notes: Sequence[str] = ()) -> Edited:
    return Edited(folder, len(infos), sum(info.num_steps for info in infos), notes=tuple(notes))


def merge_datasets(paths: Sequence[str | Path], folder: Path) -> Edited:
    """Several datasets of one format as one: LIBERO's file per task from HDF5, a folder with large files from LeRobot.

    Raises DatasetError for datasets that do not go together; then nothing is left in `folder`.
    """
    infos = list_episodes(paths)
    format = format_of(infos)
    require_alike(infos)
    with new_folder(folder):
        if format == "lerobot":
            return _copy_folders(infos, folder, _same_pictures(infos))
        merge(paths, folder)
        return _edited(folder, infos)


def _pictures_of(infos: Sequence[EpisodeInfo]) -> dict[Path, Pictures]:
    """LeRobot folder -> how it keeps its pictures."""
    return {path: kept_pictures(open_catalog(path)) for path in dict.fromkeys(info.path for info in infos)}


def _same_pictures(infos: Sequence[EpisodeInfo]) -> Pictures:
    """How the folders of some episodes keep their pictures. Raises DatasetError where they differ."""
    kinds = _pictures_of(infos)
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{path}: {kind}" for path, kind in kinds.items())
        raise DatasetError(f"pictures are kept in different ways ({listed}); convert to one with vla-rl data convert --pictures")
    return next(iter(kinds.values()))


@dataclass(frozen=True)
class Filter:
    """What is left out of a copy of a dataset."""

    no_ops: bool = False
    """Steps that move nothing: motion below `NO_OP_MOTION` and the gripper as at the last step that stays (OpenVLA's rule)."""
    failures: bool = False
    """Episodes that did not reach their goal."""
    tasks: tuple[str, ...] = ()
    """Keep only these: `SUITE:TASK`, or an instruction; empty keeps all."""
    without_numbers: tuple[int, ...] = ()
    """Episodes to leave out, by their position in the list that `vla-rl data inspect` prints."""

    def keeps(self, number: int, info: EpisodeInfo) -> bool:
        """Whether an episode stays."""
        wanted = not self.tasks or f"{info.spec.suite}:{info.spec.task}" in self.tasks or info.prompt in self.tasks
        return wanted and number not in self.without_numbers and not (self.failures and info.outcome is not Outcome.SUCCESS)


def filter_dataset(paths: Sequence[str | Path], folder: Path, rule: Filter) -> Edited:
    """A copy without what `rule` names, in the same format; `provenance.filtered` of each episode says what is gone.

    Raises DatasetError when nothing would be left, a task or number does not exist, or steps cannot be taken out.
    """
    infos = list_episodes(paths)
    require_new(folder)
    _require_known(infos, rule)
    kept = {number: info for number, info in enumerate(infos) if rule.keeps(number, info)}
    if not kept:
        raise DatasetError(f"nothing is left of {len(infos)} episodes; loosen the filter")
    keep_N = _steps_that_stay(kept, rule)
    with new_folder(folder):
        _write_filtered(kept, keep_N, folder, rule)
    steps = sum(int(stay_N.sum()) for stay_N in keep_N.values())
    dropped_steps = sum(info.num_steps for info in kept.values()) - steps
    return Edited(folder, len(kept), steps, len(infos) - len(kept), dropped_steps)


def _steps_that_stay(kept: Mapping[int, EpisodeInfo], rule: Filter) -> dict[int, Bool]:
    """Episode -> bool[N]. Raises DatasetError for episodes that cannot lose steps, or would lose all of them."""
    if not rule.no_ops:
        return {number: np.ones(info.num_steps, np.bool_) for number, info in kept.items()}
    if any(info.frame_every != 1 for info in kept.values()):
        raise DatasetError("steps cannot be taken out of episodes with sparse pictures; fill them in first (vla-rl replay --fill-into)")
    keep_N = {number: moving_steps(load_actions(info)) for number, info in kept.items()}
    still = [number for number, stay_N in keep_N.items() if not stay_N.any()]
    if still:
        raise DatasetError(
            f"{kept[still[0]].name}: all {kept[still[0]].num_steps} actions are no-ops; "
            f"leave such episodes out with --without-numbers {' '.join(map(str, still))}"
        )
    return keep_N


def _write_filtered(kept: Mapping[int, EpisodeInfo], keep_N: Mapping[int, Bool], folder: Path, rule: Filter) -> None:
    lerobot = format_of(list(kept.values())) == "lerobot"
    store = LeRobotStore(folder, _same_pictures(list(kept.values()))) if lerobot else EpisodeStore(folder)
    with store.writing():
        for position, (number, info) in enumerate(kept.items()):
            if isinstance(store, LeRobotStore) and isinstance(info, LeRobotInfo) and keep_N[number].all():
                store.append([_noted_copy(info, position, rule)])
                continue
            episode = _filtered(load_episode(info), keep_N[number], info, rule)
            if isinstance(store, LeRobotStore) and isinstance(info, LeRobotInfo):
                store.append([parts_of(position, episode, store.pictures, info.fps)])
            else:
                store.write(position, episode, info.frame_every)


def _require_known(infos: Sequence[EpisodeInfo], rule: Filter) -> None:
    tasks = {f"{info.spec.suite}:{info.spec.task}" for info in infos}
    unknown = [task for task in rule.tasks if task not in tasks and task not in {info.prompt for info in infos}]
    if unknown:
        raise DatasetError(f"no task {unknown[0]!r} here; there are {', '.join(sorted(tasks))}")
    beyond = [number for number in rule.without_numbers if number not in range(len(infos))]
    if beyond:
        raise DatasetError(f"no episode {beyond[0]}; there are 0 to {len(infos) - 1}")


def moving_steps(actions_NA: Float32) -> Bool:
    """bool[N]: steps that move the arm, or the gripper against the last step that stays (`regenerate_libero_dataset.py`)."""
    keep_N = np.linalg.norm(actions_NA[:, :6], axis=1) >= NO_OP_MOTION
    gripper = None
    for t, action in enumerate(actions_NA):
        keep_N[t] = keep_N[t] or (gripper is not None and action[6] != gripper)
        gripper = action[6] if keep_N[t] or gripper is None else gripper
    return keep_N


def _note(info: EpisodeInfo, rule: Filter, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What `provenance.filtered` says; the note of an earlier filter stays in it."""
    earlier = {"earlier": provenance["filtered"]} if "filtered" in provenance else {}
    return {"from": info.name, "no_ops": rule.no_ops, "failures": rule.failures, "tasks": list(rule.tasks), **earlier}


def removed_steps(provenance: Mapping[str, Any]) -> list[int]:
    """The control steps that filters have taken out of an episode, by its numbers at that time."""
    note, removed = provenance.get("filtered"), []
    while note is not None:
        removed += note.get("removed_steps", [])
        note = note.get("earlier")
    return removed


def _noted_copy(info: LeRobotInfo, number: int, rule: Filter) -> EpisodeParts:
    """A whole episode as it is stored (video is not encoded again), and the note about where it comes from."""
    parts = copy_episode(info, open_catalog(info.path), number)
    provenance = json.loads(parts.description["provenance"])
    noted = provenance | {"filtered": _note(info, rule, provenance)}
    return replace(parts, description={**parts.description, "provenance": json.dumps(noted)})


def _filtered(episode: Episode, keep_N: Bool, info: EpisodeInfo, rule: Filter) -> Episode:
    """The episode without some steps, and the note about it."""
    note = _note(info, rule, episode.provenance)
    if keep_N.all():
        return replace(episode, provenance={**episode.provenance, "filtered": note})
    note["removed_steps"] = np.flatnonzero(~keep_N).tolist()
    return replace(drop_steps(episode, keep_N), provenance={**episode.provenance, "filtered": note})


def drop_steps(episode: Episode, keep_N: Bool) -> Episode:
    """The episode's steps that `keep_N` marks, pictures and states included; chunks become shorter, empty ones go."""
    lengths_T, versions_T = chunk_columns(episode)
    chunk_of_N = np.repeat(np.arange(len(lengths_T)), lengths_T)
    lengths_T = np.bincount(chunk_of_N[keep_N], minlength=len(lengths_T))
    kept_steps = np.flatnonzero(keep_N)
    frames = {row: episode.frames()[t] for row, t in enumerate(kept_steps.tolist()) if t in episode.frames()}
    rows = EpisodeRows(
        executed_NA=episode.actions_NA()[keep_N],
        labels_NA=episode.labels_NA()[keep_N],
        reward_N=rows_of(episode, "reward_E")[keep_N],
        intervention_N=rows_of(episode, "intervention_E")[keep_N],
        observed_NS=np.stack([frame.state for frame in frames.values()]),
        sim_states_ND=rows_of(episode, "sim_states_ED")[keep_N] if has_states(episode) else None,
        robot_states_NR=rows_of(episode, "robot_states_ER")[keep_N] if has_states(episode) else None,
        chunk_lengths_T=lengths_T[lengths_T > 0],
        weights_version_T=versions_T[lengths_T > 0],
    )
    last, prompt = episode.steps[-1], episode.steps[0].observation.prompt
    return replace(episode, steps=build_steps(rows, frames, prompt, Ending(last.success, last.terminated, last.truncated)))
