"""What crosses between a pool and its worker: fixed-size tokens in pipes, everything else in a shared arena.

A token is one `TOKEN` struct, written and read in one system call. The arena belongs to one side at a time: to the
pool until it writes a request token, then to the worker until it writes the reply token. Readers copy out of the
arena before they give it back, except for pictures in slots that they lend (`picture_slots.py`), so what they hand on is
never overwritten.

The usual chunk reply (observation, actions, rewards, no recording) is written field by field (`CHUNK`); every other
message is pickled with its array buffers out of band (`PICKLED`), which also go into the arena uncopied by pickle.

Shape legend: see `vla_rl/episode.py`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Observation
from vla_rl.sim.base import ChunkReply, ResetReply
from vla_rl.sim.picture_slots import PictureSlots
from vla_rl.sim.shared_memory import ALIGNMENT, SharedArena, aligned, poison, require_written

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
    """CHUNK: bits success, terminated, truncated, preempted; then one bit per view of `VIEWS`. STEP: whether the reply's views
    are given, then the same bits."""
    rows: int = 0
    """STEP: C; CHUNK: E; pickled kinds: number of array buffers."""
    slot: int = 0
    """STEP: where to put the pictures; CHUNK: where they are."""
    length: int = 0
    """Pickled kinds: bytes of the pickle."""
    end: int = 0
    """Arena bytes in use: the reader maps at least as many."""
    physics_s: float = 0.0
    render_s: float = 0.0
    step_s: float = 0.0


TOKEN = struct.Struct("<BBHHQQ3d")
_SUCCESS, _TERMINATED, _TRUNCATED, _PREEMPTED = 1, 2, 4, 8
_VIEWS_GIVEN = 1
_BITS_OF_VIEWS: dict[tuple[str, ...], int] = {(): 0, VIEWS[:1]: 16, VIEWS[1:]: 32, VIEWS: 48}
_VIEWS_OF_BITS = {bits: views for views, bits in _BITS_OF_VIEWS.items()}
_PICTURE_DTYPE, _STATE_DTYPE = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True)
class _ChunkFields:
    """Where the small arrays of a `CHUNK` message lie: views of the arena."""

    state_S: np.ndarray
    executed_EA: np.ndarray
    reward_E: np.ndarray
    end: int


class Wire:
    """Writes messages into an arena and reads them out again; each side of a pipe has one.

    resolution: pixels of the pictures that fit into slots; others are pickled. debug_poison: mark what was read or lent
    as unwritten before the next message, and check that everything read had been written since.
    """

    def __init__(self, arena: SharedArena, resolution: int, debug_poison: bool) -> None:
        self.arena = arena
        self._slots = PictureSlots(arena, ALIGNMENT, resolution)
        self._preempt_flag = memoryview(arena.buffer)[:1]
        self.payload = self._slots.end
        """Arena offset of messages (bytes); before it lie the preempt flag and the picture slots."""
        self._debug_poison = debug_poison
        self._prompt = ""
        self._slot = 0
        self._chunks: dict[int, _ChunkFields] = {}
        self._actions: dict[int, np.ndarray] = {}

    def preempt_requested(self) -> bool:
        """Whether the pool wants the running chunk to stop."""
        return self._preempt_flag[0] != 0

    def request_preempt(self, value: bool) -> None:
        """Ask for the running chunk to stop, or forget it."""
        self._preempt_flag[0] = value

    def write_step(self, actions_CA: np.ndarray, views: tuple[str, ...] | None = None) -> bytes:
        """Put a chunk of actions into the arena, and name a place for the answer's pictures; the token to send.

        views: rendered in the answer; None leaves it to the look of the episode. Raises KeyError for a view that does not exist.
        """
        rows, slot = len(actions_CA), self._slots.free()
        self._action_field(rows)[:] = actions_CA
        if self._debug_poison:
            self._slots.poison(slot)
        flags = 0 if views is None else _VIEWS_GIVEN | _BITS_OF_VIEWS[views]
        return TOKEN.pack(Kind.STEP, flags, rows, slot, 0, self.payload + 4 * rows * ACTION_DIM, 0.0, 0.0, 0.0)

    def read_step(self, token: Token) -> tuple[np.ndarray, tuple[str, ...] | None]:
        """float32[C, 7], the actions that a STEP token announces, and the views that it asks for."""
        self._follow(token)
        self._slot = token.slot
        field = self._action_field(token.rows)
        actions_CA = field.copy()
        if self._debug_poison:
            self._release({"actions": field})
        given = token.flags & _VIEWS_GIVEN
        return actions_CA, _VIEWS_OF_BITS[token.flags & _BITS_OF_VIEWS[VIEWS]] if given else None

    def write_bytes(self, message: bytes) -> None:
        """Put bytes where messages begin, for a worker that has no wire yet."""
        self._ensure(self.payload + len(message))
        self.arena.buffer[self.payload : self.payload + len(message)] = message

    def write_pickled(self, kind: Kind, value: Any) -> bytes:
        """Put any value into the arena, array buffers apart from the pickle; the token to send."""
        if isinstance(value, ResetReply):
            self._prompt = value.observation.prompt
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        sizes = [part.nbytes for part in parts]
        offsets = _offsets(self.payload + aligned(8 * len(sizes)), sizes)
        self._ensure(offsets[-1])
        self.arena.array(self.payload, (len(sizes),), np.uint64)[:] = sizes
        for part, offset, size in zip(parts, offsets, sizes):
            self.arena.buffer[offset : offset + size] = part
        return TOKEN.pack(*Token(kind, rows=len(buffers), length=len(head), end=offsets[-1]))

    def read_pickled(self, token: Token) -> Any:
        """The value that a token announces; its arrays are writable and owned by the caller."""
        self._follow(token)
        sizes = [int(size) for size in self.arena.array(self.payload, (token.rows + 1,), np.uint64)]
        offsets = _offsets(self.payload + aligned(8 * len(sizes)), sizes)
        fields = {f"buffer {index}": self.arena.array(at, (size,), np.uint8) for index, (at, size) in enumerate(zip(offsets, sizes))}
        head, *buffers = (field.copy() for field in fields.values())
        if self._debug_poison:
            self._release(fields)
        value = pickle.loads(head.data, buffers=[buffer.data for buffer in buffers])
        if isinstance(value, ResetReply):
            self._prompt = value.observation.prompt
        return value

    def write_chunk(self, reply: ChunkReply) -> bytes:
        """Put a chunk reply into the arena, field by field if it is a usual one; the token to send."""
        observation, timing, rows = reply.observation, reply.timing, len(reply.reward_E)
        view_bits = _BITS_OF_VIEWS.get(tuple(observation.images))
        if view_bits is None or not self._is_usual(reply):
            return self.write_pickled(Kind.PICKLED, reply)
        flags = _SUCCESS * reply.success | _TERMINATED * reply.terminated | _TRUNCATED * reply.truncated | _PREEMPTED * reply.preempted
        self._slots.write(self._slot, observation.images)
        fields = self._chunk_fields(rows)
        fields.state_S[:] = observation.state
        fields.executed_EA[:] = reply.executed_EA
        fields.reward_E[:] = reply.reward_E
        times = timing["physics"], timing["render"], timing["step"]
        return TOKEN.pack(Kind.CHUNK, flags | view_bits, rows, self._slot, 0, fields.end, *times)

    def read_chunk(self, env: int, token: Token) -> ChunkReply:
        """The chunk reply of `env` that a CHUNK token announces; its pictures may be lent, see `picture_slots.py`."""
        self._follow(token)
        flags, views = token.flags, _VIEWS_OF_BITS[token.flags & _BITS_OF_VIEWS[VIEWS]]
        fields = self._chunk_fields(token.rows)
        if self._debug_poison:
            self._slots.require_written(token.slot, views)
        reply = ChunkReply(
            env=env,
            observation=Observation(self._slots.read(token.slot, views), fields.state_S.copy(), self._prompt),
            executed_EA=fields.executed_EA.copy(),
            reward_E=fields.reward_E.copy(),
            success=bool(flags & _SUCCESS),
            terminated=bool(flags & _TERMINATED),
            truncated=bool(flags & _TRUNCATED),
            preempted=bool(flags & _PREEMPTED),
            timing={"physics": token.physics_s, "render": token.render_s, "step": token.step_s},
        )
        if self._debug_poison:
            self._release({"state": fields.state_S, "executed actions": fields.executed_EA, "rewards": fields.reward_E})
        return reply

    def _is_usual(self, reply: ChunkReply) -> bool:
        """Whether a CHUNK token, its fields and a picture slot hold the reply without loss."""
        observation, shape = reply.observation, self._slots.shape
        if reply.frames or observation.privileged or reply.sim_states_ED is not None or reply.robot_states_ER is not None:
            return False
        for picture in observation.images.values():
            if picture.shape != shape or picture.dtype != _PICTURE_DTYPE:
                return False
        return observation.prompt == self._prompt and tuple(reply.timing) == CHUNK_TIMING and observation.state.dtype == _STATE_DTYPE

    def _action_field(self, rows: int) -> np.ndarray:
        field = self._actions.get(rows)
        if field is None:
            self._ensure(self.payload + 4 * rows * ACTION_DIM)
            field = self._actions[rows] = self.arena.array(self.payload, (rows, ACTION_DIM), np.float32)
        return field

    def _chunk_fields(self, rows: int) -> _ChunkFields:
        fields = self._chunks.get(rows)
        if fields is None:
            state, executed, reward, end = _offsets(self.payload, [4 * STATE_DIM, 4 * rows * ACTION_DIM, 4 * rows])
            self._ensure(end)
            array = self.arena.array
            fields = self._chunks[rows] = _ChunkFields(
                state_S=array(state, (STATE_DIM,), np.float32),
                executed_EA=array(executed, (rows, ACTION_DIM), np.float32),
                reward_E=array(reward, (rows,), np.float32),
                end=end,
            )
        return fields

    def _ensure(self, end: int) -> None:
        known = self.arena.size
        if self.arena.ensure(end) and self._debug_poison:
            poison(self.arena.array(known, (self.arena.size - known,), np.uint8))

    def _follow(self, token: Token) -> None:
        if token.end > self.arena.size:
            self.arena.remap()

    def _release(self, read: Mapping[str, np.ndarray]) -> None:
        """Debug: check that what was read had been written, and mark the arena as unwritten for the next message."""
        for name, field in read.items():
            require_written(name, field)
        poison(self.arena.array(self.payload, (self.arena.size - self.payload,), np.uint8))


def _offsets(start: int, sizes: list[int]) -> list[int]:
    """Aligned arena offsets of consecutive blocks, and the end of the last one."""
    offsets = [start]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size))
    return offsets
