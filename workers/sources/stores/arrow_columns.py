"""Columns of Arrow tables as NumPy arrays: by rows of one shape, or by values and offsets.

Nothing here imports pyarrow: tables are given, and pyarrow's types say what they are by their
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: NDArray[Any]
    offsets: NDArray[Any]
    text: str = ""
    """"str" or "bytes" where the rows are such; else they are arrays."""

    def __getitem__(self, row: int) -> Any:
        values = self.values[self.offsets[row] : self.offsets[row + 1]]
        if not self.text:
            return values
        return values.tobytes().decode() if self.text == "str" else values.tobytes()


ColumnArray: TypeAlias = "NDArray[Any] | Ragged"


def is_ragged(kind: Any) -> bool:
    """Whether a column of an Arrow type has rows of different lengths."""
    name = str(kind)
    if name.startswith(("fixed_size_list", "dictionary")):
        return is_ragged(kind.value_type)
    if name.startswith("extension"):
        return is_ragged(kind.storage_type)
    return name.startswith(_LISTS) or name in _TEXTS


def has_arrays(schema: Any) -> bool:
    """Whether there are arrays of all columns of an Arrow schema."""
    try:
        to_columns(schema.empty_table())
    except ValueError:
        return False
    return True


# With the bracket: views of lists begin alike, and have no such offsets.
_LISTS = ("list<", "large_list<")


_TEXTS = {"string": "str", "large_string": "str", "binary": "bytes", "large_binary": "bytes"}


def to_columns(table: Any) -> dict[str, ColumnArray]:
    """The columns of a table, structs flattened.

    Raises:
        ValueError: a column has nulls, or a type of which there are no arrays.
    """
    while any(str(field.type).startswith("struct") for field in table.schema):
        table = table.flatten()
    return {
        name: _to_array(_one(column), name)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _one(column: Any) -> Any:
    """A column in one piece."""
    made = column.combine_chunks()
    # Of a column without chunks there is a chunked array still, in some versions.
    return made.chunk(0) if hasattr(made, "chunk") and made.num_chunks else made


def _to_array(array: Any, name: str) -> ColumnArray:
    if array.null_count:
        raise ValueError(f"column {name!r} has {array.null_count} nulls")
    kind = str(array.type)
    if kind.startswith("dictionary"):
        return _to_array(array.dictionary_decode(), name)
    if kind.startswith("extension"):
        return _to_array(array.storage, name)
    if kind.startswith("fixed_size_list"):
        # `flatten` knows of slices.
        inner = _to_array(array.flatten(), name)
        if isinstance(inner, Ragged):
            raise _deep(name, kind)
        return inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    if kind in _TEXTS:
        return _text(array, _TEXTS[kind])
    if kind.startswith(_LISTS):
        inner = _to_array(array.flatten(), name)
        if isinstance(inner, Ragged):
            raise _deep(name, kind)
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        return Ragged(inner, offsets - offsets[0])
    made = array.to_numpy(zero_copy_only=False)
    if made.dtype.hasobject:
        raise ValueError(f"column {name!r} is {kind}, of which there is no array")
    # Some are views of Arrow's memory, and some are copies. A group is kept, so that no function
    # may change what the next epoch reads.
    made.flags.writeable = False
    values: NDArray[Any] = made
    return values


def _deep(name: str, kind: str) -> ValueError:
    return ValueError(
        f"column {name!r} is {kind}: rows of different lengths in a list have no array"
    )


def _text(array: Any, text: str) -> Ragged:
    wide = str(array.type).startswith("large")
    _, offsets, values = array.buffers()
    places = np.frombuffer(offsets, np.int64 if wide else np.int32)
    places = places[array.offset : array.offset + len(array) + 1]
    octets = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    return Ragged(octets, places, text)
