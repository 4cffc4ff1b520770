"""Bytes on the wire: what is written comes back, and nothing else is believed."""

from __future__ import annotations

import io
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vla_rl.episode import STATE_DIM, VIEWS, Observation
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.remote import groot, openpi
from vla_rl.policies.remote.messages import MessageError, Modality, pack_groot, pack_openpi, unpack_groot, unpack_openpi
from vla_rl.policies.remote.served import RemoteError, ServedPolicy

arrays = hnp.arrays(
    st.sampled_from([np.uint8, np.float32, np.float64, np.int64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@given(arrays)
def test_arrays_come_back_bit_for_bit(array: np.ndarray) -> None:
    for pack, unpack in ((pack_openpi, unpack_openpi), (pack_groot, unpack_groot)):
        back = unpack(pack({"a": [array]}))["a"][0]
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_the_bytes_are_those_of_the_protocols() -> None:
    """Written out by hand from the protocols' descriptions, without the code under test."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    by_hand = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": [2, 3]}
    assert pack_openpi(array) == msgpack.packb(by_hand)
    assert pack_openpi(np.float32(0.5)) == msgpack.packb({b"__npgeneric__": True, b"data": 0.5, b"dtype": "<f4"})
    file = io.BytesIO()
    np.save(file, array)
    assert pack_groot({"x": array}) == msgpack.packb({"x": {"__ndarray_class__": True, "as_npy": file.getvalue()}})
    fields = {"delta_indices": [0, 1], "modality_keys": ["x"]}
    unused = {"sin_cos_embedding_keys": None, "mean_std_embedding_keys": None, "action_configs": None}
    assert pack_groot(Modality([0, 1], ["x"])) == msgpack.packb({"__ModalityConfig_class__": True, "as_json": fields | unused})


def pickled_npy() -> bytes:
    """An `.npy` file whose content is a pickle."""
    file = io.BytesIO()
    np.save(file, np.array([print], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("unpack", "message"),
    [
        (unpack_openpi, b""),
        (unpack_openpi, b"\x93\x01"),
        (unpack_openpi, b"\xc1"),
        (unpack_openpi, msgpack.packb({b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]})),
        (unpack_openpi, msgpack.packb({b"__ndarray__": True, b"data": b"1234", b"dtype": "<f4", b"shape": [2]})),
        (unpack_openpi, msgpack.packb({b"__ndarray__": True, b"data": b"1234", b"dtype": "nonsense", b"shape": [1]})),
        (unpack_openpi, msgpack.packb({b"__ndarray__": True, b"data": b"1234"})),
        (unpack_openpi, b"\x91" * 2000 + b"\x00"),
        (unpack_groot, msgpack.packb({"__ndarray_class__": True, "as_npy": pickled_npy()})),
        (unpack_groot, msgpack.packb({"__ndarray_class__": True, "as_npy": b"no npy"})),
        (unpack_groot, msgpack.packb({"__ndarray_class__": True, "as_npy": b""})),
        (unpack_groot, msgpack.packb({"__ModalityConfig_class__": True, "as_json": {}})),
    ],
)
def test_damaged_and_hostile_messages_are_refused(unpack: Any, message: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(message)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(message: bytes) -> None:
    for unpack in (unpack_openpi, unpack_groot):
        try:
            unpack(message)
        except MessageError:
            continue


def test_what_cannot_be_sent_is_refused() -> None:
    for value in (np.array([None]), np.array([1j]), object()):
        for pack in (pack_openpi, pack_groot):
            with pytest.raises(MessageError):
                pack({"a": value})


def observation(seed: int = 0) -> Observation:
    generator = np.random.default_rng(seed)
    images = {view: generator.integers(0, 256, (8, 8, 3), dtype=np.uint8) for view in VIEWS}
    return Observation(images, generator.normal(size=STATE_DIM).astype(np.float32), "pick up the milk")


def equal(first: Observation, second: Observation) -> bool:
    same = all(np.array_equal(first.images[view], second.images[view]) for view in VIEWS)
    return same and np.array_equal(first.state, second.state) and first.prompt == second.prompt


def test_observations_cross_openpis_wire() -> None:
    sent = observation()
    seen, seed = openpi.read_observation(unpack_openpi(pack_openpi(openpi.observation_message(sent, VIEWS, 2**63 - 1))), VIEWS)
    assert equal(sent, seen) and seed == 2**63 - 1
    message = openpi.observation_message(sent, VIEWS, None)
    assert set(message) == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    message["observation/state"] = message["observation/state"].astype(np.float64)  # as openpi's own client sends it
    assert openpi.read_observation(message, VIEWS)[0].state.dtype == np.float32


def test_observations_cross_groots_wire_nested_and_flat() -> None:
    sent = [observation(0), observation(1)]
    messages = [unpack_groot(pack_groot(groot.observation_message(one, VIEWS, 7)))["observation"] for one in sent]
    together = {
        "video": {name: np.concatenate([m["video"][name] for m in messages]) for name in messages[0]["video"]},
        "state": {name: np.concatenate([m["state"][name] for m in messages]) for name in messages[0]["state"]},
        "language": {groot.LANGUAGE_KEY: [[one.prompt] for one in sent]},
    }
    seen, seeds, flat = groot.read_request({"observation": together, "options": {groot.SEEDS_OPTION: [1, 2]}}, VIEWS)
    assert all(map(equal, sent, seen)) and seeds == [1, 2] and not flat
    named = {f"{kind}.{name}": value for kind in ("video", "state") for name, value in together[kind].items()}
    seen, seeds, flat = groot.read_request({"observation": named | {"task": [one.prompt for one in sent]}}, VIEWS)
    assert all(map(equal, sent, seen)) and seeds is None and flat


def test_groots_gripper_is_one_when_open() -> None:
    actions = np.zeros((1, 3, 7), np.float32)
    actions[0, :, 6] = [-1.0, 1.0, 0.25]
    answer, _ = groot.actions_message(actions, flat=False)
    assert answer["gripper"][0, :, 0].tolist() == [1.0, 0.0, 0.375]
    np.testing.assert_array_equal(groot.read_actions([answer, {}]), actions[0])
    theirs = [-np.sign(2 * g - 1) for g in answer["gripper"][0, :2, 0]]  # NVIDIA's LIBERO env
    assert theirs == actions[0, :2, 6].tolist()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ([], "is a dictionary"),
        ({"prompt": "x"}, "lacks observation/image, observation/wrist_image, observation/state"),
        (openpi.observation_message(observation(), VIEWS, None) | {"observation/image": "text"}, "observation/image must be a numpy array"),
        (openpi.observation_message(observation(), VIEWS, None) | {"observation/state": np.array(["a"] * 8)}, "state must hold numbers"),
        (openpi.observation_message(observation(), VIEWS, None) | {"prompt": None}, "prompt must be text, not NoneType"),
        (openpi.observation_message(observation(), VIEWS, None) | {"prompt": b"bytes"}, "prompt must be text, not bytes"),
        (openpi.observation_message(observation(), VIEWS, None) | {openpi.SEED_KEY: "abc"}, "seed must be a whole number, not 'abc'"),
    ],
)
def test_wrong_openpi_requests_name_the_key(message: Any, said: str) -> None:
    with pytest.raises(MessageError, match=said):
        openpi.read_observation(message, VIEWS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"video": {}}, "needs video.image as a numpy array"),
        ({"language": {}}, "needs the instruction"),
        ({"language": {groot.LANGUAGE_KEY: [["a"], ["b"]]}}, "equally many observations"),
        ({"language": {groot.LANGUAGE_KEY: [[None]]}}, "must be text, not NoneType"),
        ({"state": {name: np.zeros((1, 1, 1), np.float32) for name in groot.STATE_PARTS}}, "must have 8"),
        ({"state": {name: np.zeros(1, np.float32) for name in groot.STATE_PARTS}}, "must have 3 dimensions"),
    ],
)
def test_wrong_groot_requests_name_the_part(change: dict[str, Any], said: str) -> None:
    data = groot.observation_message(observation(), VIEWS, None)
    with pytest.raises(MessageError, match=said):
        groot.read_request({"observation": data["observation"] | change}, VIEWS)


@pytest.mark.parametrize("seeds", [3, [1, 2], ["a"], [0.5]])
def test_wrong_groot_seeds_are_named(seeds: Any) -> None:
    data = groot.observation_message(observation(), VIEWS, None) | {"options": {groot.SEEDS_OPTION: seeds}}
    with pytest.raises(MessageError, match="noise seed"):
        groot.read_request(data, VIEWS)


@pytest.mark.parametrize("answer", [{}, [], {"actions": np.zeros((0, 7))}, {"actions": np.zeros((3, 32))}, "text"])
def test_answers_without_actions_are_refused(answer: Any) -> None:
    with pytest.raises(MessageError):
        openpi.read_actions(answer)
    with pytest.raises(MessageError):
        groot.read_actions(answer)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("abc", "must hold numbers, not <U3"),
        ([[0.0] * 7, [0.0]], "no array of numbers"),
        ({}, "must hold numbers, not object"),
        (np.zeros((1, 7), complex), "must hold numbers, not complex"),
        (np.full((1, 7), np.nan), "not finite"),
    ],
)
def test_answers_with_other_things_than_numbers_are_refused(values: Any, said: str) -> None:
    with pytest.raises(MessageError, match=f"actions of the answer .*{said}|answer is {said}"):
        openpi.read_actions({"actions": values})
    parts = dict.fromkeys(groot.ACTION_PARTS, np.zeros((1, 3, 1), np.float32))
    with pytest.raises(MessageError, match=f"yaw of the answer .*{said}|answer is {said}"):
        groot.read_actions([parts | {"yaw": values}, {}])


def test_an_answer_to_no_observation_is_refused() -> None:
    with pytest.raises(MessageError, match="the answer has no actions: x, y, z"):
        groot.read_actions([dict.fromkeys(groot.ACTION_PARTS, np.zeros((0, 3, 1), np.float32)), {}])


def test_descriptions_go_both_ways_and_incomplete_ones_are_named() -> None:
    served = ServedPolicy("folder", "0123", PolicySpec(50, 10, ("image2",), 224))
    for pack, unpack in ((pack_openpi, unpack_openpi), (pack_groot, unpack_groot)):
        assert ServedPolicy.from_dict(unpack(pack(served.to_dict()))) == served
    with pytest.raises(RemoteError, match="same version of vla-rl"):
        ServedPolicy.from_dict({"name": "x"})


def test_another_servers_modalities_say_views_and_chunk_length() -> None:
    assert groot.views_and_chunk(groot.modalities(PolicySpec(16, 8))) == (VIEWS, 16)
    robot = {"video": Modality([0], ["ego_view"]), "action": Modality([0], ["x"])}
    with pytest.raises(MessageError, match="ego_view"):
        groot.views_and_chunk(robot)
