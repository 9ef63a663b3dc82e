"""What is measured: the product, the original, a plain copy, a copying loop, a queue."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from types import TracebackType
from typing import Any

import numpy as np

import feeder
from fetches import NUM_WORKERS, Array, Fetch, Load
from harness import Measures, Settings, rate_of
from original import OriginalFeed

Take = Callable[[], Array | None]
"""Hands over the next batch's one column."""
Contender = Callable[[], AbstractContextManager[Take]]

COLUMN = "data"
FEED = "bench"
RING_BUFFERS = 8
QUEUE_ITEMS = 100


def product(load: Load, make_fetch: Callable[[], Fetch]) -> Contender:
    """The feeder as users have it, with two workers as the original had."""

    @contextmanager
    def running() -> Iterator[Take]:
        with make_coordinator(load, make_fetch()) as coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)[COLUMN]

    return running


def make_coordinator(
    load: Load,
    fetch: Callable[..., Any],
    num_workers: int = NUM_WORKERS,
    resume: bytes | None = None,
) -> feeder.Coordinator:
    """A coordinator of its own with one feed over this load."""
    return feeder.init_data_input_workers(
        [COLUMN],
        fetch,
        load.batch_size,
        num_workers,
        FEED,
        load.bound,
        resume=resume,
        coordinator=feeder.Coordinator(),
    )


def original(load: Load, make_fetch: Callable[[], Fetch]) -> Contender:
    """The algorithm of Caffe2's data_workers."""

    @contextmanager
    def running() -> Iterator[Take]:
        feed = OriginalFeed([COLUMN], make_fetch(), load.batch_size, NUM_WORKERS, load.bound)
        feed.start()
        try:
            yield lambda: feed.dequeue()[0]
        finally:
            feed.stop(hurry=True)

    return running


def copyto(load: Load) -> Contender:
    """One thread that copies one batch again and again into a ring of warm buffers."""
    source = load.rows(load.batch_size)
    ring = itertools.cycle([source.copy() for _ in range(RING_BUFFERS)])

    def take() -> Array:
        buffer = next(ring)
        np.copyto(buffer, source)
        return buffer

    return lambda: nullcontext(take)


def copy_loop(load: Load, fetch: Fetch) -> Contender:
    """One thread that fetches and copies each row once into a ring of warm buffers."""
    ring = itertools.cycle([load.rows(load.batch_size) for _ in range(RING_BUFFERS)])
    chunk = fetch(0, load.batch_size)[0]
    taken = 0

    def take() -> Array:
        nonlocal chunk, taken
        buffer = next(ring)
        filled = 0
        while filled < load.batch_size:
            if taken == len(chunk):
                chunk, taken = fetch(0, load.batch_size)[0], 0
            count = min(load.batch_size - filled, len(chunk) - taken)
            np.copyto(buffer[filled : filled + count], chunk[taken : taken + count])
            filled += count
            taken += count
        return buffer

    return lambda: nullcontext(take)


def bare_calls(load: Load, fetch: Fetch) -> Contender:
    """One thread that calls a fetch function for a batch of rows and drops what it returns."""
    calls = range(max(1, load.batch_size // load.chunk_rows))

    def take() -> None:
        for _ in calls:
            fetch(0, load.batch_size)

    return lambda: nullcontext(take)


@contextmanager
def handover() -> Iterator[Take]:
    """One thread puts an array on a `queue.Queue(100)`, another gets it: no work at all."""
    between: queue.Queue[Array | None] = queue.Queue(QUEUE_ITEMS)
    item = np.zeros(1)
    running = True

    def run_producer() -> None:
        while running:
            between.put(item)
        between.put(None)

    producer = Thread(target=run_producer, daemon=True)
    producer.start()
    try:
        yield between.get
    finally:
        running = False
        while between.get() is not None:
            pass
        producer.join()


class BusyThread:
    """A thread that computes in pure Python without a pause, and counts how far it gets."""

    def __init__(self) -> None:
        self._rounds = 0
        self._running = True
        self._thread = Thread(target=self._run, daemon=True)
        self._started = 0.0

    def wait(self, seconds: float) -> None:
        """Let it run alone for a while."""
        self._thread.join(seconds)

    def rounds_per_second(self) -> float:
        """Its speed since it was started."""
        return self._rounds / (time.perf_counter() - self._started)

    def __enter__(self) -> BusyThread:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running = False
        self._thread.join()

    def _run(self) -> None:
        value = 0
        while self._running:
            for i in range(1000):
                value = (value * 31 + i) & 0xFFFF
            self._rounds += 1


def timed(name: str, contender: Contender, settings: Settings) -> Callable[[], Measures]:
    """Measures the batches per second of a contender, which is made anew each time."""

    def measure() -> Measures:
        with contender() as take:
            return {name: rate_of(take, settings)}

    return measure


def timed_beside_busy(
    name: str, busy_name: str, contender: Contender, settings: Settings
) -> Callable[[], Measures]:
    """The same beside a busy thread, whose own speed is measured too."""

    def measure() -> Measures:
        with contender() as take, BusyThread() as busy:
            return {name: rate_of(take, settings), busy_name: busy.rounds_per_second()}

    return measure
