"""What one side writes, the other reads: to the bit, as its own copy, on both encodings."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from equality import require_same
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.episode import VIEWS, EpisodeSpec, Observation
from vla_rl.sim.base import ChunkReply, Look, ResetReply
from vla_rl.sim.picture_slots import SLOTS
from vla_rl.sim.shared_memory import PoisonError, SharedArena
from vla_rl.sim.wire import CHUNK_TIMING, TOKEN, Kind, Token, Wire

SPEC = EpisodeSpec("reach", 0, "benchmark:0", "test")


def wires(side: int = 40, debug_poison: bool = True) -> tuple[Wire, Wire]:
    """Two sides of a small arena for pictures of `side` pixels: the pool's and the worker's."""
    arena = SharedArena.create(1)
    return Wire(arena, side, debug_poison), Wire(SharedArena(os.dup(arena.fd)), side, debug_poison)


def ask(ours: Wire, theirs: Wire) -> None:
    """Ask for a chunk of one action, which names the slot of the answer's pictures."""
    theirs.read_step(Token(*TOKEN.unpack(ours.write_step(np.zeros((1, 7), np.float32)))))


def cross(ours: Wire, theirs: Wire, env: int, reply: ChunkReply) -> tuple[Kind, ChunkReply]:
    """Send a chunk reply; how it was encoded, and what arrived."""
    ask(ours, theirs)
    token = Token(*TOKEN.unpack(theirs.write_chunk(reply)))
    return Kind(token.kind), ours.read_chunk(env, token) if token.kind == Kind.CHUNK else ours.read_pickled(token)


def chunk_reply(seed: int, rows: int, side: int, views: tuple[str, ...], **other: Any) -> ChunkReply:
    random = np.random.default_rng(seed)
    images = {view: random.integers(0, 256, (side, side, 3), dtype=np.uint8) for view in views}
    observation = Observation(images, random.random(8, np.float32), other.pop("prompt", ""), other.pop("privileged", {}))
    values: dict[str, Any] = {
        "env": 3,
        "observation": observation,
        "executed_EA": random.random((rows, 7), np.float32),
        "reward_E": random.random(rows, np.float32),
        "success": bool(random.integers(2)),
        "terminated": bool(random.integers(2)),
        "truncated": bool(random.integers(2)),
        "preempted": bool(random.integers(2)),
        "timing": dict(zip(CHUNK_TIMING, random.random(3).tolist())),
    }
    return ChunkReply(**(values | other))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32), st.integers(0, 12), st.sampled_from([(), VIEWS[:1], VIEWS[1:], VIEWS])),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 70),
)
def test_usual_chunk_replies_cross_field_by_field_to_the_bit(shapes: list[tuple[int, int, tuple[str, ...]]], side: int) -> None:
    ours, theirs = wires(side)
    for seed, rows, views in shapes:
        reply = chunk_reply(seed, rows, side, views)
        kind, received = cross(ours, theirs, 3, reply)
        assert kind is Kind.CHUNK
        require_same(reply, received)


@pytest.mark.parametrize(
    "unusual",
    [
        {"frames": {4: Observation({"image": np.full((5, 5, 3), 9, np.uint8)}, np.zeros(8, np.float32), "x")}},
        {"sim_states_ED": np.arange(12.0).reshape(2, 6), "robot_states_ER": np.ones((2, 16))},
        {"privileged": {"block_pos": np.arange(3.0)}},
        {"prompt": "another instruction"},
        {"timing": {"physics": 1.0}},
        {"timing": {"physics": 1.0, "render": 2.0, "step": 3.0, "settle": 4.0}},
    ],
)
def test_any_other_chunk_reply_crosses_pickled_to_the_bit(unusual: dict[str, Any]) -> None:
    ours, theirs = wires()
    reply = chunk_reply(1, 2, 40, VIEWS, **unusual)
    kind, received = cross(ours, theirs, 3, reply)
    assert kind is Kind.PICKLED
    require_same(reply, received)


@pytest.mark.parametrize(
    "pictures",
    [{"image": np.zeros((4, 4, 3), np.float32)}, {"image": np.zeros((4, 4, 3), np.uint8), "image2": np.zeros((5, 5, 3), np.uint8)}],
)
def test_pictures_that_do_not_fit_the_slots_are_not_converted(pictures: dict[str, np.ndarray]) -> None:
    ours, theirs = wires()
    reply = chunk_reply(1, 2, 40, ())
    reply.observation = Observation(pictures, reply.observation.state, "")
    kind, received = cross(ours, theirs, 3, reply)
    assert kind is Kind.PICKLED
    require_same(reply, received)


def test_rotated_pictures_which_are_not_contiguous_cross() -> None:
    ours, theirs = wires()
    reply = chunk_reply(1, 2, 40, VIEWS)
    rotated = {view: picture[::-1, ::-1] for view, picture in reply.observation.images.items()}
    reply.observation = Observation(rotated, reply.observation.state, "")
    kind, received = cross(ours, theirs, 3, reply)
    assert kind is Kind.CHUNK
    require_same(reply, received)


def test_the_prompt_of_a_reset_need_not_be_sent_again() -> None:
    ours, theirs = wires()
    reset = ResetReply(0, SPEC, Observation({}, np.zeros(8, np.float32), "reach the red block"))
    require_same(reset, ours.read_pickled(Token(*TOKEN.unpack(theirs.write_pickled(Kind.PICKLED, reset)))))
    reply = chunk_reply(1, 2, 40, VIEWS, prompt="reach the red block")
    kind, received = cross(ours, theirs, 3, reply)
    assert kind is Kind.CHUNK
    require_same(reply, received)


@given(st.integers(0, 60))
def test_actions_and_resets_cross(rows: int) -> None:
    ours, theirs = wires()
    actions_CA = np.random.default_rng(rows).standard_normal((rows, 7)).astype(np.float32)
    for views in (None, (), VIEWS[1:], VIEWS):
        read_CA, asked = theirs.read_step(Token(*TOKEN.unpack(ours.write_step(actions_CA, views))))
        require_same(actions_CA, read_CA)
        assert asked == views
    request = (SPEC, Look(VIEWS, privileged=True, record_every=3))
    require_same(request, theirs.read_pickled(Token(*TOKEN.unpack(ours.write_pickled(Kind.RESET, request)))))


@pytest.mark.parametrize("unusual", [{}, {"privileged": {"block_pos": np.arange(3.0)}}], ids=["chunk", "pickled"])
def test_what_is_held_is_not_overwritten_however_much_is_held(unusual: dict[str, Any]) -> None:
    ours, theirs = wires()
    sent = [chunk_reply(seed, 2, 40, VIEWS, **unusual) for seed in range(3 * SLOTS)]
    received = [cross(ours, theirs, 3, reply)[1] for reply in sent]
    require_same(sent, received)
    received[0].observation.images["image"][:] = 0
    received[0].executed_EA[:] = 0
    require_same(sent[1:], received[1:])


def test_a_slot_is_used_again_only_when_the_last_view_of_its_pictures_is_gone() -> None:
    ours, theirs = wires()

    def address(picture: np.ndarray) -> int:
        return picture.__array_interface__["data"][0]

    first = cross(ours, theirs, 3, chunk_reply(1, 2, 40, VIEWS))[1].observation.images["image2"]
    row, place = first[3, ::2], address(first)
    del first
    kept = row.copy()
    others = {address(cross(ours, theirs, 3, chunk_reply(seed, 2, 40, VIEWS))[1].observation.images["image2"]) for seed in range(5)}
    assert len(others) == 1 and place not in others, "dropped at once: one other slot is enough"
    assert np.array_equal(row, kept)
    del row
    assert address(cross(ours, theirs, 3, chunk_reply(9, 2, 40, VIEWS))[1].observation.images["image2"]) == place


def test_a_token_without_its_bytes_is_found_in_debug_mode() -> None:
    ours, theirs = wires()
    ask(ours, theirs)
    message = theirs.write_chunk(chunk_reply(1, 2, 40, VIEWS))
    ours.read_chunk(0, Token(*TOKEN.unpack(message)))
    with pytest.raises(PoisonError, match=r"state \(8,\)"):
        ours.read_chunk(0, Token(*TOKEN.unpack(message)))
    ask(ours, theirs)
    slot = Token(*TOKEN.unpack(theirs.write_chunk(chunk_reply(1, 2, 40, ())))).slot
    both_views = Token(*TOKEN.unpack(message))._replace(slot=slot)
    with pytest.raises(PoisonError, match=r"view image \(40, 40, 3\)"):
        ours.read_chunk(0, both_views)


def test_preempt_is_seen_at_once_by_the_other_side() -> None:
    ours, theirs = wires()
    for value in (True, False):
        ours.request_preempt(value)
        assert theirs.preempt_requested() is value
