"""`tf.train.Example` and `SequenceExample`, read from the wire format: features by name."""

from __future__ import annotations

from collections.abc import Iterator
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

# Example.features or SequenceExample.context, SequenceExample.feature_lists; Features.feature and
# FeatureLists.feature_list (maps: key, value); FeatureList.feature; Feature's one of three lists.
_FEATURES = _FEATURE = _KEY = _STEPS = _VALUES = 1
_FEATURE_LISTS = _VALUE = 2
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse_example(data: bytes) -> dict[str, Any]:
    """The features of an `Example`, in the order of their names: int64 and float32 arrays of one
    axis; of strings the bytes if there is one, otherwise a list of them. Of a `SequenceExample` the
    features of its context, and of each feature list a list with the feature of each step.

    Raises:
        WireError: the bytes are no such message.
    """
    made: dict[str, Any] = {name: _feature(value) for name, value in _map_in(data, _FEATURES)}
    steps = dict(_map_in(data, _FEATURE_LISTS))
    if both := sorted(made.keys() & steps.keys()):
        raise WireError(f"context and feature_lists both have {both}: give decode= a function")
    for name, value in steps.items():
        made[name] = [_feature(step) for step in _inside(value, _STEPS)]
    # A map has no order of its own: that of the bytes may be another in the next record.
    return dict(sorted(made.items()))


def _map_in(data: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    """The entries of the map in a field; of a key that comes again the last one counts."""
    for inner in _inside(data, number):
        for entry in _inside(inner, _FEATURE):
            # Fields that are not written are empty. Messages that come again are one, joined.
            key = value = b""
            for field, kind, start, stop in fields(entry):
                if kind == BYTES and field == _KEY:
                    key = entry[start:stop]
                elif kind == BYTES and field == _VALUE:
                    value = value + entry[start:stop] if value else entry[start:stop]
            yield key.decode(), value


def _inside(data: bytes, number: int) -> list[bytes]:
    return [data[a:b] for n, kind, a, b in fields(data) if n == number and kind == BYTES]


def _feature(data: bytes) -> Any:
    last, values = 0, b""
    for number, kind, start, stop in fields(data):
        if kind == BYTES and number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            # One of three: another one replaces it, and the same one is joined to it.
            part = data[start:stop]
            values = values + part if number == last else part
            last = number
    if last == _BYTES_LIST:
        strings = _inside(values, _VALUES)
        return strings[0] if len(strings) == 1 else strings
    if last == _INT64_LIST:
        return _numbers(values, VARINT, np.dtype(np.int64))
    # Without a list, too: the feature is there, and empty.
    return _numbers(values, FIXED32, np.dtype("<f4"))


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
