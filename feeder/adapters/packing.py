"""A batch of any structure as two columns: the bytes of its arrays, and their layout.

The items of a data set may be tuples or dicts, nested, of any length, with texts among them, and
what they are like is known with the first one only. So one column holds the bytes of all arrays,
each at a multiple of 64 bytes, and the other says where they lie and what is around them. The
layout is msgpack of plain values, and is read without code.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from feeder.errors import ConfigError
from feeder.sources import RecordError
from feeder.workers.sources.stores.reading import octets
from feeder.workers.stream.copying import copy_rows
from feeder.workers.stream.memory import POOL

COLUMNS = ("layout", "data")
"""The names of the two columns. Each has one row: a batch is a row of its feed."""

LAYOUT = np.dtype("V1")
"""The first one's dtype: raw bytes, which stay on the host where a feed's batches go to a GPU."""

_ALIGNMENT = 64
# Names of files may hold bytes that are no text; Python writes these as surrogates.
_ANY_TEXT = "surrogatepass"
_NUMBERS = (bool, int, float, complex)
_PLAIN = (type(None), bool, int, float, str, bytes)


class Array(NamedTuple):
    """An array of a structure: its bytes as NumPy has them, and what its dtype is called."""

    values: NDArray[Any]
    """Of another library's dtype that NumPy lacks: of unsigned integers of as many bytes."""
    dtype: str
    """The name that NumPy and the other library have for the dtype."""


Read = Callable[[Any], Array | None]
"""How a library's own arrays are read; None for what is none of them."""


def read_none(value: Any) -> None:
    """For a library whose arrays NumPy reads as they are."""


Join = Callable[[Sequence[Any]], Array | None]
"""How a library stacks small arrays of its own; None where they are not alike, are large, or are
none of its own, which are then read one by one."""


def join_none(values: Sequence[Any]) -> None:
    """For a library without arrays of its own."""


class Node(NamedTuple):
    """What is around arrays: a tuple, a list, a dict; or "named", "mapping" or "fields", and the
    name of a class: of named tuples, of other dicts, of dataclasses."""

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


class Leaf(NamedTuple):
    """An array by where its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


# ---- from samples, or from what a collate function made, to columns


def stack(
    samples: Sequence[Any], read: Read, name: Callable[[int], str], join: Join = join_none
) -> tuple[Any, Any]:
    """The columns of a batch of samples, their arrays stacked. `name` calls the i-th sample by its
    name; raises `RecordError` for one that is not like the first."""
    return _write(_stacked(samples, _Reading(read, join, name), ""), name(0))


def pack(tree: Any, read: Read, name: str) -> tuple[Any, Any]:
    """The columns of a structure that is a batch already; `name` calls it in errors."""
    return _write(_converted(tree, read, name, ""), name)


class _Reading(NamedTuple):
    """How samples are read, and what each is called."""

    read: Read
    join: Join
    name: Callable[[int], str]


class _Rows(NamedTuple):
    """Arrays that are to be stacked."""

    rows: list[NDArray[Any]]
    dtype: str
    shape: tuple[int, ...]


def _children(value: Any) -> tuple[str, tuple[Any, ...], list[Any]] | None:
    """The kind, the keys and the children of a container; None where it is none."""
    kind = type(value)
    if isinstance(value, Mapping):
        is_other = kind is not dict and isinstance(value, (dict, UserDict))
        return f"mapping {_path(kind)}" if is_other else "dict", tuple(value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"named {_path(kind)}", value._fields, list(value)
    if isinstance(value, (tuple, list)):
        return kind.__mro__[-2].__name__, (), list(value)
    if is_dataclass(value) and not isinstance(value, type):
        keys = tuple(field.name for field in fields(value))
        return f"fields {_path(kind)}", keys, [getattr(value, key) for key in keys]
    return None


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _stacked(samples: Sequence[Any], reading: _Reading, at: str) -> Any:
    first, name = samples[0], reading.name
    if isinstance(first, (str, bytes)):
        for i, sample in enumerate(samples):
            if not isinstance(sample, (str, bytes)):
                raise RecordError(
                    f"{name(i)}: {at or 'sample'} is {_said(sample)}, {name(0)} has {_said(first)}"
                )
        return list(samples)
    found = _children(first)
    if found is None:
        joined = reading.join(samples)
        return _rows_of(samples, reading, at) if joined is None else joined
    kind, keys, children = found
    columns: list[Sequence[Any]] = [children]
    for i, sample in enumerate(samples[1:], 1):
        if type(sample) is tuple and kind == "tuple" and len(sample) == len(children):
            # What most samples are: looking closer takes as long as reading a small one.
            columns.append(sample)
            continue
        other = _children(sample)
        is_alike = other is not None and (
            other[0] == kind or (isinstance(first, Mapping) and isinstance(sample, Mapping))
        )
        if other is None or not is_alike or len(other[2]) != len(children):
            raise RecordError(
                f"{name(i)}: {at or 'sample'} is {_said(sample)}, {name(0)} has {_said(first)}: "
                "the samples of a batch must be alike, or give collate_fn= that makes them so"
            )
        if isinstance(first, Mapping) and other[1] != keys:
            if set(other[1]) != set(keys):
                raise RecordError(
                    f"{name(i)}: {at or 'sample'} has the keys {list(other[1])!r}, {name(0)} has "
                    f"{list(keys)!r}"
                )
            other = kind, keys, [sample[key] for key in keys]
        columns.append(other[2])
    labels = keys or range(len(children))
    parts = tuple(
        _stacked(column, reading, f"{at}[{label!r}]")
        for label, column in zip(labels, zip(*columns, strict=True), strict=True)
    )
    return Node(kind, keys, parts)


def _said(value: Any) -> str:
    sized = isinstance(value, (tuple, list, Mapping))
    return (
        "None" if value is None else type(value).__name__ + (f" of {len(value)}" if sized else "")
    )


def _rows_of(samples: Sequence[Any], reading: _Reading, at: str) -> Any:
    name = reading.name
    if all(isinstance(sample, _NUMBERS) for sample in samples):
        values = np.asarray(samples)
        if values.dtype.kind not in "biufc":
            raise RecordError(f"{name(0)} and on: {at or 'sample'} has numbers beyond 64 bits")
        return Array(values, values.dtype.name)
    arrays = []
    for i, sample in enumerate(samples):
        array = _array_of(sample, reading.read, f"{name(i)}: {at or 'sample'}")
        if array is None and isinstance(sample, _NUMBERS):
            values = np.asarray(sample)
            array = Array(values, values.dtype.name)
        if array is None:
            raise RecordError(
                f"{name(i)}: {at or 'sample'} is {_said(sample)}, expected numbers, arrays, "
                "tensors, texts, or tuples, lists and dicts of these; or give collate_fn="
            )
        arrays.append(array)
    shape, dtype = arrays[0].values.shape, arrays[0].dtype
    for i, array in enumerate(arrays):
        if array.values.shape != shape or array.dtype != dtype:
            raise RecordError(
                f"{name(i)}: {at or 'sample'} is {array.dtype}{list(array.values.shape)}, "
                f"{name(0)} has {dtype}{list(shape)}: bring them to one shape, or give collate_fn= "
                "that pads them"
            )
    return _Rows([array.values for array in arrays], dtype, (len(arrays), *shape))


def _array_of(value: Any, read: Read, what: str) -> Array | None:
    try:
        found = read(value)
    except RecordError as error:
        raise RecordError(f"{what} is {error}") from error
    if found is not None:
        return found
    if not isinstance(value, (np.ndarray, np.generic)) and not hasattr(value, "__array__"):
        return None
    values = np.asarray(value)
    # Of other dtypes, as ml_dtypes', the name says it all where NumPy does not take them apart.
    if values.dtype.kind not in "biufc" and values.dtype.type.__module__ != "ml_dtypes":
        raise RecordError(
            f"{what} is an array of {values.dtype}, expected numbers; texts go as str"
        )
    values = values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    return Array(values, values.dtype.name)


def _converted(value: Any, read: Read, name: str, at: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    found = _children(value)
    if found is not None:
        kind, keys, children = found
        labels = keys or range(len(children))
        parts = tuple(
            _converted(child, read, name, f"{at}[{label!r}]")
            for label, child in zip(labels, children, strict=True)
        )
        return Node(kind, keys, parts)
    array = _array_of(value, read, f"{name}: {at or 'batch'}")
    if array is None:
        raise RecordError(
            f"{name}: collate_fn gave {at or 'a batch that'} is {_said(value)}, expected tensors, "
            "arrays, numbers, texts, None, or tuples, lists, dicts and dataclasses of these"
        )
    return array


def _write(tree: Any, name: str) -> tuple[Any, Any]:
    """The two columns of a structure of arrays."""
    places: list[tuple[int, int, Any]] = []
    end = 0

    def place(node: Any) -> Any:
        nonlocal end
        if isinstance(node, Node):
            return [0, node.kind, node.keys, [place(child) for child in node.children]]
        if isinstance(node, (Array, _Rows)):
            shape = node.shape if isinstance(node, _Rows) else node.values.shape
            item = node.rows[0] if isinstance(node, _Rows) else node.values
            size, start = prod(shape) * item.dtype.itemsize, end
            places.append((start, size, node))
            end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
            return [1, node.dtype, shape, start]
        return [2, node]

    try:
        layout = msgpack.packb(place(tree), unicode_errors=_ANY_TEXT)
    except (TypeError, OverflowError) as error:
        raise RecordError(
            f"{name}: the batch has a key or a number that no layout can hold: {error}; expected "
            "keys that are numbers, texts or tuples, and whole numbers of at most 64 bits"
        ) from error
    data = POOL.empty((1, max(end, _ALIGNMENT)), np.uint8)
    flat = octets(data)
    for start, size, node in places:
        _fill(data, flat, start, size, node)
    if not places:
        data.fill(0)
    # Copied, for an array over bytes is never the feed's own.
    return np.frombuffer(layout, LAYOUT)[np.newaxis].copy(), data


def _fill(data: NDArray[Any], flat: memoryview, start: int, size: int, node: Any) -> None:
    """Copy an array, or rows, to where it lies."""
    # Bytes between arrays are part of the row: two calls must give the same.
    gap = start + size, start + -(-size // _ALIGNMENT) * _ALIGNMENT
    flat[gap[0] : gap[1]] = bytes(gap[1] - gap[0])
    if not size:
        return
    if isinstance(node, _Rows):
        target = np.ndarray(node.shape, node.rows[0].dtype, data, start)
        rows = [row[np.newaxis] for row in node.rows]
        copy_rows(target, flat[start : start + size], 0, 0, len(rows), rows)
    else:
        np.copyto(np.ndarray(node.values.shape, node.values.dtype, data, start), node.values)


# ---- from columns to structures


def unpack(batch: Sequence[NDArray[Any]], make: Callable[[NDArray[Any], Leaf], Any]) -> Any:
    """The structure of a batch's two columns; `make` gives the array of a leaf, over the bytes of
    the row that it is given."""
    layout, data = batch
    row, raw = data[0], layout.tobytes()
    # One of long texts comes once.
    return _built(_read(raw) if len(raw) <= _MOST_CACHED else _read.__wrapped__(raw), row, make)


_MOST_CACHED = 16 * 1024
"""Bytes of a layout that is kept: of batches that are alike it is the same, and parsed once."""


@lru_cache(maxsize=256)
def _read(layout: bytes) -> Any:
    return _parsed(
        msgpack.unpackb(layout, use_list=False, strict_map_key=False, unicode_errors=_ANY_TEXT)
    )


def _parsed(node: Any) -> Any:
    tag, *rest = node
    if tag == 0:
        kind, keys, children = rest
        return Node(kind, keys, tuple(map(_parsed, children)))
    if tag == 1:
        return Leaf(*rest)
    return _Value(rest[0])


class _Value(NamedTuple):
    """A leaf of an item that has no array, such as a string. Immutable; any thread."""

    value: Any


class Tree(NamedTuple):
    """What is around the arrays of a structure, which are beside it. Immutable; any thread."""

    node: Any

    def of(self, arrays: Sequence[Any]) -> Any:
        """The structure with other arrays in the places of its own."""
        return _built(self.node, arrays, lambda row, leaf: row[leaf.offset])


def split(structure: Any, is_array: Callable[[Any], bool]) -> tuple[Tree, list[Any]]:
    """A structure and its arrays apart. Raises `TypeError` for what is in none."""
    arrays: list[Any] = []

    def part(value: Any) -> Any:
        if is_array(value):
            arrays.append(value)
            return Leaf("", (), len(arrays) - 1)
        if isinstance(value, _PLAIN):
            return _Value(value)
        if (found := _children(value)) is None:
            raise TypeError(type(value).__name__)
        kind, keys, children = found
        return Node(kind, keys, tuple(map(part, children)))

    return Tree(part(structure)), arrays


def _built(node: Any, row: Any, make: Callable[[Any, Leaf], Any]) -> Any:
    if type(node) is Leaf:
        return make(row, node)
    if type(node) is _Value:
        # Lists of texts came as tuples, which can be cached.
        return list(node.value) if type(node.value) is tuple else node.value
    children = [_built(child, row, make) for child in node.children]
    if node.kind == "tuple":
        return tuple(children)
    if node.kind == "list":
        return children
    if node.kind == "dict":
        return dict(zip(node.keys, children, strict=True))
    kind, path = node.kind.split(" ", 1)
    return _MAKE[kind](path, node.keys, children)


def _class_of(path: str) -> Any:
    """A class, where it is here already: nothing is imported."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _named(path: str, keys: tuple[str, ...], children: list[Any]) -> Any:
    """A named tuple; a tuple where its class is not here."""
    found = _class_of(path)
    is_one = found is not None and issubclass(found, tuple) and hasattr(found, "_make")
    return found._make(children) if is_one else tuple(children)


def _mapping(path: str, keys: tuple[Any, ...], children: list[Any]) -> Any:
    """A dict of another class; a dict where the class is not here or is not made of one."""
    plain, found = dict(zip(keys, children, strict=True)), _class_of(path)
    if found is None or not issubclass(found, (dict, UserDict)):
        return plain
    try:
        made = found(plain)
    except Exception:
        return plain
    return made if tuple(made) == keys else plain


def _fields(path: str, keys: tuple[str, ...], children: list[Any]) -> Any:
    """A dataclass of these fields, made as `copy` makes one: its functions are not called."""
    found: Any = _class_of(path)
    if not hasattr(found, "__dataclass_fields__"):
        raise ConfigError(
            f"a batch has the dataclass {path.partition(':')[2]}, which cannot be found by its "
            "name: define it at the top of a module"
        )
    made: Any = object.__new__(found)
    for key, child in zip(keys, children, strict=True):
        object.__setattr__(made, key, child)
    return made


_MAKE = {"named": _named, "mapping": _mapping, "fields": _fields}


def leaves(node: Any) -> Iterator[Any]:
    """The arrays of a structure, in order."""
    if isinstance(node, Mapping):
        for child in node.values():
            yield from leaves(child)
    elif isinstance(node, (tuple, list)):
        for child in node:
            yield from leaves(child)
    else:
        yield node
