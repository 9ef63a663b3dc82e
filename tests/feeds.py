"""How tests run a feed and write down what came out of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, zip_longest
from typing import Any

import numpy as np

from feeder import Batch, Coordinator, Feed, ReplayWarning, init_data_input_workers
from fetches import BATCH_SIZE, COLUMNS, NUM_WORKERS
from naive import NaiveBatch, naive_rounds, naive_stream

Record = tuple[int, int, int, int, tuple[tuple[str, tuple[int, ...], bytes], ...]]
"""Epoch, index, step, real rows, and of each column dtype, shape and bytes."""

CARRIERS: dict[str, Callable[[Coordinator, Batch], Any]] = {
    "snapshot": lambda coordinator, _: coordinator.snapshot(),
    "bytes": lambda coordinator, _: bytes(coordinator.snapshot()),
    "state dict": lambda coordinator, _: coordinator.state_dict(),
    "token": lambda _, batch: batch.cut.token(),
}
"""In what a position travels, taken right after the batch was handed out."""


def note(batch: Batch) -> Record:
    """Write a batch down."""
    return batch.epoch, batch.index, batch.step, batch.rows, note_columns(batch.arrays())


def note_columns(columns: Iterable[np.ndarray]) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
    return tuple((column.dtype.str, column.shape, column.tobytes()) for column in columns)


def note_naive(batch: NaiveBatch) -> Record:
    """Write a batch of the naive feeder down in the same way."""
    return *batch[:4], note_columns(batch[4])


def assert_same(got: Sequence[Record], wanted: Sequence[Record], *where: Any) -> None:
    """Raise AssertionError with the first batch that differs, told by its ids."""
    if got == wanted:
        return
    for mine, its in zip_longest(got, wanted):
        if mine != its:
            told = f"{where}: got {tell(mine)}, expected {tell(its)}"
            raise AssertionError(f"{told}; {len(got)} batches, expected {len(wanted)}")


def tell(record: Record | None) -> str:
    if record is None:
        return "nothing"
    epoch, index, step, rows, ((dtype, _, first), *others) = record
    ids = np.frombuffer(first, dtype).tolist()
    rest = hash(tuple(others)) % 10_000
    return f"epoch {epoch} index {index} step {step} rows {rows} ids {ids} (others {rest})"


def digest(records: Sequence[Record]) -> str:
    """Return the digest of a stream, to be compared between processes."""
    return hashlib.blake2b(repr(list(records)).encode()).hexdigest()


def expected(
    fetch: Callable[..., Any],
    *,
    pure: bool,
    batch_size: int = BATCH_SIZE,
    num_workers: int = NUM_WORKERS,
    num_devices: int = 1,
    last_round: str = "uneven",
    **settings: Any,
) -> list[Record]:
    """Return the stream as the naive feeder makes it."""
    stream = naive_stream(
        fetch, COLUMNS, pure=pure, batch_size=batch_size, num_workers=num_workers, **settings
    )
    return [note_naive(batch) for batch in naive_rounds(list(stream), num_devices, last_round)]


def make(fetch: Callable[..., Any], *, resume: Any = None, **settings: Any) -> Coordinator:
    """Return a coordinator of its own with one feed, not started, that goes on at `resume`."""
    defaults = {
        "input_blob_names": list(COLUMNS),
        "batch_size": BATCH_SIZE,
        "num_worker_threads": NUM_WORKERS,
        "timeout": 10.0,
        "coordinator": Coordinator(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        coordinator = init_data_input_workers(
            fetch_fun=fetch,
            resume=None if isinstance(resume, dict) else resume,
            **(defaults | settings),
        )
        if isinstance(resume, dict):
            coordinator.load_state_dict(resume)
    return coordinator


@contextmanager
def running(fetch: Callable[..., Any], **settings: Any) -> Iterator[tuple[Coordinator, Feed]]:
    """Run one feed for as long as the context lasts."""
    with make(fetch, **settings) as coordinator:
        (name,) = coordinator
        yield coordinator, coordinator[name]


def deal(feed: Feed) -> Iterator[Batch]:
    """Yield the batches of all devices in the order of the stream, and see all of them end."""
    devices = [feed.on(i) for i in range(len(feed.devices))]
    for device in cycle(devices):
        batch = next(device, None)
        if batch is None:
            break
        yield batch
    assert [next(device, None) for device in devices] == [None] * len(devices)


def drain(fetch: Callable[..., Any], *, most: int | None = None, **settings: Any) -> list[Record]:
    """Return the stream, or its first `most` batches."""
    with running(fetch, **settings) as (_, feed):
        return [note(batch) for batch in islice(deal(feed), most)]
