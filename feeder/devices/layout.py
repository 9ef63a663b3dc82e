"""Slots: where columns lie in one, how many there are, and memory that is laid out as one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from feeder.workers.stream.buffers import Arrays, Kept, Seen
from feeder.workers.stream.chunks import Column, Columns, part_of

ALIGNMENT = 64
"""Columns begin at multiples of so many bytes."""

MAX_ARENA_BYTES = 16 * 1024**3
"""Shared memory for the slots of one queue."""

_CREDIT_BYTES = 32 * 1024 * 1024
_MIN_CREDIT, _MAX_CREDIT = 4, 64


class ColumnPlace(NamedTuple):
    """Where one column lies in a slot."""

    shape: tuple[int, ...]
    """Shape of its array, rows included."""
    dtype: np.dtype[Any]
    """Its dtype."""
    axis: int
    """The axis that is rows."""
    offset: int
    """Its first byte in the slot."""
    num_bytes: int
    """Bytes of its array."""


class Layout(NamedTuple):
    """A slot for batches of some number of rows."""

    places: tuple[ColumnPlace, ...]
    """One for each column."""
    num_bytes: int
    """Bytes of the slot, a multiple of 64 and at least that."""


class Form(NamedTuple):
    """How an array that a function made on a device lies in memory, as its driver says it."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: Any
    """Its dtype."""
    strides: Any
    """Its strides; all of its memory is elements of it."""
    num_bytes: int
    """Bytes of it."""
    offset: int = 0
    """Its first byte in a slot."""


class Forms(NamedTuple):
    """How what a function made of a batch lies in a slot."""

    places: tuple[Form, ...]
    """One for each array."""
    num_bytes: int
    """Bytes of the slot, a multiple of 64 and at least that."""


def lay_out(forms: Iterable[Form]) -> Forms:
    """Arrays in order, each at a multiple of 64 bytes."""
    places, size = [], 0
    for form in forms:
        places.append(form._replace(offset=size))
        size += -(-form.num_bytes // ALIGNMENT) * ALIGNMENT
    return Forms(tuple(places), max(size, ALIGNMENT))


def layout(columns: Iterable[Column], rows: int) -> Layout:
    """The layout of a slot for `rows` rows: columns in order, each at a multiple of 64 bytes."""
    places, size = [], 0
    for column in columns:
        shape = (*column.shape[: column.axis], rows, *column.shape[column.axis :])
        # In Python's integers: a shape from the network may have more bytes than NumPy can count.
        num_bytes = math.prod(shape) * column.dtype.itemsize
        places.append(ColumnPlace(shape, column.dtype, column.axis, size, num_bytes))
        # Rounded up: each column begins in a cache line of its own, as vector loads want it.
        size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(places), max(size, ALIGNMENT))


def arrays_over(memory: Any, places: Iterable[ColumnPlace]) -> Arrays:
    """The columns that lie in a slot's memory, which is a buffer, or an array of its bytes that
    they then refer to."""
    return tuple([np.ndarray(shape, dtype, memory, at) for shape, dtype, _, at, _ in places])


def first_rows(arrays: Arrays, places: Sequence[ColumnPlace], rows: int, length: int) -> Arrays:
    """The first `length` rows of arrays of so many rows."""
    if length == rows:
        return arrays  # The usual case, without a view of each view.
    of = zip(arrays, places, strict=True)
    return tuple([part_of(array, place.axis, 0, length) for array, place in of])


def flats_over(memory: memoryview, places: Iterable[ColumnPlace]) -> tuple[memoryview | None, ...]:
    """The bytes of each column, for copies that keep the interpreter's lock; None where its rows do
    not lie one after another."""
    return tuple([None if axis else memory[at : at + size] for _, _, axis, at, size in places])


def _nothing() -> None:
    return None


class LaidOut:
    """Memory for one batch at a time, which is laid out anew if a batch has another number of rows:
    what slots of shared and of pinned memory have in common. One thread at a time has it."""

    __slots__ = (
        "_memory", "_views", "_written", "arrays", "columns", "flats", "layout", "memory", "rows",
    )  # fmt: skip

    arrays: Arrays
    flats: tuple[memoryview | None, ...]
    kept: Kept = None
    """What is handed out lies here."""
    seen: Seen = None
    """Nobody asks."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.columns: Columns | None = None
        """The columns that it is laid out for, with the shapes of the batch."""
        self.rows = -1
        """The number of rows that it is laid out for."""
        self.layout = Layout((), 0)
        # The root of the arrays that calls last wrote to, as long as there are any.
        self._written: Callable[[], object] = _nothing

    def arrange(self, columns: Columns, rows: int, layout: Layout) -> None:
        """Lay it out for batches of so many rows."""
        # Nearly every batch is like the one before; making the views costs more than a small copy.
        if columns is self.columns and rows == self.rows:
            return
        self.columns, self.rows, self.layout = columns, rows, layout
        self.memory = memory = self._memory[: layout.num_bytes]
        """What batches of the layout take of it, to be written by whoever took it."""
        self.arrays = arrays_over(memory, layout.places)
        self.flats = flats_over(memory, layout.places)
        # The batch as all others see it: nobody may write into one that is made.
        self._views = arrays_over(memory.toreadonly(), layout.places)

    def open(self) -> Arrays | None:
        """Arrays for calls to write to; None where somebody still refers to those of the last
        batch here, who would see them change."""
        if self._written() is not None:
            return None
        root = np.frombuffer(self.memory, np.uint8)
        self._written = weakref.ref(root)
        return arrays_over(root, self.layout.places)

    def close(self) -> None:
        """Nothing: it is free when whoever took it puts it back."""

    def views(self, rows: int) -> Arrays:
        """The first `rows` rows of each column, read-only."""
        return first_rows(self._views, self.layout.places, self.rows, rows)


def credit_for(batch_bytes: int) -> int:
    """The credit for batches of so many bytes. Small ones cost a message, so many go in one; of
    large ones more would only take memory out of the caches."""
    return max(_MIN_CREDIT, min(_MAX_CREDIT, _CREDIT_BYTES // max(1, batch_bytes)))
