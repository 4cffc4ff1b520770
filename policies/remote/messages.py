"""Arrays in msgpack, as the two policy protocols of robotics write them; nothing here can run code that a peer sent.

openpi (`openpi_client/msgpack_numpy.py`): a map with the byte keys `__ndarray__`, `data`, `dtype`, `shape`; `__npgeneric__` for scalars.
GR00T (`gr00t/policy/server_client.py`): a map with the text keys `__ndarray_class__` and `as_npy`, which holds a whole `.npy` file, and
`__ModalityConfig_class__` with `as_json` for the description of a modality.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from vla_rl.errors import UserError

REFUSED_KINDS = "VOc"
"""Kinds of numpy dtypes that neither protocol carries: void, object (whose only form would be a pickle), complex."""


class MessageError(UserError):
    """Bytes that are no message of the protocol, or a value that the protocol cannot carry."""


@dataclass(frozen=True)
class Modality:
    """GR00T's `ModalityConfig`: which steps of which keys belong to a modality."""

    delta_indices: list[int]
    """Time steps relative to now; for `action`, one per action of a chunk."""
    modality_keys: list[str]
    """Names of the parts, in order."""


def pack_openpi(value: Any) -> bytes:
    """msgpack with numpy arrays in openpi's form. Raises MessageError for a dtype that it cannot carry."""
    return _pack(value, _openpi_form)


def unpack_openpi(message: bytes) -> Any:
    """Inverse of `pack_openpi`; arrays are read-only views of the message. Raises MessageError."""
    return _unpack(message, _from_openpi_form)


def pack_groot(value: Any) -> bytes:
    """msgpack with numpy arrays and `Modality` in GR00T's form. Raises MessageError for a dtype that it cannot carry."""
    return _pack(value, _groot_form)


def unpack_groot(message: bytes) -> Any:
    """Inverse of `pack_groot`. Raises MessageError."""
    return _unpack(message, _from_groot_form)


def _pack(value: Any, form: Callable[[Any], Any]) -> bytes:
    packer = _packer(form)
    try:
        packed = packer.pack(value)
    except TypeError as error:
        packer.reset()
        raise MessageError(f"the message cannot be written: {error}; send numbers, text, lists, dictionaries and numpy arrays") from error
    except MessageError:
        packer.reset()
        raise
    assert packed is not None, "a packer that resets itself returns bytes"
    return packed


_packers = threading.local()


def _packer(form: Callable[[Any], Any]) -> msgpack.Packer:
    """This thread's packer for a form: its buffer has grown to the size of pictures, and is kept."""
    if form.__name__ not in vars(_packers):
        setattr(_packers, form.__name__, msgpack.Packer(default=form))
    return getattr(_packers, form.__name__)


def _unpack(message: bytes, restore: Callable[[Any], Any]) -> Any:
    try:
        return msgpack.unpackb(message, object_hook=restore)
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise MessageError(f"{len(message)} bytes are no message of the protocol ({type(error).__name__}: {error})") from error


def _openpi_form(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        _require_plain(value.dtype)
        data = value.data if value.flags.c_contiguous and value.dtype.kind in "biuf" and value.size else value.tobytes()
        return {b"__ndarray__": True, b"data": data, b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        _require_plain(value.dtype)
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return value


def _from_openpi_form(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=_plain_dtype(value[b"dtype"]), shape=value[b"shape"])
    if b"__npgeneric__" in value:
        return _plain_dtype(value[b"dtype"]).type(value[b"data"])
    return value


def _groot_form(value: Any) -> Any:
    if isinstance(value, Modality):
        fields = {"delta_indices": value.delta_indices, "modality_keys": value.modality_keys}
        unused = {"sin_cos_embedding_keys": None, "mean_std_embedding_keys": None, "action_configs": None}
        return {"__ModalityConfig_class__": True, "as_json": fields | unused}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        _require_plain(value.dtype)
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    return value


def _from_groot_form(value: dict[Any, Any]) -> Any:
    if "__ndarray_class__" in value:
        return np.load(io.BytesIO(value["as_npy"]), allow_pickle=False)
    if "__ModalityConfig_class__" in value:
        fields = value["as_json"]
        return Modality(list(fields["delta_indices"]), list(fields["modality_keys"]))
    return value


def _plain_dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(name)
    _require_plain(dtype)
    return dtype


def _require_plain(dtype: np.dtype[Any]) -> None:
    if dtype.kind in REFUSED_KINDS:
        raise MessageError(f"arrays of dtype {dtype} cannot be sent; allowed are numbers, booleans and text")
