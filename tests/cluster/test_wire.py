"""Parcels and errors survive the way between processes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.cluster.errors import RoleFailed, RoleName
from vla_rl.cluster.wire import ArenaParcel, Raised, pack, unpack
from vla_rl.config import ConfigError

NAME = RoleName("trainer", 1, "here", "logs/trainer_1.log")
SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([np.uint8, np.float32, np.float64, np.bool_])


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=6), st.text(max_size=20))
def test_a_parcel_holds_what_was_packed(arrays: list[tuple[list[int], type]], text: str) -> None:
    made = [np.ones(shape, dtype) for shape, dtype in arrays]
    arena = pack({"arrays": made, "text": text, "nothing": None}, "test")
    payload = unpack(arena)
    arena.close()
    assert payload["text"] == text and payload["nothing"] is None
    for before, after in zip(made, payload["arrays"], strict=True):
        assert before.dtype == after.dtype and np.array_equal(before, after)


def test_arrays_of_a_parcel_are_views_into_it() -> None:
    arena = pack([np.zeros(1000, np.uint8), torch.zeros(3).numpy()], "test")
    first, second = unpack(arena), unpack(arena)
    first[0][7] = 9
    assert second[0][7] == 9
    assert [array.ctypes.data % 64 for array in first] == [0, 0]
    arena.close()
    assert second[0][7] == 9, "the memory stays mapped"


def test_a_parcel_leaves_no_open_file_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    parcel = ArenaParcel(pack(np.arange(10), "test"))
    travelled = pickle.loads(pickle.dumps(parcel))
    parcel.release()
    parcel.release()
    with pytest.raises(ValueError, match="after it was released"):
        parcel.fetch()
    assert np.array_equal(travelled.fetch(), np.arange(10)), "who has attached keeps it"
    travelled.release()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if "vla-rl" in name]


def test_an_error_for_the_user_stays_one_and_says_where_it_came_from(tmp_path: Path) -> None:
    try:
        raise ConfigError("steps is 0; it must be at least 1")
    except ConfigError as error:
        travelled = pickle.loads(pickle.dumps(Raised.of(error)))
    with pytest.raises(ConfigError, match="it must be at least 1") as caught:
        raise travelled.error(NAME)
    assert caught.value.__notes__[0].startswith("raised by trainer 1 on here (log: logs/trainer_1.log):\nTraceback")


def test_an_error_without_a_pickle_arrives_as_its_traceback() -> None:
    class Local(RuntimeError):
        pass

    try:
        raise Local("deep inside")
    except Local as error:
        travelled = Raised.of(error).error(NAME)
    assert isinstance(travelled, RoleFailed) and "Local: deep inside" in str(travelled) and "trainer 1 on here" in str(travelled)
