"""A feeder as one would write it in a few lines: one thread, one list, no position.

It follows the written rules of the stream alone and shares no code with the product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from feeder import Call

Row = tuple[Any, ...]
NaiveBatch = tuple[int, int, int, int, tuple[np.ndarray, ...]]
"""Epoch, index, step, real rows, columns."""


def naive_stream(
    fetch: Callable[..., Any],
    names: tuple[str, ...],
    *,
    pure: bool,
    batch_size: int,
    num_workers: int,
    epochs: int,
    last_batch: str = "keep",
    seed: int = 0,
) -> Iterator[NaiveBatch]:
    """Yield the batches of a feed over columns whose axis 0 is rows."""
    args = (names, batch_size, num_workers)
    rows_of_epochs = index_epochs(fetch, *args, seed) if pure else ring_epochs(fetch, *args)
    carried: list[Row] = []
    step = count()
    for epoch, fetched in zip(range(epochs), rows_of_epochs, strict=False):
        rows = carried + fetched
        batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        rest = batches.pop() if len(rows) % batch_size else []
        carries = last_batch == "carry" and epoch + 1 < epochs
        carried = rest if carries else []
        if rest and not carries and last_batch != "drop":
            batches.append(rest)
        for index, batch in enumerate(batches):
            missing = batch_size - len(batch) if last_batch == "pad" else 0
            columns = zip(*batch, *[batch[-1]] * missing, strict=True)
            yield epoch, index, next(step), len(batch), tuple(map(np.stack, columns))


def ring_epochs(
    fetch: Callable[..., Any], names: tuple[str, ...], batch_size: int, num_workers: int
) -> Iterator[list[Row]]:
    """Yield the rows of each epoch: one chunk of each live worker in turn."""
    while True:
        rows: list[Row] = []
        ring = deque(range(num_workers))
        while ring:
            worker_id = ring.popleft()
            try:
                rows += rows_of(first_chunk(fetch, worker_id, batch_size), names)
            except StopIteration:
                continue
            ring.append(worker_id)
        yield rows


def index_epochs(
    fetch: Callable[..., Any], names: tuple[str, ...], batch_size: int, num_workers: int, seed: int
) -> Iterator[list[Row]]:
    """Yield the rows of each epoch: one chunk of each index up to the first that ends it."""
    for epoch in count():
        rows: list[Row] = []
        for index in count():
            call = Call(index, epoch, index % num_workers, batch_size, seed)
            try:
                rows += rows_of(first_chunk(fetch, call), names)
            except StopIteration:
                break
        yield rows


def first_chunk(fetch: Callable[..., Any], *args: Any) -> Any:
    while (chunk := fetch(*args)) is None:
        pass
    return chunk


def rows_of(chunk: Any, names: tuple[str, ...]) -> Iterator[Row]:
    columns = [chunk[name] for name in names] if isinstance(chunk, dict) else chunk
    return zip(*columns, strict=True)


def naive_rounds(
    batches: list[NaiveBatch], num_devices: int, last_round: str = "uneven"
) -> list[NaiveBatch]:
    """Return what is dealt to so many devices: batch `step` goes to device `step` mod N."""
    extra = len(batches) % num_devices
    if extra and last_round == "drop":
        return batches[:-extra]
    if extra and last_round == "pad":
        epoch, index, step, _, columns = batches[-1]
        more = range(1, num_devices - extra + 1)
        return batches + [(epoch, index + i, step + i, 0, columns) for i in more]
    return batches


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
