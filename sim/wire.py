"""What crosses between a pool and its worker: fixed-size tokens in pipes, everything else in a shared arena.

A token is one `TOKEN` struct, written and read in one system call. The arena belongs to one side at a time: to the
pool until it writes a request token, then to the worker until it writes the reply token. Readers copy out of the
arena before they give it back, so what they hand on is never overwritten.

The usual chunk reply (observation, actions, rewards, no recording) is written field by field (`CHUNK`); every other
message is pickled with its array buffers out of band (`PICKLED`), which also go into the arena uncopied by pickle.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.sim.base import ChunkReply, ResetReply
from vla_rl.sim.shared_memory import ALIGNMENT, SharedArena, aligned, poison, require_written

PAYLOAD = ALIGNMENT
"""Arena offset of a message (bytes); before it lies the preempt flag."""
CHUNK_TIMING = ("physics", "render", "step")
"""The timing keys (seconds) that a `CHUNK` token carries."""


class Kind(IntEnum):
    """What a token announces."""

    RESET = 1
    """Request: a pickled (spec, look)."""
    STEP = 2
    """Request: float32[C, 7] actions."""
    CLOSE = 7
    """Request: end."""
    STARTED = 3
    """Reply: the pickled EnvSpec of a worker that is up."""
    PICKLED = 4
    """Reply: a pickled ResetReply or ChunkReply."""
    CHUNK = 5
    """Reply: a ChunkReply written field by field."""
    RAISED = 6
    """Reply: the pickled traceback of an exception; the worker ends."""


class Token(NamedTuple):
    """The content of one token; fields that a kind does not use are 0."""

    kind: int
    flags: int = 0
    """CHUNK: bits success, terminated, truncated, preempted; then one bit per view of `VIEWS`."""
    rows: int = 0
    """STEP: C; CHUNK: E; pickled kinds: number of array buffers."""
    height: int = 0
    width: int = 0
    length: int = 0
    """Pickled kinds: bytes of the pickle."""
    end: int = 0
    """Arena bytes in use: the reader maps at least as many."""
    physics_s: float = 0.0
    render_s: float = 0.0
    step_s: float = 0.0


TOKEN = struct.Struct("<BBHHHQQ3d")
_SUCCESS, _TERMINATED, _TRUNCATED, _PREEMPTED = 1, 2, 4, 8
_VIEWS = frozenset(VIEWS)
_VIEW_BITS = tuple(16 << index for index in range(len(VIEWS)))


@dataclass(frozen=True)
class _ChunkSlots:
    """Where the arrays of a `CHUNK` message lie: views of the arena."""

    images: dict[str, np.ndarray]
    state_S: np.ndarray
    executed_EA: np.ndarray
    reward_E: np.ndarray
    end: int

    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name."""
        return self.images | {"state": self.state_S, "executed actions": self.executed_EA, "rewards": self.reward_E}


class Wire:
    """Writes messages into an arena and reads them out again; each side of a pipe has one.

    `debug_poison` refills the arena after every read, and checks that everything read had been written since.
    """

    def __init__(self, arena: SharedArena, debug_poison: bool) -> None:
        self.arena = arena
        self._debug_poison = debug_poison
        self._prompt = ""
        self._chunks: dict[tuple[int, int, int, int], _ChunkSlots] = {}
        self._actions: dict[int, np.ndarray] = {}

    @property
    def preempt(self) -> bool:
        """Whether the pool wants the running chunk to stop."""
        return self.arena.buffer[0] != 0

    @preempt.setter
    def preempt(self, value: bool) -> None:
        self.arena.buffer[0] = value

    def write_step(self, actions_CA: np.ndarray) -> bytes:
        """Put a chunk of actions into the arena; the token to send. Clears the preempt flag."""
        rows = len(actions_CA)
        self.preempt = False
        self._action_slot(rows)[:] = actions_CA
        return TOKEN.pack(Kind.STEP, 0, rows, 0, 0, 0, PAYLOAD + 4 * rows * ACTION_DIM, 0.0, 0.0, 0.0)

    def read_step(self, token: Token) -> np.ndarray:
        """float32[C, 7]: the actions that a STEP token announces."""
        self._follow(token)
        actions_CA = self._taken("actions", self._action_slot(token.rows))
        self._release()
        return actions_CA

    def write_pickled(self, kind: Kind, value: Any) -> bytes:
        """Put any value into the arena, array buffers apart from the pickle; the token to send."""
        if isinstance(value, ResetReply):
            self._prompt = value.observation.prompt
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        offsets = _offsets(PAYLOAD + aligned(8 * len(sizes)), sizes)
        self._ensure(offsets[-1])
        self.arena.array(PAYLOAD, (len(sizes),), np.uint64)[:] = sizes
        for part, offset, size in zip(parts, offsets, sizes):
            self.arena.buffer[offset : offset + size] = part
        return TOKEN.pack(*Token(kind, rows=len(buffers), length=len(head), end=offsets[-1]))

    def read_pickled(self, token: Token) -> Any:
        """The value that a token announces; its arrays are writable and owned by the caller."""
        self._follow(token)
        sizes = [int(size) for size in self.arena.array(PAYLOAD, (token.rows + 1,), np.uint64)]
        offsets = _offsets(PAYLOAD + aligned(8 * len(sizes)), sizes)
        head, *buffers = (
            self._taken(f"buffer {index}", self.arena.array(offset, (size,), np.uint8))
            for index, (offset, size) in enumerate(zip(offsets, sizes))
        )
        self._release()
        value = pickle.loads(head.data, buffers=[buffer.data for buffer in buffers])
        if isinstance(value, ResetReply):
            self._prompt = value.observation.prompt
        return value

    def write_chunk(self, reply: ChunkReply) -> bytes:
        """Put a chunk reply into the arena, field by field if it is a usual one; the token to send."""
        if not self._is_usual(reply):
            return self.write_pickled(Kind.PICKLED, reply)
        images = reply.observation.images
        flags = _SUCCESS * reply.success | _TERMINATED * reply.terminated | _TRUNCATED * reply.truncated | _PREEMPTED * reply.preempted
        for view, bit in zip(VIEWS, _VIEW_BITS):
            flags |= bit * (view in images)
        height, width = next(iter(images.values())).shape[:2] if images else (0, 0)
        slots = self._chunk_slots(flags & sum(_VIEW_BITS), height, width, len(reply.reward_E))
        for view, slot in slots.images.items():
            slot[:] = images[view]
        slots.state_S[:] = reply.observation.state
        slots.executed_EA[:] = reply.executed_EA
        slots.reward_E[:] = reply.reward_E
        timing = reply.timing
        return TOKEN.pack(
            Kind.CHUNK, flags, len(reply.reward_E), height, width, 0, slots.end, timing["physics"], timing["render"], timing["step"]
        )

    def read_chunk(self, env: int, token: Token) -> ChunkReply:
        """The chunk reply of `env` that a CHUNK token announces; its arrays are owned by the caller."""
        self._follow(token)
        slots = self._chunk_slots(token.flags & sum(_VIEW_BITS), token.height, token.width, token.rows)
        if self._debug_poison:
            for name, array in slots.arrays().items():
                require_written(name, array)
        images = {view: slot.copy() for view, slot in slots.images.items()}
        reply = ChunkReply(
            env=env,
            observation=Observation(images, slots.state_S.copy(), self._prompt),
            executed_EA=slots.executed_EA.copy(),
            reward_E=slots.reward_E.copy(),
            success=bool(token.flags & _SUCCESS),
            terminated=bool(token.flags & _TERMINATED),
            truncated=bool(token.flags & _TRUNCATED),
            preempted=bool(token.flags & _PREEMPTED),
            timing=dict(zip(CHUNK_TIMING, token[-3:])),
        )
        self._release()
        return reply

    def _is_usual(self, reply: ChunkReply) -> bool:
        """Whether a CHUNK token and its slots hold the reply without loss."""
        observation = reply.observation
        images = list(observation.images.values())
        return (
            not reply.frames
            and not observation.privileged
            and reply.sim_states_ED is None
            and reply.robot_states_ER is None
            and observation.prompt == self._prompt
            and tuple(reply.timing) == CHUNK_TIMING
            and observation.images.keys() <= _VIEWS
            and all(image.dtype == np.uint8 and image.shape == images[0].shape for image in images)
            and observation.state.dtype == np.float32
        )

    def _action_slot(self, rows: int) -> np.ndarray:
        slot = self._actions.get(rows)
        if slot is None:
            self._ensure(PAYLOAD + 4 * rows * ACTION_DIM)
            slot = self._actions[rows] = self.arena.array(PAYLOAD, (rows, ACTION_DIM), np.float32)
        return slot

    def _chunk_slots(self, view_bits: int, height: int, width: int, rows: int) -> _ChunkSlots:
        key = (view_bits, height, width, rows)
        slots = self._chunks.get(key)
        if slots is None:
            views = [view for view, bit in zip(VIEWS, _VIEW_BITS) if view_bits & bit]
            sizes = [height * width * 3] * len(views) + [4 * STATE_DIM, 4 * rows * ACTION_DIM, 4 * rows]
            *image_offsets, state, executed, reward, end = _offsets(PAYLOAD, sizes)
            self._ensure(end)
            array = self.arena.array
            slots = self._chunks[key] = _ChunkSlots(
                images={view: array(offset, (height, width, 3), np.uint8) for view, offset in zip(views, image_offsets)},
                state_S=array(state, (STATE_DIM,), np.float32),
                executed_EA=array(executed, (rows, ACTION_DIM), np.float32),
                reward_E=array(reward, (rows,), np.float32),
                end=end,
            )
        return slots

    def _ensure(self, end: int) -> None:
        known = self.arena.size
        if self.arena.ensure(end):
            self._forget_slots()
            if self._debug_poison:
                poison(self.arena, known)

    def _follow(self, token: Token) -> None:
        if token.end > self.arena.size and self.arena.remap():
            self._forget_slots()

    def _forget_slots(self) -> None:
        """The arena was mapped anew: slots of the old mapping would be written for nobody, or read stale."""
        self._chunks.clear()
        self._actions.clear()

    def _taken(self, name: str, array: np.ndarray) -> np.ndarray:
        if self._debug_poison:
            require_written(name, array)
        return array.copy()

    def _release(self) -> None:
        if self._debug_poison:
            poison(self.arena, PAYLOAD)


def _offsets(start: int, sizes: list[int]) -> list[int]:
    """Aligned arena offsets of consecutive blocks, and the end of the last one."""
    offsets = [start]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size))
    return offsets
