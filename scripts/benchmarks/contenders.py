"""What hands over batches in this process: feeds, and the plain loops beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import numpy as np

import feeder
from benchmarks.fetches import RECORDS, Array, Fetch, Size
from benchmarks.harness import Contender, Once, Take, Watch

COLUMN = "data"
FEED = "bench"
RING_BUFFERS = 8


def make_coordinator(
    fetch: Fetch, size: Size, num_workers: int = 2, columns: Sequence[str] = (COLUMN,),
    **settings: Any,
) -> feeder.Coordinator:  # fmt: skip
    """A coordinator of its own with one feed, by public names that old commits have too."""
    settings = {"coordinator": feeder.Coordinator(), **settings}
    return feeder.init_data_input_workers(
        list(columns), fetch, size.batch_size, num_workers, FEED, size.bound, **settings
    )


@contextmanager
def feed(
    make_fetch: Callable[[], Fetch], size: Size, num_workers: int = 2,
    columns: Sequence[str] = (COLUMN,), **settings: Any,
) -> Iterator[Take]:  # fmt: skip
    """A feed as users have it, without end."""
    settings = {"epochs": None, **settings}
    with make_coordinator(make_fetch(), size, num_workers, columns, **settings) as coordinator:
        batches, name = coordinator[FEED], columns[0]
        yield lambda: next(batches)[name]


@contextmanager
def copyto(size: Size) -> Iterator[Take]:
    """One thread that copies one batch again and again into a ring of warm buffers: no feed that
    copies its rows once can be faster."""
    source = size.rows(size.batch_size)
    ring = itertools.cycle([source.copy() for _ in range(RING_BUFFERS)])
    yield lambda: np.copyto(next(ring), source)


@contextmanager
def filling_loop(size: Size) -> Iterator[Take]:
    """One thread that reads records into one buffer, again and again."""
    records = np.stack([size.rows(size.batch_size) for _ in range(RECORDS)])
    buffer, numbers = np.zeros_like(records[0]), itertools.count()
    yield lambda: np.copyto(buffer, records[next(numbers) % RECORDS])


@contextmanager
def calling_loop(
    make_fetch: Callable[[], Fetch], batch_size: int, calls: int = 2**62
) -> Iterator[Take]:
    """One thread that calls a pure function, or a source, for the first so many batches."""
    fetch, numbers = make_fetch(), itertools.count()
    yield lambda: fetch(feeder.Call(next(numbers) % calls, 0, 0, batch_size, 0))


@contextmanager
def stacking_loop(make_dataset: Callable[[], Any], batch_size: int) -> Iterator[Take]:
    """One thread that takes the records of a batch from a data set, and stacks them."""
    dataset, numbers = make_dataset(), itertools.count()
    num_batches = len(dataset) // batch_size

    def take() -> Array:
        start = next(numbers) % num_batches * batch_size
        return np.stack([dataset[i] for i in range(start, start + batch_size)])

    yield take


@contextmanager
def beside_busy(contender: Contender) -> Iterator[Take]:
    """The same beside a thread that computes in Python without a pause, as a training loop may."""
    is_over = False

    def run_busy() -> None:
        value = 0
        while not is_over:
            for i in range(1000):
                value = (value * 31 + i) & 0xFFFF

    thread = Thread(target=run_busy, daemon=True)
    with contender() as take:
        thread.start()
        try:
            yield take
        finally:
            is_over = True
            thread.join()


def first_batch(make: Callable[[], feeder.Coordinator], column: str = COLUMN) -> Once:
    """From making a feed to its first batch."""

    def do(watch: Watch) -> int:
        with watch:
            coordinator = make()
            coordinator.start()
            held = next(coordinator[FEED])[column]
        coordinator.stop()
        del held
        return 1

    return do
