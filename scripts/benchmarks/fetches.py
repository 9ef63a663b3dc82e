"""The batches that are measured, and the fetch functions that make them.

Nothing but NumPy is imported: processes that run these functions import this module.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from feeder import Call

Array = NDArray[Any]
Fetch = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Batches of one shape, made from chunks of one size."""

    batch_size: int
    row_shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    bound: int
    """Batches that a feed may buffer."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch_size, *self.row_shape)

    def rows(self, count: int) -> Array:
        """Rows with values that differ, in memory of their own."""
        values = np.arange(count * int(np.prod(self.row_shape))) % 251
        return values.astype(self.dtype).reshape(count, *self.row_shape)

    def in_chunks_of(self, rows: int) -> Size:
        return replace(self, chunk_rows=rows)


IMAGES = Size(batch_size=32, row_shape=(227, 227, 3), dtype="float32", chunk_rows=32, bound=20)
"""Batches of 19.8 MB."""
HUGE = Size(batch_size=250, row_shape=(227, 227, 3), dtype="float32", chunk_rows=250, bound=6)
"""Batches of 154 MB."""
VECTORS = Size(batch_size=256, row_shape=(1024,), dtype="float32", chunk_rows=256, bound=100)
"""Batches of 1 MB."""
SMALL = Size(batch_size=64, row_shape=(16,), dtype="int64", chunk_rows=64, bound=100)
"""Batches of 8 KB."""
TINY = Size(batch_size=8, row_shape=(4,), dtype="int64", chunk_rows=3, bound=100)

SIZES = {
    "images": IMAGES,
    "images-7": IMAGES.in_chunks_of(7),
    "images-250": HUGE,
    "vectors": VECTORS,
    "small": SMALL,
    "small-4096": SMALL.in_chunks_of(4096),
}
"""What is served, by name: another process is told no more than the name."""


# ---- the cost of the machinery: functions that do next to nothing


def constant(size: Size) -> Fetch:
    """Every call returns the same array, whose rows are copied."""
    chunk = [size.rows(size.chunk_rows)]

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        return chunk

    return fetch


def fresh(size: Size) -> Fetch:
    """Every call returns a new array, filled from a template that stays in memory."""
    template = size.rows(size.chunk_rows)

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        return [template.copy()]

    return fetch


def fresh_by_index(size: Size, sleep_s: float = 0.0) -> Fetch:
    """The same as a pure function of the call, from a store that answers after so long."""
    template, never = size.rows(size.chunk_rows), threading.Event()

    def fetch(call: Call) -> list[Array]:
        if sleep_s:
            never.wait(sleep_s)
        return [template.copy()]

    return fetch


def fresh_holding(size: Size) -> Fetch:
    """The same as `fresh`, filled without letting go of the interpreter.

    NumPy lets go of it in every copy of 500 elements or more. Beside a thread that is busy with
    Python such a fetch function waits for it after each call, whoever calls.
    """
    template = size.rows(size.chunk_rows)
    values = template.tobytes()

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        chunk = np.empty(template.shape, template.dtype)
        memoryview(chunk).cast("B")[:] = values
        return [chunk]

    return fetch


class SeekableFetch:
    """Numbered rows, resumed by `seek`: a worker's cursor is the number of its next row."""

    def __init__(self, size: Size) -> None:
        self._template = size.rows(size.chunk_rows)
        self._next_row: defaultdict[int, int] = defaultdict(int)

    def __call__(self, worker_id: int, batch_size: int) -> list[Array]:
        chunk = self._template.copy()
        first = self._next_row[worker_id]
        self._next_row[worker_id] = first + len(chunk)
        cells = chunk.reshape(len(chunk), -1)
        cells[:, 0] = worker_id
        cells[:, 1] = np.arange(first, first + len(chunk))
        return [chunk]

    def cursor(self, worker_id: int) -> int:
        return self._next_row[worker_id]

    def seek(self, worker_id: int, cursor: int) -> None:
        self._next_row[worker_id] = cursor


# ---- functions that write where the batch lies (`rows_per_call`), or whence it is sent

RECORDS = 5
"""Batches of records that are read in turn: more than the caches hold."""


def filling(size: Size) -> Fetch:
    """Reads records and writes them to the memory that it is given."""
    records = np.stack([size.rows(size.batch_size) for _ in range(RECORDS)])

    def fetch(call: Call) -> tuple[Array]:
        array = call.empty(size.shape, size.dtype)
        np.copyto(array, records[call.index % RECORDS])
        return (array,)

    return fetch


def marking(size: Size) -> Fetch:
    """Writes the number of its call, and nothing else: no work at all."""

    def fetch(call: Call) -> tuple[Array]:
        array = call.empty(size.shape, size.dtype)
        array.flat[0] = call.index % 1024
        return (array,)

    return fetch


KINDS: dict[str, Callable[[Size], Fetch]] = {
    "constant": constant, "filling": filling, "marking": marking,
}  # fmt: skip
"""What is served, by name."""


# ---- functions for processes

WORDS = [f"word{number}" for number in range(5000)]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
TEXT_ROWS, TEXT_WORDS = 64, 128


def words_of(number: int) -> list[str]:
    """The words of a line, made by Python alone."""
    line = " ".join(WORDS[(number * 13 + i * 31) % len(WORDS)] for i in range(TEXT_WORDS))
    return line.lower().split()


def text(call: Call) -> list[Array]:
    """A batch of lines of words made numbers."""
    first = call.index * TEXT_ROWS
    lines = [
        np.array([NUMBERS.get(word, 0) for word in words_of(first + row)], np.int64)
        for row in range(TEXT_ROWS)
    ]
    return [np.stack(lines)]


@cache
def _image_rows() -> Array:
    return IMAGES.rows(IMAGES.batch_size)


def images(call: Call) -> list[Array]:
    """20 MB, written to where they are sent from; they begin with the process that made them."""
    made = call.empty(IMAGES.shape, np.dtype(IMAGES.dtype))
    np.copyto(made, _image_rows())
    made.flat[0] = os.getpid()
    return [made]


def small(call: Call) -> list[Array]:
    """8 KB in a chunk of a batch."""
    return [np.full(SMALL.shape, call.index)]
