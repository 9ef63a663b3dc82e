"""Caffe2's `TensorProtos`: the tensors of one record, as they lie in an LMDB."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.stores.wire import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    fields,
    int32,
    packed_fixed,
    packed_varints,
)

# TensorProtos
_PROTOS = 1
# TensorProto
_DIMS, _DATA_TYPE, _FLOATS, _INT32S, _OCTETS, _STRINGS, _DOUBLES, _INT64S = 1, 2, 3, 4, 5, 6, 9, 10

FLOAT, INT32, BYTE, STRING, INT64 = 1, 2, 3, 4, 10
_TYPE_NAMES = {
    0: "UNDEFINED", FLOAT: "FLOAT", INT32: "INT32", BYTE: "BYTE", STRING: "STRING", 5: "BOOL",
    6: "UINT8", 7: "INT8", 8: "UINT16", 9: "INT16", INT64: "INT64", 12: "FLOAT16", 13: "DOUBLE",
    14: "ZERO_COLLISION_HASH", 15: "REBATCHING_BUFFER",
}  # fmt: skip
_FIXED = {_FLOATS: (FIXED32, "<f4"), _DOUBLES: (FIXED64, "<f8")}
_VARINTS = (_DIMS, _INT32S, _INT64S)


@dataclass(slots=True)
class Tensor:
    """A parsed TensorProto. Bytes are not copied. Read-only once parsed."""

    data_type: int = FLOAT
    octets: memoryview | None = None
    """`byte_data`."""
    strings: list[memoryview] = field(default_factory=list)
    """`string_data`."""
    parts: dict[int, list[Any]] = field(default_factory=dict)
    """Of each field of numbers the pieces that it came in."""

    @property
    def type_name(self) -> str:
        """The name of the data type."""
        return _TYPE_NAMES[self.data_type]

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape, as it is declared."""
        return tuple(self._numbers(_DIMS, "<i8").tolist())

    def numbers(self) -> NDArray[Any]:
        """The tensor's numbers, in one dimension: float32, int32 or int64.

        Raises:
            ValueError: its data type is another.
        """
        if self.data_type == FLOAT:
            return self._numbers(_FLOATS, "<f4")
        if self.data_type == INT32:
            # The low 32 bits count, however many were written.
            return self._numbers(_INT32S, "<i8").astype(np.int32)
        if self.data_type == INT64:
            return self._numbers(_INT64S, "<i8")
        raise ValueError(f"is of data type {self.type_name}, expected FLOAT, INT32 or INT64")

    def _numbers(self, number: int, dtype: str) -> NDArray[Any]:
        parts = self.parts.get(number, [])
        numbers = np.concatenate(parts) if parts else np.empty(0, dtype)
        # The file is little-endian; the column is the machine's.
        return numbers.view(dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def parse_tensors(value: memoryview) -> list[Tensor]:
    """Parse a TensorProtos. Numbers may be packed or not; unknown fields are passed over.

    Raises:
        WireError: the bytes are not a protobuf message.
    """
    return [
        _parse_tensor(value[start:stop])
        for number, kind, start, stop in fields(value)
        if number == _PROTOS and kind == BYTES
    ]


def _parse_tensor(value: memoryview) -> Tensor:
    tensor = Tensor()
    for number, kind, first, second in fields(value):
        if number in _VARINTS:
            if kind == VARINT:
                _append(tensor, number, np.array([first], dtype=np.uint64))
            elif kind == BYTES:
                _append(tensor, number, packed_varints(value[first:second]))
        elif number in _FIXED:
            fixed, dtype = _FIXED[number]
            if kind in (fixed, BYTES):
                _append(tensor, number, packed_fixed(value[first:second], dtype))
        elif number == _DATA_TYPE and kind == VARINT:
            # An enum keeps to the values that it knows.
            if int32(first) in _TYPE_NAMES:
                tensor.data_type = int32(first)
        elif kind == BYTES and number == _OCTETS:
            tensor.octets = value[first:second]
        elif kind == BYTES and number == _STRINGS:
            tensor.strings.append(value[first:second])
    return tensor


def _append(tensor: Tensor, number: int, part: NDArray[Any]) -> None:
    # A repeated field may come in pieces, packed or one by one: they are one list.
    tensor.parts.setdefault(number, []).append(part)
