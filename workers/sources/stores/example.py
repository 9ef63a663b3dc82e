"""`tf.train.Example` messages, read from the wire format: features by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.stores.wire import (
    BYTES,
    FIXED32,
    VARINT,
    WireError,
    fields,
    int64,
    packed_fixed,
    packed_varints,
)

# Example.features, Features.feature (a map: key, value), and Feature's one of three lists.
_FEATURES = _FEATURE = _KEY = _VALUES = 1
_VALUE = 2
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse_example(data: bytes) -> dict[str, Any]:
    """The features of a message, in the order of their names: int64 and float32 arrays of one axis;
    of strings the bytes, where there is one, and else a list of them.

    Raises:
        WireError: the bytes are no such message.
    """
    made: dict[str, Any] = {}
    for features in _inside(data, _FEATURES):
        for entry in _inside(features, _FEATURE):
            key, value = None, b""
            for number, kind, start, stop in fields(entry):
                if kind == BYTES and number == _KEY:
                    key = entry[start:stop].decode()
                elif kind == BYTES and number == _VALUE:
                    value = entry[start:stop]
            if key is not None:
                made[key] = _feature(value)
    # A map has no order of its own: that of the bytes may be another in the next record.
    return dict(sorted(made.items()))


def _inside(data: bytes, number: int) -> list[bytes]:
    return [data[a:b] for n, kind, a, b in fields(data) if n == number and kind == BYTES]


def _feature(data: bytes) -> Any:
    for number, kind, start, stop in fields(data):
        values = data[start:stop]
        if kind != BYTES:
            continue
        if number == _BYTES_LIST:
            strings = _inside(values, _VALUES)
            return strings[0] if len(strings) == 1 else strings
        if number == _FLOAT_LIST:
            return _numbers(values, FIXED32, np.dtype("<f4"))
        if number == _INT64_LIST:
            return _numbers(values, VARINT, np.dtype(np.int64))
    # A feature without a list: it is there, and empty.
    return np.empty(0, np.float32)


def _numbers(data: bytes, single: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers, each by itself or packed: writers may do either."""
    parts: list[NDArray[Any]] = []
    for number, kind, start, stop in fields(data):
        if number != _VALUES:
            continue
        if kind == BYTES and single == VARINT:
            parts.append(packed_varints(data[start:stop]).astype(np.int64))
        elif kind == BYTES:
            parts.append(packed_fixed(data[start:stop], "<f4"))
        elif kind != single:
            raise WireError(f"a list of numbers has the wire type {kind}")
        elif single == VARINT:
            parts.append(np.array([int64(start)]))
        else:
            parts.append(np.frombuffer(data[start:stop], dtype))
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
