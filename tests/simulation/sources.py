"""Feeds of sources: mixtures that are edited, and records that are passed over; and their batches
as a naive loop makes them, or a run that is stopped at each edit and resumed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np

import feeder
from feeder import sources
from feeder.devices.host import HostQueue
from feeder.service.server.editing import Change
from feeder.state.snapshot import HISTORY
from feeder.workers.stream.batch import Batch, Call
from simulation.world import real_time

if TYPE_CHECKING:
    from simulation.stream import Feed

NAME = "train"
_WAIT = HostQueue._wait_for_batch
UNIT = 10_000
"""Record r of source k is k * UNIT + r."""


class Edit(NamedTuple):
    """An edit that a server has made."""

    step: int
    why: str
    """No other edit of the run has it."""
    weights: tuple[int, ...] = ()
    """Of the sources, in their order; nothing: they stay."""
    size: int | None = None
    seed: int | None = None

    @property
    def change(self) -> Change:
        """What a server is asked for."""
        weights = {f"s{i}": Fraction(weight) for i, weight in enumerate(self.weights)}
        return Change(weights, {} if self.size is None else {"batch_size": self.size}, self.seed)


def steps_in(fingerprint: Any) -> tuple[tuple[int, str], ...]:
    """Where the edits of a run lie, and why they were made, by the fields of a position."""
    history = fingerprint.get(HISTORY)
    return () if history is None else tuple((one[3], one[4]) for one in history[2])


def source_of(feed: Feed, weights: tuple[int, ...]) -> Any:
    """The source of a feed, with these weights."""
    size = -(-feed.calls * feed.chunk_rows // len(feed.weights))
    if not feed.skips:
        return _mixture(size, weights)
    return _part(0, size).map(_read, on_error="skip")


@lru_cache(512)
def _mixture(size: int, weights: tuple[int, ...]) -> Any:
    return sources.mix({f"s{i}": (_part(i, size), weight) for i, weight in enumerate(weights)})


def _part(number: int, size: int) -> Any:
    return sources.arrays(np.arange(size) + UNIT * number).shuffle(seed=1)


def _read(record: Any) -> Any:
    if record % 5 == 0:
        raise ValueError("nobody can read it")
    return record


def coordinator_of(
    feed: Feed, weights: tuple[int, ...] = (), resume: Any = None, **settings: Any
) -> feeder.Coordinator:
    """The feed of a source, with its settings or others."""
    given: dict[str, Any] = {
        "batch_size": feed.batch_size, "devices": feed.queues, "rounds": feed.rounds,
        "last_round": feed.last_round, "writable": feed.writable, "num_threads": feed.threads,
        "retries": feed.retries, **settings,
    }  # fmt: skip
    return feeder.init_data_input_workers(
        ["x"], source_of(feed, weights or feed.weights), input_source_name=NAME,
        epochs=feed.epochs, last_batch=feed.last_batch, coordinator=feeder.Coordinator(),
        resume=resume, **given,
    )  # fmt: skip


def content(batch: Batch) -> bytes:
    """The real rows of a batch."""
    return bytes(batch.arrays()[0][: batch.rows].tobytes())


def rows_in(feed: Feed, epoch: int) -> Any:
    """The rows of an epoch, as a naive loop reads them call by call."""
    source = source_of(feed, feed.weights)
    return np.concatenate([*_chunks(source, feed.batch_size, epoch)])


def _chunks(source: Any, size: int, epoch: int) -> Iterator[Any]:
    for index in count():
        try:
            yield source(Call(index, epoch, 0, size, 0))[0]
        except StopIteration:
            return


@lru_cache(512)
def left_out(feed: Feed) -> list[Any]:
    """What the run passes over in each epoch, as a source says it that has read no other one: a
    record is listed once."""
    found: list[Any] = []
    for epoch in range(feed.epochs):
        source = source_of(feed, feed.weights)
        assert [*_chunks(source, feed.batch_size, epoch)]
        found += map(tuple, source.left_out)
    return found


@lru_cache(512)
def edited(feed: Feed) -> list[bytes]:
    """The rows of each batch of an edited run: that of one process, which is stopped at each edit
    and resumed with it. To how many queues its batches are dealt changes none of them."""
    found: list[bytes] = []
    alone: dict[str, Any] = {"devices": 1, "num_threads": 0, "retries": 0}
    weights, state, why = feed.weights, None, None
    with real_time(), patch.object(HostQueue, "_wait_for_batch", _WAIT):
        for edit in (*feed.edits, None):
            with coordinator_of(feed, weights, state, edit=why, **alone) as made:
                end = None if edit is None else edit.step - len(found)
                found += [content(batch) for batch in islice(made[NAME], end)]
                state = made.state_dict()
            if edit is not None:
                weights, why = edit.weights or weights, edit.why
                alone |= {} if edit.size is None else {"batch_size": edit.size}
                alone |= {} if edit.seed is None else {"seed": edit.seed}
    return found
