"""Calling a pure fetch function as a feed does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from feeder.workers.stream.batch import Call


def call(index: int, batch_size: int, epoch: int = 0, seed: int = 0) -> Call:
    """A call of worker 0."""
    return Call(index, epoch, 0, batch_size, seed)


def epoch_of(
    fetch: Callable[[Call], Any], batch_size: int, epoch: int = 0, seed: int = 0
) -> Iterator[Any]:
    """What the calls of one epoch return."""
    for index in count():
        try:
            chunk = fetch(call(index, batch_size, epoch, seed))
        except StopIteration:
            return
        yield chunk
