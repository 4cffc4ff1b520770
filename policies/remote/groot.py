"""GR00T's LIBERO messages: observations and chunks as its ZMQ protocol carries them.

`get_action` takes `{"observation": {"video": {...}, "state": {...}, "language": {...}}, "options": None}` with a batch and a time
dimension on everything, and answers `[{part: float32[B, C, D]}, info]`. NVIDIA's wrapper for simulators uses flat keys (`video.image`,
`state.x`, `action.x`) in place of the nested ones; both are understood, and a flat request gets a flat answer.
`roll`, `pitch`, `yaw` hold the axis-angle vector, as NVIDIA's LIBERO script sends it. Its gripper is 1 open and 0 closed, and its LIBERO
env turns g into -sign(2 g - 1); we keep 1 - 2 g, whose sign is the same.

Shape legend: B observations of one request; H, W pixels; C actions per chunk; D numbers of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEW_AGENT, VIEW_WRIST, Float32, Observation
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.remote.messages import MessageError, Modality
from vla_rl.policies.remote.openpi import read_numbers, read_prompt, read_seed
from vla_rl.policies.remote.served import ENTRY

VIDEO_KEYS = {VIEW_AGENT: "image", VIEW_WRIST: "wrist_image"}
"""Our view -> GR00T's name."""
STATE_PARTS = {"x": 0, "y": 1, "z": 2, "roll": 3, "pitch": 4, "yaw": 5, "gripper": slice(6, 8)}
"""Part of GR00T's state -> where it lies in ours."""
ACTION_PARTS = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
"""Parts of GR00T's actions, one number each, in our order."""
LANGUAGE_KEY = "annotation.human.action.task_description"
FLAT_LANGUAGE_KEYS = (LANGUAGE_KEY, "task")
"""Where flat requests carry the instruction."""
CONVENTIONS = Conventions()
"""Of observations on this wire, and of actions after `read_actions` turned the gripper: the same as openpi's."""
SEEDS_OPTION = f"{ENTRY}_noise_seeds"
"""Only between our client and our server, in `options`: one seed per observation."""
DESCRIBE_ENDPOINT = f"{ENTRY}_describe"
"""Only our server knows it; others answer with an error, which tells the client that it talks to another one."""


def observation_message(observation: Observation, views: tuple[str, ...], noise_seed: int | None) -> dict[str, Any]:
    """An observation as the `data` of a `get_action` request with B = 1 and one time step."""
    state = observation.state
    options = None if noise_seed is None else {SEEDS_OPTION: [noise_seed]}
    return {
        "observation": {
            "video": {VIDEO_KEYS[view]: observation.images[view][None, None] for view in views},
            "state": {part: np.atleast_1d(state[index])[None, None] for part, index in STATE_PARTS.items()},
            "language": {LANGUAGE_KEY: [[observation.prompt]]},
        },
        "options": options,
    }


def read_request(data: Any, views: tuple[str, ...]) -> tuple[list[Observation], list[int] | None, bool]:
    """The observations of a `get_action` request, their noise seeds if given, and whether its keys were flat.

    Raises MessageError naming what is missing or of another kind.
    """
    observation = _mapping(_mapping(data, "data").get("observation"), "data.observation")
    flat = "video" not in observation
    video = {name: _part(observation, "video", name, flat, 5) for name in (VIDEO_KEYS[view] for view in views)}
    state = {name: _part(observation, "state", name, flat, 3) for name in STATE_PARTS}
    prompts = _prompts(observation, flat)
    sizes = {name: len(values) for name, values in {**video, **state, "language": prompts}.items()}
    if len(set(sizes.values())) != 1:
        raise MessageError(f"the parts of one request must hold equally many observations, got {sizes}")
    states = np.concatenate([state[name][:, -1] for name in STATE_PARTS], axis=-1).astype(np.float32)
    if states.shape[1] != STATE_DIM:
        raise MessageError(f"the state's parts have {states.shape[1]} numbers together, they must have {STATE_DIM} (two for the gripper)")
    observations = [
        Observation({view: video[VIDEO_KEYS[view]][row, -1] for view in views}, states[row], prompt) for row, prompt in enumerate(prompts)
    ]
    return observations, _seeds(data, len(observations)), flat


def actions_message(actions_BCA: Float32, flat: bool) -> list[Any]:
    """The answer to `get_action`: every part float32[B, C, 1], the gripper 1 open and 0 closed."""
    parts = {part: actions_BCA[..., index : index + 1] for index, part in enumerate(ACTION_PARTS)}
    parts["gripper"] = ((1.0 - parts["gripper"]) / 2.0).astype(np.float32)
    return [{f"action.{part}" if flat else part: values for part, values in parts.items()}, {}]


def read_actions(answer: Any) -> Float32:
    """float32[C, 7] in environment units of the first observation of an answer. Raises MessageError for another kind of answer."""
    actions = answer[0] if isinstance(answer, list | tuple) and answer else answer
    parts = _mapping(actions, "the answer's actions")
    given = {str(name).removeprefix("action."): values for name, values in parts.items()}
    missing = [part for part in ACTION_PARTS if part not in given]
    if missing:
        raise MessageError(f"the answer lacks {', '.join(missing)}; it has {', '.join(given)}. Is it a LIBERO policy?")
    named = {part: read_numbers(given[part], part) for part in ACTION_PARTS}
    if not all(values.size for values in named.values()):
        raise MessageError(f"the answer has no actions: {', '.join(part for part in ACTION_PARTS if not named[part].size)} is empty")
    columns = [values.reshape(values.shape[0], -1, 1)[0] if values.ndim == 3 else values for values in named.values()]
    lengths = {part: list(column.shape) for part, column in zip(ACTION_PARTS, columns)}
    if len({tuple(shape) for shape in lengths.values()}) != 1 or columns[0].ndim != 2 or columns[0].shape[1] != 1:
        raise MessageError(f"every part of the actions must be float[B, C, 1], got {lengths}")
    actions_CA = np.concatenate(columns, axis=1)
    actions_CA[:, ACTION_DIM - 1] = 1.0 - 2.0 * actions_CA[:, ACTION_DIM - 1]
    return actions_CA


def modalities(spec: PolicySpec) -> dict[str, Modality]:
    """The answer to `get_modality_config`: what a client must send, and how many actions come back."""
    return {
        "video": Modality([0], [VIDEO_KEYS[view] for view in spec.views]),
        "state": Modality([0], list(STATE_PARTS)),
        "action": Modality(list(range(spec.chunk_length)), list(ACTION_PARTS)),
        "language": Modality([0], [LANGUAGE_KEY]),
    }


def views_and_chunk(answer: Any) -> tuple[tuple[str, ...], int]:
    """Our views and the chunk length in another server's `get_modality_config`.

    Raises MessageError for modalities that are not LIBERO's.
    """
    config = _mapping(answer, "get_modality_config")
    video, action = config.get("video"), config.get("action")
    if not isinstance(video, Modality) or not isinstance(action, Modality):
        raise MessageError(f"get_modality_config must have 'video' and 'action', it has {', '.join(map(str, config))}")
    names = {name: view for view, name in VIDEO_KEYS.items()}
    keys = [key.removeprefix("video.") for key in video.modality_keys]
    unknown = [key for key in keys if key not in names]
    if unknown:
        raise MessageError(f"the server wants the video {', '.join(unknown)}; LIBERO has {', '.join(names)}")
    if len(video.delta_indices) != 1:
        raise MessageError(f"the server wants {len(video.delta_indices)} frames of video at once; an observation has one")
    return tuple(names[key] for key in keys), len(action.delta_indices)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MessageError(f"{name} must be a dictionary, not {type(value).__name__}")
    return value


def _part(observation: Mapping[str, Any], modality: str, name: str, flat: bool, dims: int) -> np.ndarray:
    """One part of a request, with its batch and time dimensions (flat requests of GR00T N1.5 have no batch dimension)."""
    key = f"{modality}.{name}"
    value = observation.get(key) if flat else _mapping(observation.get(modality, {}), modality).get(name)
    if not isinstance(value, np.ndarray):
        raise MessageError(f"the observation needs {key} as a numpy array, got {type(value).__name__}")
    if flat and value.ndim == dims - 1:
        value = value[None]
    if value.dtype.kind not in "biuf":
        raise MessageError(f"{key} must hold numbers, not {value.dtype}")
    if value.ndim != dims or 0 in value.shape:
        raise MessageError(f"{key} must have {dims} dimensions (batch and time first), got shape {list(value.shape)}")
    return value


def _prompts(observation: Mapping[str, Any], flat: bool) -> list[str]:
    if flat:
        found = next((observation[key] for key in FLAT_LANGUAGE_KEYS if key in observation), None)
        rows = [found] if isinstance(found, str) else found
    else:
        rows = _mapping(observation.get("language", {}), "language").get(LANGUAGE_KEY)
    if not isinstance(rows, list | tuple) or not rows:
        raise MessageError(f"the observation needs the instruction under {LANGUAGE_KEY!r}, as a list with one entry per observation")
    return [read_prompt(row[0] if isinstance(row, list | tuple) and row else row, LANGUAGE_KEY) for row in rows]


def _seeds(data: Mapping[str, Any], count: int) -> list[int] | None:
    seeds = _mapping(data.get("options") or {}, "data.options").get(SEEDS_OPTION)
    if seeds is None:
        return None
    if not isinstance(seeds, list | tuple) or len(seeds) != count:
        raise MessageError(f"{SEEDS_OPTION} must be a list with one noise seed for each of the {count} observations")
    return [read_seed(seed) for seed in seeds]
