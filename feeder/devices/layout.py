"""Slots: where the columns of a batch lie in one, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.workers.stream.chunks import Column

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


def arrays_over(memory: Any, places: Iterable[ColumnPlace]) -> tuple[NDArray[Any], ...]:
    """The columns that lie in a slot's memory, which is a buffer, or an array of its bytes that
    they then refer to."""
    return tuple([np.ndarray(shape, dtype, memory, at) for shape, dtype, _, at, _ in places])


def credit_for(batch_bytes: int) -> int:
    """The credit for batches of so many bytes. Small ones cost a message, so many go in one; of
    large ones more would only take memory out of the caches."""
    return max(_MIN_CREDIT, min(_MAX_CREDIT, _CREDIT_BYTES // max(1, batch_bytes)))
