"""A feeder as one would write it in a few lines: one thread, one list, no position.

It follows the written rules of the stream alone and shares no code with the product.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, count, islice
from typing import Any, NamedTuple

import numpy as np

from feeder import Call

Columns = tuple[np.ndarray, ...]
NaiveBatch = tuple[int, int, int, int, Columns]
"""Epoch, index, step, real rows, columns."""


class Chunk(NamedTuple):
    """What a call has returned."""

    epoch: int
    worker_id: int
    call: int
    """Its number as an error names it: in the epoch of a pure function, of a worker in all."""
    columns: Columns

    @property
    def rows(self) -> int:
        return len(self.columns[0])


class At(NamedTuple):
    """A place in a naive stream: rows of all epochs before it, and how batches are counted."""

    row: int = 0
    epoch: int = 0
    index: int = 0
    step: int = 0


START = At()


class NaiveStream:
    """All rows of some epochs, one after another, to be cut into batches from any place on."""

    def __init__(self, epochs: Sequence[Sequence[Chunk]]) -> None:
        self.chunks = list(chain.from_iterable(epochs))
        self.starts = [0, *accumulate(chunk.rows for chunk in self.chunks)]
        """The place of the first row of each chunk."""
        self.ends = list(accumulate(sum(chunk.rows for chunk in epoch) for epoch in epochs))
        """The place after the last row of each epoch."""
        columns = zip(*(chunk.columns for chunk in self.chunks), strict=True)
        self.columns = tuple(map(np.concatenate, columns))

    def batches(
        self, size: int | None, last_batch: str = "keep", at: At = START
    ) -> Iterator[tuple[NaiveBatch, At]]:
        """Yield each batch from a place on, with the place after it; of `size` rows, or without
        such a size each chunk."""
        while (found := self._next_rows(size, last_batch, at)) is not None:
            first, stop = found
            epoch = next(epoch for epoch, end in enumerate(self.ends) if stop <= end)
            index = at.index if epoch == at.epoch else 0
            filled = size if size is not None and last_batch == "pad" else stop - first
            rows = np.arange(first, first + filled).clip(max=stop - 1)
            columns = tuple(column[rows] for column in self.columns)
            batch = epoch, index, at.step, stop - first, columns
            at = At(stop, epoch, index + 1, at.step + 1)
            yield batch, at

    def _next_rows(self, size: int | None, last_batch: str, at: At) -> tuple[int, int] | None:
        """The first row of the next batch and the one after its last; None where there is none."""
        if size is None:
            return next(((a, b) for a, b in self._chunk_rows() if a >= at.row and b > a), None)
        if last_batch == "carry":
            stop = min(at.row + size, self.ends[-1])
            return (at.row, stop) if stop > at.row else None
        starts = [0, *self.ends]
        for start, end in zip(starts, self.ends, strict=False):
            first = max(start, at.row)
            stop = min(first + size, end)
            if stop > first and (stop - first == size or last_batch != "drop"):
                return first, stop
        return None

    def _chunk_rows(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.starts[1:], strict=False)


def naive_chunks(
    fetch: Callable[..., Any],
    names: tuple[str, ...],
    *,
    pure: bool,
    batch_size: int,
    num_workers: int,
    epochs: int,
    seed: int = 0,
) -> NaiveStream:
    """Call a fetch function as the rules say; it is told `batch_size`."""
    if pure:
        made = index_epochs(fetch, names, batch_size, num_workers, seed)
    else:
        made = ring_epochs(fetch, names, batch_size, num_workers)
    return NaiveStream(list(islice(made, epochs)))


def naive_stream(
    fetch: Callable[..., Any],
    names: tuple[str, ...],
    *,
    batch_size: int,
    last_batch: str = "keep",
    **settings: Any,
) -> Iterator[NaiveBatch]:
    """Yield the batches of a feed over columns whose axis 0 is rows."""
    stream = naive_chunks(fetch, names, batch_size=batch_size, **settings)
    for batch, _ in stream.batches(batch_size, last_batch):
        yield batch


def ring_epochs(
    fetch: Callable[..., Any], names: tuple[str, ...], batch_size: int, num_workers: int
) -> Iterator[list[Chunk]]:
    """Yield the chunks of each epoch: one of each live worker in turn."""
    calls = Counter[int]()
    for epoch in count():
        chunks: list[Chunk] = []
        ring = deque(range(num_workers))
        while ring:
            worker_id = ring.popleft()
            try:
                columns = columns_of(first_chunk(fetch, worker_id, batch_size), names)
            except StopIteration:
                continue
            chunks.append(Chunk(epoch, worker_id, calls[worker_id], columns))
            calls[worker_id] += 1
            ring.append(worker_id)
        yield chunks


def index_epochs(
    fetch: Callable[..., Any], names: tuple[str, ...], batch_size: int, num_workers: int, seed: int
) -> Iterator[list[Chunk]]:
    """Yield the chunks of each epoch: one of each index up to the first that ends it."""
    for epoch in count():
        chunks: list[Chunk] = []
        for index in count():
            call = Call(index, epoch, index % num_workers, batch_size, seed)
            try:
                columns = columns_of(first_chunk(fetch, call), names)
            except StopIteration:
                break
            chunks.append(Chunk(epoch, call.worker_id, index, columns))
        yield chunks


def first_chunk(fetch: Callable[..., Any], *args: Any) -> Any:
    while (chunk := fetch(*args)) is None:
        pass
    return chunk


def columns_of(chunk: Any, names: tuple[str, ...]) -> Columns:
    return tuple(chunk[name] for name in names) if isinstance(chunk, dict) else tuple(chunk)


def naive_rounds(
    batches: list[NaiveBatch], num_devices: int, last_round: str = "uneven"
) -> list[NaiveBatch]:
    """Return what is dealt to so many devices: batch `step` goes to device `step` mod N."""
    dealt = naive_dealing(batches, 0, num_devices, "stream", last_round)
    return [batch for _, batches in dealt for batch in batches]


def naive_dealing(
    stream: Sequence[Any], at: int, num: int, rounds: str, last_round: str
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rounds from batch `at` on: where each ends, and what each device is dealt."""
    while at < len(stream):
        dealt = list(stream[at : at + num])
        if rounds == "epoch":
            dealt = [batch for batch in dealt if batch[0] == dealt[0][0]]
        at += len(dealt)
        missing = num - len(dealt)
        if missing and last_round == "drop":
            continue
        if last_round == "pad":
            epoch, index, step, _, columns = dealt[-1]
            dealt += [(epoch, index + i + 1, step + i + 1, 0, columns) for i in range(missing)]
        yield at, dealt
