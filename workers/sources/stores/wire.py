"""A reader of the protobuf wire format (protobuf.dev/programming-guides/encoding).

It takes a message apart into fields, without a schema and without a copy: what a field means is
up to the caller. Like the reference parsers it steps over fields and groups that nobody asks for,
and refuses what is truncated or malformed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
_START_GROUP: Final = 3
_END_GROUP: Final = 4

_MASK_64 = 2**64 - 1
_MAX_DEPTH = 100
_MAX_HEAD_BYTES = 5

Data = bytes | memoryview


class WireError(ValueError):
    """The bytes are not a protobuf message."""


def fields(data: Data) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message, in the order in which they stand: number, wire type, and two
    numbers: of a varint its value and where it ends, of the others where they start and end."""
    at, end = 0, len(data)
    while at < end:
        number, kind, at = _tag(data, at)
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value, at
            continue
        start, stop = _span(data, at, number, kind)
        # Groups are no longer written; what is in one belongs to nobody here.
        if kind != _START_GROUP:
            yield number, kind, start, stop
        at = stop


def _tag(data: Data, start: int) -> tuple[int, int, int]:
    """Field number and wire type of the field at a byte, and where the tag ends."""
    tag, at = varint(data, start)
    # Field number 0 does not exist, and a tag has 29 bits of number: else these are no protobuf
    # bytes.
    if not 8 <= tag < 1 << 32 or at - start > _MAX_HEAD_BYTES:
        raise WireError(f"field number is {tag >> 3} at byte {at}")
    return tag >> 3, tag & 7, at


def _span(data: Data, at: int, number: int, kind: int, depth: int = 0) -> tuple[int, int]:
    """Where a field's value starts and where the next field does."""
    if kind == BYTES:
        begin = at
        length, at = varint(data, at)
        if at - begin > _MAX_HEAD_BYTES:
            raise WireError(f"field {number} has a length of {at - begin} bytes at byte {at}")
        stop = at + length
    elif kind in (FIXED32, FIXED64):
        stop = at + (4 if kind == FIXED32 else 8)
    elif kind == _START_GROUP:
        stop = _skip_group(data, at, number, depth + 1)
    else:
        raise WireError(f"wire type is {kind} at byte {at}")
    # Lengths come from the file: a longer one would read the next record.
    if stop > len(data):
        raise WireError(f"field {number} ends at byte {stop}, the message at {len(data)}")
    return at, stop


def _skip_group(data: Data, at: int, group: int, depth: int) -> int:
    # The reference parsers' limit: nested groups would exhaust Python's stack.
    if depth > _MAX_DEPTH:
        raise WireError(f"groups are nested more than {_MAX_DEPTH} deep")
    while True:
        number, kind, at = _tag(data, at)
        if kind == _END_GROUP:
            if number != group:
                raise WireError(f"group {group} is ended by group {number} at byte {at}")
            return at
        if kind == VARINT:
            _, at = varint(data, at)
        else:
            _, at = _span(data, at, number, kind, depth)


def varint(data: Data, at: int) -> tuple[int, int]:
    """The varint at a byte, as an unsigned number of 64 bits, and where it ends."""
    value = shift = 0
    try:
        while True:
            octet = data[at]
            at += 1
            value |= (octet & 127) << shift
            if octet < 128:
                return value & _MASK_64, at
            shift += 7
            # Ten bytes hold 64 bits; more is damage, and must not loop on.
            if shift == 70:
                raise WireError(f"varint has more than 10 bytes at byte {at}")
    except IndexError:
        raise WireError("message ends within a varint") from None


def int32(value: int) -> int:
    """A varint as the `int32` that it stands for: the low 32 bits, signed."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def int64(value: int) -> int:
    """A varint as the `int64` that it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def packed_varints(data: Data) -> NDArray[np.uint64]:
    """The varints that a packed field holds."""
    octets = np.frombuffer(data, np.uint8)
    # A varint ends at the first byte without the top bit.
    ends = np.flatnonzero(octets < 128)
    if len(octets) and (not len(ends) or ends[-1] != len(octets) - 1):
        raise WireError("packed field ends within a varint")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - starts + 1
    if len(lengths) and lengths.max() > 10:
        raise WireError("packed varint has more than 10 bytes")
    values = np.zeros(len(ends), dtype=np.uint64)
    # One round per byte of the longest number, not one per number.
    for place in range(int(lengths.max(initial=0))):
        has = lengths > place
        part = octets[starts[has] + place].astype(np.uint64) & np.uint64(127)
        values[has] |= part << np.uint64(7 * place)
    return values


def packed_fixed(data: Data, dtype: str) -> NDArray[Any]:
    """The numbers of fixed size that a packed field holds, as a copy."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise WireError(f"packed field has {len(data)} bytes, which is no multiple of {size}")
    return np.frombuffer(data, dtype).copy()
