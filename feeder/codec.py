"""Values as msgpack, exactly: what goes in comes out, tuples, large integers and arrays too."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from workers.dtypes import read_dtype, write_dtype

_TUPLE, _INTEGER, _ARRAY = 1, 2, 3

# File names on Linux may hold bytes that are no text; Python writes these as surrogates.
_ANY_TEXT = "surrogatepass"


def pack(value: Any) -> bytes:
    """Encode None, bool, int, float, str, bytes, list, tuple, dict, and NumPy scalars and arrays
    without Python objects; NumPy scalars come back as plain numbers, equal ones. Raises `TypeError`
    for anything that would come back as something else, as named tuples, masked arrays, dates."""
    packed: bytes = msgpack.packb(
        value, default=_extend, strict_types=True, unicode_errors=_ANY_TEXT
    )
    return packed


def unpack(packed: bytes) -> Any:
    """The reverse of `pack`; raises `ValueError` for what is not its output."""
    try:
        return msgpack.unpackb(
            packed, ext_hook=_shrink, strict_map_key=False, unicode_errors=_ANY_TEXT
        )
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"not msgpack: {error}") from error


def _extend(value: Any) -> Any:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, int):
        text = str(int(value)).encode()
        return int(value) if type(value) is not int else msgpack.ExtType(_INTEGER, text)
    if isinstance(value, np.generic) and not isinstance(value, _NO_NUMBERS):
        plain = value.item()  # A long double is its own. Not a number is equal to nothing.
        if isinstance(plain, _PLAIN) and (plain == value or plain != plain):
            return plain
    if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        fields = [write_dtype(value.dtype), list(value.shape), value.tobytes()]
        return msgpack.ExtType(_ARRAY, pack(fields))
    if isinstance(value, (str, bytes, float, list, dict)):
        return next(base for base in _BASES if isinstance(value, base))(value)
    raise TypeError(
        f"cannot save {type(value).__name__}; expected None, numbers, str, bytes, list, tuple, "
        "dict or NumPy arrays: anything else would not come back as what it was"
    )


_BASES: tuple[Any, ...] = (str, bytes, float, list, dict)
_NO_NUMBERS = (np.datetime64, np.timedelta64, np.void)
_PLAIN = (bool, int, float, str, bytes)


def _shrink(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _INTEGER:
        return int(data)
    if code == _ARRAY:
        dtype, shape, raw = unpack(data)
        return np.frombuffer(bytearray(raw), np.uint8).view(read_dtype(dtype)).reshape(shape)
    raise ValueError(f"unknown extension {code}")
