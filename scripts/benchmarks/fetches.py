"""The loads that are measured and the fetch functions that make them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from feeder import Call

Array = NDArray[Any]
Fetch = Callable[[int, int], list[Array]]

NUM_WORKERS = 2
FILLER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Batches of one shape, made from chunks of one size."""

    name: str
    batch_size: int
    row_shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    bound: int
    """Batches that the product may buffer, and chunks that the original may."""

    @property
    def batch_bytes(self) -> int:
        return self.batch_size * int(np.prod(self.row_shape)) * np.dtype(self.dtype).itemsize

    def rows(self, count: int) -> Array:
        """Rows of this load with values that differ, in memory of their own."""
        values = np.arange(count * int(np.prod(self.row_shape))) % 251
        return values.astype(self.dtype).reshape(count, *self.row_shape)

    def in_chunks_of(self, rows: int) -> Load:
        return replace(self, name=f"{self.name}, chunks of {rows}", chunk_rows=rows)


IMAGES = Load(
    name="32×(227,227,3) float32", batch_size=32, row_shape=(227, 227, 3), dtype="float32",
    chunk_rows=32, bound=20,
)  # fmt: skip
HUGE = Load(
    name="250×(227,227,3) float32", batch_size=250, row_shape=(227, 227, 3), dtype="float32",
    chunk_rows=250, bound=6,
)  # fmt: skip
VECTORS = Load(
    name="256×1024 float32", batch_size=256, row_shape=(1024,), dtype="float32",
    chunk_rows=256, bound=100,
)  # fmt: skip
SMALL = Load(
    name="64×16 int64", batch_size=64, row_shape=(16,), dtype="int64", chunk_rows=64, bound=100
)


def constant(load: Load) -> Fetch:
    """Every call returns the same array: what is left is the cost of the machinery."""
    chunk = [load.rows(load.chunk_rows)]

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        return chunk

    return fetch


def fresh(load: Load) -> Fetch:
    """Every call returns a new array, filled from a template that stays in memory."""
    template = load.rows(load.chunk_rows)

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        return [template.copy()]

    return fetch


def fresh_holding(load: Load) -> Fetch:
    """The same, filled without letting go of the interpreter.

    NumPy lets go of it in every copy of 500 elements or more. Beside a thread that is busy with
    Python such a fetch function waits for it after each call, whoever calls.
    """
    template = load.rows(load.chunk_rows)
    values = template.tobytes()

    def fetch(worker_id: int, batch_size: int) -> list[Array]:
        chunk = np.empty(template.shape, template.dtype)
        memoryview(chunk).cast("B")[:] = values
        return [chunk]

    return fetch


class NumberedFetch:
    """Fresh chunks whose rows begin with their worker and their number at that worker.

    After `rows_per_worker` rows each worker goes on with filler, so that everything that is still
    somewhere in a feed comes out of it.
    """

    def __init__(self, load: Load, rows_per_worker: int) -> None:
        self._template = load.rows(load.chunk_rows)
        self._rows_per_worker = rows_per_worker
        self._fetched: defaultdict[int, int] = defaultdict(int)

    def __call__(self, worker_id: int, batch_size: int) -> list[Array]:
        chunk = self._template.copy()
        numbers = self._fetched[worker_id] + np.arange(len(chunk))
        self._fetched[worker_id] += len(chunk)
        cells = chunk.reshape(len(chunk), -1)
        cells[:, 0] = worker_id
        cells[:, 1] = np.where(numbers < self._rows_per_worker, numbers, FILLER)
        return [chunk]


class SeekableFetch:
    """Numbered rows, resumed by `seek`: a worker's cursor is the number of its next row."""

    def __init__(self, load: Load, first_row: int = 0) -> None:
        self._template = load.rows(load.chunk_rows)
        self._next_row = defaultdict[int, int](lambda: first_row)

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


def pure(load: Load) -> Callable[[Call], list[Array]]:
    """The same rows from the pure form: they follow from the number of the call alone."""
    template = load.rows(load.chunk_rows)

    def fetch(call: Call) -> list[Array]:
        chunk = template.copy()
        first = call.index // NUM_WORKERS * len(chunk)
        cells = chunk.reshape(len(chunk), -1)
        cells[:, 0] = call.worker_id
        cells[:, 1] = np.arange(first, first + len(chunk))
        return [chunk]

    return fetch
