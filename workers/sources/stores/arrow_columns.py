"""Columns of Arrow tables: arrays of rows of one shape, or rows that are made one by one.

A table is given, and pyarrow's types say what they are by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.extras import load


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: ColumnArray
    offsets: NDArray[Any]
    text: str = ""
    """"str" or "bytes" if the rows are such; otherwise they are arrays, or lists of what has no
    array."""

    def __getitem__(self, row: int) -> Any:
        start, stop = self.offsets[row], self.offsets[row + 1]
        if isinstance(self.values, Gaps):
            return self.values.part(start, stop)
        if not isinstance(self.values, np.ndarray):
            rows = [self.values[i] for i in range(start, stop)]
            return MapItems(rows) if isinstance(self.values, Pairs) else rows
        values = self.values[start:stop]
        if not self.text:
            return values
        return values.tobytes().decode() if self.text == "str" else values.tobytes()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes


class MapItems(list[Any]):
    """Keys and values of a map, as a list that NumPy makes no array of: it would give both one
    dtype."""

    def __array__(self, *arguments: Any, **options: Any) -> NDArray[Any]:
        raise ValueError("a map has no array: make arrays of its keys and values with map")


@dataclass(frozen=True, slots=True)
class Pairs:
    """What lies in a map: row i is a key and its value."""

    keys: ColumnArray
    items: ColumnArray

    def __getitem__(self, row: int) -> Any:
        return self.keys[row], self.items[row]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.items.nbytes


@dataclass(frozen=True, slots=True)
class Values:
    """Rows of which there are no arrays, as pyarrow makes Python objects of them."""

    array: Any

    def __getitem__(self, row: int) -> Any:
        return self.array[row].as_py()

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Rows of which some are null: row i is `values[places[i]]` if it is valid."""

    values: ColumnArray
    places: NDArray[Any]
    valid: NDArray[Any]
    instead: Any = None
    """What a null is given as."""

    def __getitem__(self, row: int) -> Any:
        return self.values[self.places[row]] if self.valid[row] else self.instead

    def part(self, start: int, stop: int) -> Any:
        """Rows as an array, or as a list if there is no array of them."""
        if isinstance(self.values, np.ndarray) and self.valid[start:stop].all():
            first = self.places[start] if start < stop else 0
            return self.values[first : first + stop - start]
        return [self[i] for i in range(start, stop)]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.places.nbytes + self.valid.nbytes


@dataclass(frozen=True, slots=True)
class Chunks:
    """The rows of several columns, one after the other."""

    parts: Sequence[ColumnArray]
    ends: NDArray[Any]

    def __getitem__(self, row: int) -> Any:
        number = int(np.searchsorted(self.ends, row, side="right"))
        return value_of(self.parts[number], row - (self.ends[number - 1] if number else 0))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


ColumnArray: TypeAlias = "NDArray[Any] | Ragged | Pairs | Values | Gaps | Chunks"


def value_of(column: ColumnArray, row: int) -> Any:
    """A row; a number stays an array, with its dtype."""
    return column[row, ...] if isinstance(column, np.ndarray) else column[row]


# ---- nulls


@dataclass(frozen=True, slots=True)
class Nulls:
    """What a null becomes: nothing, so that it is None; a value; or zero, beside a column that says
    where nulls were."""

    fill: Any = None
    """A value, or values by column; None is none."""
    mask: bool = False

    @classmethod
    def of(cls, given: Any) -> Nulls:
        """What the user gives as `nulls=`.

        Raises:
            ConfigError: it is no such thing.
        """
        if isinstance(given, Mapping) or not (given is None or isinstance(given, str)):
            return cls(fill=given)
        if given not in ("error", "mask"):
            raise ConfigError(
                f"nulls is {given!r}, expected 'error', 'mask', a value for all columns, or values "
                "by column, such as {'text': ''}"
            )
        return cls(mask=given == "mask")

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError if a value is for a column that is not there."""
        for name in self.fill if isinstance(self.fill, Mapping) else ():
            if name not in names:
                raise ConfigError(f"nulls names {name!r}, the columns are {list(names)}")

    def columns(self, name: str, column: ColumnArray) -> dict[str, ColumnArray]:
        """A column in which nulls are what they become, and beside it where they were."""
        fill = self.fill.get(name) if isinstance(self.fill, Mapping) else self.fill
        where = None
        if isinstance(column, Values) and column.array.null_count:
            valid = column.array.is_valid().to_numpy(zero_copy_only=False)
            where = ~valid
            if fill is not None:
                column = Gaps(column, np.arange(len(valid)), valid, fill)
        elif isinstance(column, Gaps):
            where = ~column.valid
            if self.mask:
                column = _filled(column, _zero(column.values), name)
            elif fill is not None:
                column = _filled(column, fill, name)
        if not self.mask:
            return {name: column}
        if where is None:
            where = np.zeros(_length(column), np.bool_)
        where.flags.writeable = False
        return {name: column, f"{name}.is_null": where}

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        if self.mask:
            return {"nulls": "mask"}
        return {} if self.fill is None else {"nulls": repr(self.fill)}


def _zero(column: ColumnArray) -> Any:
    if isinstance(column, np.ndarray):
        return np.zeros((), column.dtype)
    if isinstance(column, Ragged) and column.text:
        return "" if column.text == "str" else b""
    return column.values[:0] if (
        isinstance(column, Ragged) and isinstance(column.values, np.ndarray)
    ) else []  # fmt: skip


def _length(column: Any) -> int:
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    return len(column.array if isinstance(column, Values) else column)


def _filled(column: Gaps, fill: Any, name: str) -> ColumnArray:
    """A column without nulls. Raises ValueError if it cannot hold the value."""
    inner = column.values
    if isinstance(inner, np.ndarray):
        try:
            made = np.full((len(column.valid), *inner.shape[1:]), fill, inner.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise _cannot_hold(name, inner.dtype, fill) from error
        # Of one of fractions it is the nearest value.
        if inner.dtype.kind not in "fc" and not np.all((made == fill) | (made != made)):
            raise _cannot_hold(name, inner.dtype, fill)
        made[column.valid] = inner
        made.flags.writeable = False
        return made
    if isinstance(inner, Ragged) and isinstance(inner.values, np.ndarray):
        kind: Any = {"str": str, "bytes": bytes}.get(inner.text)
        if kind is None and np.shape(fill) and not len(fill):
            return replace(column, instead=inner.values[:0])
        if kind is not None and isinstance(fill, kind):
            return replace(column, instead=fill)
        raise _cannot_hold(name, inner.text or f"lists of {inner.values.dtype}", fill)
    if isinstance(fill, list) and not fill:
        return replace(column, instead=fill)
    raise _cannot_hold(name, "no array", fill)


def _cannot_hold(name: str, kind: Any, fill: Any) -> ValueError:
    return ValueError(
        f"column {name!r} has nulls, and is {kind}, which cannot hold {fill!r}: give "
        "nulls={name: value} for some columns"
    )


# ---- tables


def find_field(fields: Any, name: str) -> Any | None:
    """The field of a schema, or of a struct in it, by a name such as "image.bytes"; None if there
    is none."""
    for field in fields:
        if field.name == name:
            return field
    for field in fields:
        if name.startswith(f"{field.name}.") and _is_struct(field.type):
            inner = [field.type.field(i) for i in range(field.type.num_fields)]
            if found := find_field(inner, name[len(field.name) + 1 :]):
                return found
    return None


def outermost(fields: Any, name: str) -> str:
    """The column that a field found by this name lies in."""
    names: list[str] = [field.name for field in fields]
    if name in names:
        return name
    within = [find_field([field], name) is not None for field in fields]
    return names[within.index(True)]


def to_columns(
    table: Any, names: Sequence[str] | None = None, nulls: Nulls | None = None
) -> dict[str, ColumnArray]:
    """The columns of a table, structs flattened.

    Raises:
        ValueError: a column has a type of which nothing is made here, or two have one name.
    """
    nulls = nulls or Nulls()
    made: dict[str, ColumnArray] = {}
    for name, column in _leaves(table, names):
        chunks = column.chunks or [load("pyarrow", "arrow").nulls(0, column.type)]
        parts = [nulls.columns(name, _to_column(chunk, name)) for chunk in chunks]
        for key in parts[0]:
            if key in made:
                raise ValueError(
                    f"several values are the column {key!r}: choose others with columns="
                )
            made[key] = _joined([part[key] for part in parts], [len(chunk) for chunk in chunks])
    return made


def empty_table(schema: Any) -> Any:
    """A table without rows. (pyarrow makes none of some tensors by itself.)"""
    arrow = load("pyarrow", "arrow")
    try:
        columns = [arrow.nulls(0, kind) for kind in schema.types]
    except KeyError as error:
        # Of intervals, for which it has no classes.
        kinds = [*map(str, schema.types)]
        raise NotImplementedError(f"pyarrow has no arrays of one of the types {kinds}") from error
    return arrow.Table.from_arrays(columns, schema=schema)


def has_columns(schema: Any) -> bool:
    """Whether columns are made of all that an Arrow schema has."""
    try:
        to_columns(empty_table(schema))
    except (NotImplementedError, ValueError):
        return False
    return True


def _leaves(table: Any, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    for name in table.column_names if names is None else names:
        top = outermost(table.schema, name)
        for leaf, column in _flat(top, table.column(top)):
            if name in (top, leaf) or leaf.startswith(f"{name}."):
                yield leaf, column


def _flat(name: str, column: Any) -> Iterator[tuple[str, Any]]:
    kind = column.type
    if not (_is_struct(kind) and kind.num_fields):
        yield name, column
        return
    for i, child in enumerate(column.flatten()):
        yield from _flat(f"{name}.{kind.field(i).name}", child)


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _joined(parts: list[ColumnArray], sizes: list[int]) -> ColumnArray:
    """A column in one piece. (pyarrow would join no more than 2 GiB of texts.)"""
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) < len(parts):
        return Chunks(parts, np.cumsum(sizes))
    made = np.concatenate(arrays)
    made.flags.writeable = False
    return made


# ---- types

# With the bracket: views of lists begin alike.
_LISTS = ("list<", "large_list<")
_VIEWS = ("list_view<", "large_list_view<")
_TEXTS = {"string": "str", "large_string": "str", "binary": "bytes", "large_binary": "bytes"}
_WIDE = {"string_view": "large_string", "binary_view": "large_binary"}
_VIEW_BYTES = 16
_OBJECTS = ("struct<", "decimal", "time32", "time64", "null")


def _is_object(kind: Any) -> bool:
    """Whether rows of a type, or what lies in them, are Python objects."""
    name = str(kind)
    if name.startswith("map<"):
        return _is_object(kind.key_type) or _is_object(kind.item_type)
    if name.startswith((*_LISTS, *_VIEWS, "fixed_size_list<", "dictionary<")):
        return _is_object(kind.value_type)
    return name.startswith(_OBJECTS)


def _to_column(array: Any, name: str) -> ColumnArray:
    array = _decoded(array)
    kind = str(array.type)
    if kind.startswith("extension<"):
        return _of_extension(array, name)
    if _is_object(array.type):
        return Values(array)
    if kind.startswith(("map<", "fixed_size_list<", *_LISTS, *_VIEWS)):
        return _of_nested(array, name)
    if array.null_count:
        return Gaps(_to_column(array.drop_null(), name), *_places(array))
    if kind in _TEXTS:
        return _text(array, _TEXTS[kind])
    if kind.startswith("fixed_size_binary"):
        return _octets(array)
    # To make an array of intervals may end the process in pyarrow.
    made = None if "interval" in kind else array.to_numpy(zero_copy_only=False)
    if made is None or made.dtype.hasobject:
        raise ValueError(
            f"column {name!r} is {kind}, of which there is no array: choose others with columns="
        )
    # Some are views of Arrow's memory, and some are copies. A group is kept, so that no function
    # may change what the next epoch reads.
    made.flags.writeable = False
    values: NDArray[Any] = made
    return values


def _decoded(array: Any) -> Any:
    """An array that holds each value at its place."""
    kind = str(array.type)
    if kind.startswith("dictionary<"):
        return _decoded(array.dictionary_decode())
    if kind.startswith("run_end_encoded<"):
        return _decoded(load("pyarrow.compute", "arrow").run_end_decode(array))
    if kind in _WIDE and array.null_count:
        array = _with_empty_nulls(array)
    return array.cast(_WIDE[kind]) if kind in _WIDE else array


def _with_empty_nulls(array: Any) -> Any:
    """An array of views with nothing at its nulls: what stands there is not validated, and to
    follow it may end the process."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    _, views, *data = array.buffers()
    stretch = slice(array.offset * _VIEW_BYTES, (array.offset + len(array)) * _VIEW_BYTES)
    entries = np.frombuffer(views, np.uint8)[stretch].reshape(-1, _VIEW_BYTES).copy()
    entries[~valid] = 0
    arrow = load("pyarrow", "arrow")
    bits, made = np.packbits(valid, bitorder="little"), np.ascontiguousarray(entries)
    buffers = [arrow.py_buffer(bits), arrow.py_buffer(made), *data]
    return arrow.Array.from_buffers(array.type, len(array), buffers)


def _places(array: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each row its number among those that are not null, and whether it is not."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.cumsum(valid) - 1, valid


def _of_nested(array: Any, name: str) -> ColumnArray:
    # Of some of these pyarrow cannot drop nulls.
    if not str(array.type).startswith("map<"):
        lists = _of_lists(array, name)
        return Gaps(lists, *_places(array)) if array.null_count else lists
    maps = _of_maps(array, name)
    if not array.null_count:
        return maps
    return Gaps(maps, np.arange(len(array)), _places(array)[1])


def _of_maps(array: Any, name: str) -> ColumnArray:
    """The maps, nulls included."""
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
    keys, items = (_to_column(part.slice(first, size), name) for part in (array.keys, array.items))
    return Ragged(Pairs(keys, items), offsets - first)


def _of_lists(array: Any, name: str) -> ColumnArray:
    """The lists that are not null."""
    # `flatten` knows of slices and of nulls.
    inner, rows = _to_column(array.flatten(), name), len(array) - array.null_count
    if not str(array.type).startswith("fixed_size_list<"):
        lengths = load("pyarrow.compute", "arrow").list_value_length(array).drop_null()
        return Ragged(inner, np.concatenate(([0], np.cumsum(lengths.to_numpy()))))
    size = array.type.list_size
    if isinstance(inner, np.ndarray):
        return inner.reshape(rows, size, *inner.shape[1:])
    return Ragged(inner, np.arange(rows + 1) * size)


def _of_extension(array: Any, name: str) -> ColumnArray:
    column = _to_column(array.storage, name)
    # Of pyarrow's tensors, and of the arrays of several axes of Hugging Face's datasets.
    shape = getattr(array.type, "shape", None)
    if shape is None or None in shape:
        return column
    axes = getattr(array.type, "permutation", None) or range(len(shape))
    if not isinstance(column, Gaps):
        return _shaped(column, tuple(shape), axes, name)
    return replace(column, values=_shaped(column.values, tuple(shape), axes, name))


def _shaped(column: Any, shape: tuple[int, ...], axes: Any, name: str) -> NDArray[Any]:
    """Rows of lists as arrays of one shape. Raises ValueError if a row has another."""
    rows, inner, lengths = _length(column), column, []
    while isinstance(inner, Ragged):
        lengths.append(np.diff(inner.offsets))
        inner = inner.values
    is_alike = isinstance(inner, np.ndarray) and all(
        (length == wanted).all() for length, wanted in zip(lengths, shape, strict=False)
    )
    if not is_alike:
        raise ValueError(f"column {name!r} has rows that are not of the shape {list(shape)}")
    made: NDArray[Any] = inner.reshape(rows, *shape).transpose(0, *(axis + 1 for axis in axes))
    return made


def _text(array: Any, text: str) -> Ragged:
    wide = str(array.type).startswith("large")
    _, offsets, values = array.buffers()
    # Of no rows there may be no offsets.
    if not len(array):
        return Ragged(np.empty(0, np.uint8), np.zeros(1, np.int64), text)
    places = np.frombuffer(offsets, np.int64 if wide else np.int32)
    places = places[array.offset : array.offset + len(array) + 1]
    octets = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    return Ragged(octets, places, text)


def _octets(array: Any) -> NDArray[Any]:
    """Bytes of one length: an array of them, since NumPy's strings cannot end with a zero."""
    width, (_, values) = array.type.byte_width, array.buffers()
    octets = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    made = octets[array.offset * width : (array.offset + len(array)) * width]
    made = made.reshape(len(array), width)
    made.flags.writeable = False
    return made
