"""Values as msgpack, exactly: what goes in comes out, tuples, large integers and arrays too."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgpack
import numpy as np

from feeder.workers.stream.dtypes import read_dtype, write_dtype

_TUPLE, _INTEGER, _ARRAY = 1, 2, 3

# File names on Linux may hold bytes that are no text; Python writes these as surrogates.
_ANY_TEXT = "surrogatepass"


# A tuple or an array in another is msgpack in msgpack, and each level takes the C stack for its
# reader and its writer. Without a bound a small message of many levels ends the process.
_MAX_DEPTH = 32


def pack(value: Any) -> bytes:
    """Encode None, bool, int, float, str, bytes, list, tuple, dict, and NumPy scalars and arrays
    without Python objects; NumPy scalars come back as plain numbers, equal ones. Raises `TypeError`
    for anything that would come back as something else, as named tuples, masked arrays, dates, and
    `ValueError` for more than 32 tuples in each other."""
    return _pack(value, 0)


def unpack(packed: bytes) -> Any:
    """The reverse of `pack`; raises `ValueError` for what is not its output."""
    return _unpack(packed, 0)


def _pack(value: Any, depth: int) -> bytes:
    packed: bytes = msgpack.packb(
        value, default=_EXTEND[depth], strict_types=True, unicode_errors=_ANY_TEXT
    )
    return packed


def _unpack(packed: bytes, depth: int) -> Any:
    try:
        return msgpack.unpackb(
            packed, ext_hook=_SHRINK[depth], strict_map_key=False, unicode_errors=_ANY_TEXT
        )
    except ValueError:
        raise
    except Exception as error:
        # msgpack, NumPy and the hooks above raise many kinds for bytes that make no sense.
        raise ValueError(f"not msgpack: {error}") from error


def _below(depth: int) -> int:
    """The depth of what an extension at `depth` holds."""
    if depth == _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} tuples in each other, expected at most so many")
    return depth + 1


def _extend(depth: int, value: Any) -> Any:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value), _below(depth)))
    if isinstance(value, int):
        text = str(int(value)).encode()
        return int(value) if type(value) is not int else msgpack.ExtType(_INTEGER, text)
    # Kept as plain numbers only where nothing is lost.
    if isinstance(value, np.generic) and not isinstance(value, _NO_NUMBERS):
        plain = value.item()  # A long double is its own. Not a number is equal to nothing.
        if isinstance(plain, _PLAIN) and (plain == value or plain != plain):
            return plain
    if type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject:
        fields = [write_dtype(value.dtype), list(value.shape), value.tobytes()]
        return msgpack.ExtType(_ARRAY, _pack(fields, _below(depth)))
    for base in _BASES:
        # What says of itself something else, as members of an Enum of texts do, is not that text.
        if isinstance(value, base) and (plain := base(value)) == value:
            return plain
    raise TypeError(
        f"cannot save {type(value).__name__}; expected None, numbers, str, bytes, list, tuple, "
        "dict or NumPy arrays: anything else would not come back as what it was"
    )


_BASES: tuple[Any, ...] = (str, bytes, float, list, dict)
# Their `item()` is a date, a number of days, or bytes: equal ones would come back as another type.
_NO_NUMBERS = (np.datetime64, np.timedelta64, np.void)
_PLAIN = (bool, int, float, str, bytes)


def _shrink(depth: int, code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(_unpack(data, _below(depth)))
    if code == _INTEGER:
        return int(data)
    if code == _ARRAY:
        dtype, shape, raw = _unpack(data, _below(depth))
        return np.frombuffer(bytearray(raw), np.uint8).view(read_dtype(dtype)).reshape(shape)
    raise ValueError(f"unknown extension {code}")


# One hook per depth, made once: a closure for each value would cost more than the value.
_EXTEND = [partial(_extend, depth) for depth in range(_MAX_DEPTH + 1)]
_SHRINK = [partial(_shrink, depth) for depth in range(_MAX_DEPTH + 1)]
