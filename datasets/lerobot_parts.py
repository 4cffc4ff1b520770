"""One episode as the parts that a LeRobot folder keeps of it, before it is decided which file they go to.

Shape legend: see `vla_rl/episode.py`; F pictures of an episode, V views.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from vla_rl.conventions import Conventions
from vla_rl.datasets import lerobot_format as names
from vla_rl.datasets.episode_rows import chunk_columns, conventions_of, has_states, observed_states_of, prompt_of, required_frames, rows_of
from vla_rl.datasets.lerobot_format import IMAGE_FEATURES, Pictures
from vla_rl.datasets.png import encode_png
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.tally import count_values
from vla_rl.datasets.video import encode_video
from vla_rl.episode import VIEWS, Episode, Int64, Observation

PICTURE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""How Hugging Face's datasets store a picture in a column."""


@dataclass(frozen=True)
class EpisodeParts:
    """What is stored of one episode."""

    prompt: str
    """Its instruction."""
    table: pa.Table
    """One row per control step: every feature but videos and `POSITIONS`."""
    videos: Mapping[str, bytes]
    """Feature -> mp4 file of just this episode."""
    value_counts: Mapping[str, Int64]
    """Picture feature -> int64[3, 256], see `tally.count_values`."""
    description: Mapping[str, Any]
    """Our columns of the episode's row in `meta/episodes`: number, spec, outcome, provenance ..."""
    features: Mapping[str, Mapping[str, Any]]
    """`features` of the folder that it belongs to."""
    fps: int
    conventions: Conventions
    replay: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The episode's row in `replay/`; empty where the simulator's states are not known."""

    @property
    def num_steps(self) -> int:
        """N, control steps."""
        return self.table.num_rows


def parts_of(number: int, episode: Episode, pictures: Pictures, fps: int | None = None) -> EpisodeParts:
    """The parts of an episode; one without simulator states (of others) has no column for the robot's and cannot be replayed.

    fps: rows per second that the folder declares; None: the control rate. Raises DatasetError for what the format cannot hold: a
    control step without picture or states, several instructions.
    """
    conventions, replayable = conventions_of(episode), has_states(episode)
    frames = required_frames(episode, frame_every=1)
    stacks = {view: np.stack([frame.images[view] for frame in frames.values()]) for view in VIEWS}
    resolution, fps = stacks[VIEWS[0]].shape[1], fps or conventions.control_rate_hz
    columns: dict[str, pa.Array] = {}
    videos: dict[str, bytes] = {}
    for view, feature in IMAGE_FEATURES.items():
        if pictures == "png":
            columns[feature] = picture_column([encode_png(picture) for picture in stacks[view]])
        else:
            videos[feature] = encode_video(stacks[view], fps, names.VIDEO_OF[pictures])
    features = names.data_features(pictures, resolution, fps)
    return EpisodeParts(
        prompt=prompt_of(episode),
        table=pa.table(columns | _numbers(episode)),
        videos=videos,
        value_counts={feature: count_values(stacks[view]) for view, feature in IMAGE_FEATURES.items()},
        description=_description(number, episode),
        features={name: feature for name, feature in features.items() if replayable or name != names.ROBOT_STATE},
        fps=fps,
        conventions=conventions,
        replay=_replay(episode) if replayable else {},
    )


def picture_column(files: list[bytes]) -> pa.Array:
    """A column of PNG files."""
    return pa.StructArray.from_arrays([pa.array(files, pa.binary()), pa.nulls(len(files), pa.string())], fields=list(PICTURE_TYPE))


def vector_column(rows_ND: np.ndarray) -> pa.Array:
    """A column of vectors of one length."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows_ND).reshape(-1)), rows_ND.shape[1])


def _numbers(episode: Episode) -> dict[str, pa.Array]:
    rewards_N = rows_of(episode, "reward_E")
    done_N = np.zeros(episode.num_steps, np.bool_)
    done_N[-1] = True
    replayable = has_states(episode)
    observed = observed_states_of(episode) if replayable else np.stack([frame.state for frame in episode.frames().values()])
    robot = {names.ROBOT_STATE: vector_column(rows_of(episode, "robot_states_ER"))} if replayable else {}
    return {
        names.STATE: vector_column(observed),
        names.ACTION: vector_column(episode.actions_NA()),
        names.LABEL: vector_column(episode.labels_NA()),
        **robot,
        names.INTERVENTION: pa.array(rows_of(episode, "intervention_E")),
        names.REWARD: pa.array(rewards_N.astype(np.float32)),
        names.SUCCESS: pa.array(rewards_N == 1),
        names.DONE: pa.array(done_N),
    }


def _description(number: int, episode: Episode) -> dict[str, Any]:
    """Columns of our own; those that say the same as `spec` are there to be filtered by."""
    spec, last = episode.spec, episode.steps[-1]
    return {
        "number": number,
        "outcome": episode.outcome.value,
        "reason": episode.reason,
        "suite": spec.suite,
        "suite_task": spec.task,
        "init": spec.init,
        "seed": spec.scene_seed,
        "ended_in_success": last.success,
        "terminated": last.terminated,
        "truncated": last.truncated,
        "spec": json.dumps(spec.to_dict()),
        "provenance": json.dumps(dict(episode.provenance)),
    }


def _replay(episode: Episode) -> dict[str, Any]:
    """What LeRobot's rows have no place for: simulator states (their width differs by task), chunks, and what came after the end."""
    states_ND = rows_of(episode, "sim_states_ED")
    lengths_T, versions_T = chunk_columns(episode)
    final = episode.final_observation
    return {
        "simulator_states": states_ND.reshape(-1).tolist(),
        "simulator_state_dim": states_ND.shape[1],
        "chunk_lengths": lengths_T.tolist(),
        "chunk_weights_version": versions_T.tolist(),
        "final_state": None if final is None else final.state.tolist(),
        **{f"final_{view}": _final_picture(final, view) for view in VIEWS},
    }


def _final_picture(final: Observation | None, view: str) -> bytes | None:
    return encode_png(final.images[view]) if final is not None and view in final.images else None


def replay_schema(picture_features: Sequence[str]) -> pa.Schema:
    """Columns of `replay/`."""
    integers, floats = pa.list_(pa.int64()), pa.list_(pa.float32())
    return pa.schema(
        {
            "episode_index": pa.int64(),
            "simulator_states": pa.list_(pa.float64()),
            "simulator_state_dim": pa.int64(),
            "chunk_lengths": integers,
            "chunk_weights_version": integers,
            "final_state": floats,
            **{f"final_{view}": pa.binary() for view in VIEWS},
            **{f"value_counts/{feature}": integers for feature in picture_features},
        }
    )


def require_fitting(
    folder: Any, features: Mapping[str, Mapping[str, Any]], fps: int, conventions: Conventions, parts: EpisodeParts
) -> None:
    """Raise DatasetError naming what an episode has otherwise than the dataset it shall join, which declares its conventions once."""
    theirs = {name: _kind(feature) for name, feature in features.items()} | {"fps": fps, **conventions.to_dict()}
    own = {name: _kind(feature) for name, feature in parts.features.items()} | {"fps": parts.fps, **parts.conventions.to_dict()}
    unlike = [f"{name} is {own.get(name, 'absent')}, there {theirs.get(name, 'absent')}" for name in {**theirs, **own}]
    unlike = [line for line, name in zip(unlike, {**theirs, **own}) if own.get(name) != theirs.get(name)]
    if unlike:
        raise DatasetError(f"{folder}: the episode does not fit into this dataset: {'; '.join(unlike)}; use another folder")


def _kind(feature: Mapping[str, Any]) -> str:
    return f"{feature['dtype']} {tuple(feature['shape'])}"
