"""openpi's LIBERO messages: observations and chunks as its websocket protocol carries them.

A request is one observation: `observation/image` and `observation/wrist_image` uint8[H, W, 3] turned by 180 degrees,
`observation/state` float32[8], `prompt` (openpi `examples/libero/main.py`). An answer is `actions` float32[C, 7] with its timings.
Unbatched; one request is under way per connection.

Shape legend: H, W pixels; C actions per chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rl.conventions import Conventions
from vla_rl.episode import ACTION_DIM, VIEW_AGENT, VIEW_WRIST, Float32, Observation
from vla_rl.policies.remote.messages import MessageError
from vla_rl.policies.remote.served import ENTRY

IMAGE_KEYS = {VIEW_AGENT: "observation/image", VIEW_WRIST: "observation/wrist_image"}
"""Our view -> openpi's key."""
STATE_KEY, PROMPT_KEY, ACTIONS_KEY = "observation/state", "prompt", "actions"
SEED_KEY = f"{ENTRY}/noise_seed"
"""Only between our client and our server: the seed of the chunk's noise, so that a remote policy acts as a local one does."""
CONVENTIONS = Conventions()
"""What openpi's LIBERO policies are trained on: pictures turned by 180 degrees, axis-angle, -1 opens and +1 closes, 20 Hz."""
EXECUTED_HORIZON = 5
"""Actions that openpi's LIBERO client executes before it asks again (`replan_steps`)."""


def observation_message(observation: Observation, views: tuple[str, ...], noise_seed: int | None) -> dict[str, Any]:
    """An observation as openpi's request; with the seed of the noise for a server of ours."""
    message: dict[str, Any] = {IMAGE_KEYS[view]: observation.images[view] for view in views}
    message |= {STATE_KEY: observation.state, PROMPT_KEY: observation.prompt}
    return message if noise_seed is None else message | {SEED_KEY: noise_seed}


def read_observation(message: Any, views: tuple[str, ...]) -> tuple[Observation, int | None]:
    """The observation in a request, and the seed of its noise if the client gave one.

    The state may be float64, as openpi's own client sends it. Raises MessageError naming the key that is missing or of another kind;
    shapes and dtypes are the processor's to check.
    """
    if not isinstance(message, Mapping):
        raise MessageError(f"a request is a dictionary of observation keys, not {type(message).__name__}")
    wanted = [*(IMAGE_KEYS[view] for view in views), STATE_KEY, PROMPT_KEY]
    missing = [key for key in wanted if key not in message]
    if missing:
        raise MessageError(f"the request lacks {', '.join(missing)}; it has {', '.join(map(str, message)) or 'nothing'}")
    for key in wanted[:-1]:
        if not isinstance(message[key], np.ndarray):
            raise MessageError(f"{key} must be a numpy array, not {type(message[key]).__name__}")
    if message[STATE_KEY].dtype.kind not in "biuf":
        raise MessageError(f"{STATE_KEY} must hold numbers, not {message[STATE_KEY].dtype}")
    seed = message.get(SEED_KEY)
    return (
        Observation(
            images={view: message[IMAGE_KEYS[view]] for view in views},
            state=np.asarray(message[STATE_KEY], np.float32),
            prompt=read_prompt(message[PROMPT_KEY], PROMPT_KEY),
        ),
        None if seed is None else read_seed(seed),
    )


def read_prompt(value: Any, key: str) -> str:
    """The instruction. Raises MessageError for anything but text: what is no text would reach the policy as words."""
    if not isinstance(value, str):
        raise MessageError(f"{key} must be text, not {type(value).__name__}")
    return value


def read_seed(value: Any) -> int:
    """A noise seed. Raises MessageError for anything but a whole number."""
    if not isinstance(value, int | np.integer):
        raise MessageError(f"a noise seed must be a whole number, not {value!r}")
    return int(value)


def read_numbers(value: Any, name: str) -> Float32:
    """An array of an answer. Raises MessageError for anything but finite numbers."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise MessageError(f"{name} of the answer is no array of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        raise MessageError(f"{name} of the answer must hold numbers, not {array.dtype}")
    if not np.isfinite(array).all():
        raise MessageError(f"{name} of the answer holds numbers that are not finite; look at the server's policy")
    return array.astype(np.float32)


def read_actions(answer: Any) -> Float32:
    """float32[C, 7] of an answer. Raises MessageError for an answer without such actions."""
    if not isinstance(answer, Mapping) or ACTIONS_KEY not in answer:
        keys = ", ".join(map(str, answer)) if isinstance(answer, Mapping) else type(answer).__name__
        raise MessageError(f"the answer has no {ACTIONS_KEY!r} (it has: {keys})")
    actions = read_numbers(answer[ACTIONS_KEY], ACTIONS_KEY)
    if actions.ndim != 2 or actions.shape[1] != ACTION_DIM or not len(actions):
        raise MessageError(f"{ACTIONS_KEY} must be float[C, {ACTION_DIM}] with C >= 1, got {list(actions.shape)}; is it a LIBERO policy?")
    return actions
