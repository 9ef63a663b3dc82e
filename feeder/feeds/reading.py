"""Which records a batch was made of, if that depends on what is in them: they are read again.

Behind a filter, `on_error="skip"` and `pack` nobody knows how many rows a call gives before it was
made. So the calls from a known place to the batch are made once more, for their records alone. Of a
batch at hand the place behind it is known, and its own calls are enough: so also where the step
alone does not tell, as the size of batches follows from the number of queues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from feeder.errors import ConfigError
from feeder.feeds.records import Asked, Rows, checked, has_calls, is_read, records_of, why_unknown
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut

logger = logging.getLogger("feeder")


def read_records(asked: Asked, step: int, places: Sequence[Cut]) -> Rows:
    """The records of the rows of a batch, read from the nearest of some places. Raises
    `ConfigError` if they cannot be known so, or there is no such batch."""
    if not (why_unknown(asked) and is_read(asked)):
        return records_of(asked, step)
    checked("step", step)
    known = [cut for cut in places if cut.step <= step and not cut.finished]
    at = max(known, key=lambda cut: cut.step, default=None)
    run: Any = getattr(asked.stream.fetch, "run", None)
    if run is not None and (at is None or at.step < run.edits[-1].step):
        raise ConfigError(
            f"step is {step}, and the last edit of feed {asked.name!r} is at step "
            f"{run.edits[-1].step}: rows that have to be read are known from there on, by a place "
            "that the feed has been at"
        )
    logger.info(
        "the records of step %d of feed %r are read from step %d on: at least %d rows", step,
        asked.name, 0 if at is None else at.step,
        (step + 1 - (0 if at is None else at.step)) * asked.stream.batch_size,
    )  # fmt: skip
    number = -1 if at is None else at.step - 1
    for number, rows in _batches(asked, at):
        if number == step:
            return tuple(rows)
    if asked.begins_round(step) <= number:
        return ()
    raise ConfigError(f"step is {step}, and the feed has ended before it")


def _batches(asked: Asked, at: Cut | None) -> Iterator[tuple[int, list[Any]]]:
    """The batches from a place on, or from the start of the stream: number and records."""
    stream = asked.stream
    step, left, was_empty = 0 if at is None else at.step, list[Any](), False
    epoch, index = (0, 0) if at is None else (at.position.epoch, at.position.calls[0])
    if at is not None and at.leftover is not None:
        of = epoch if at.leftover.call < index else epoch - 1
        left = _of_call(asked, of, at.leftover.call)[at.leftover.taken :]
    while stream.epochs is None or epoch < stream.epochs:
        calls = range(index, _num_calls(asked, epoch))
        first = step
        for call in calls:
            left += _of_call(asked, epoch, call)
            size = len(left) if stream.dont_rebatch else stream.batch_size
            while left and len(left) >= size:
                yield step, left[:size]
                step, left = step + 1, left[size:]
        is_last = epoch + 1 == stream.epochs
        if left and (is_last or stream.last_batch != "carry"):
            if stream.last_batch != "drop":
                yield step, left
                step += 1
            left = []
        if was_empty and step == first:
            return
        was_empty, epoch, index = step == first, epoch + 1, 0


def _num_calls(asked: Asked, epoch: int) -> int:
    source: Any = asked.stream.fetch
    if (num_calls := getattr(source, "num_calls", None)) is not None:
        # Calls of an edited run have one window each, or the records of one.
        num: int = num_calls(epoch)
        return num
    size = 1 if source.traits.one_per_call else asked.stream.rows_asked
    rows: int = source.rows(epoch, size)
    # The first call of an epoch gives less, if rows flow into it from the epoch before.
    return -(-rows // size) + (asked.stream.last_batch == "carry")


def _of_call(asked: Asked, epoch: int, index: int) -> list[Any]:
    """The records of the rows of a call; none if it lies behind the end of its epoch."""
    source: Any = asked.stream.fetch
    varies = source.traits.may_skip or source.traits.one_per_call
    ask = source.read_records_of if varies else source.records_of
    try:
        return list(ask(asked.stream.call(epoch, index)))
    except StopIteration:
        return []


def records_of_batch(asked: Asked, batch: Batch) -> Rows:
    """The records of the rows of a batch, by the place behind it if they do not follow from
    numbers. Raises `ConfigError` if they cannot be known."""
    if not (why_unknown(asked) and has_calls(asked)):
        return records_of(asked, batch.step)
    place, rows = batch.place, list[Any]()
    epoch, index = place.span.start.epoch, place.span.start.calls[0]
    if place.num_chunks:
        # Its own place, as its cut may be the start of the next epoch, behind rows that are left.
        _, index, _ = place.span.call(place.num_chunks - 1)
        rows = _of_call(asked, epoch, index)
        rows = rows if place.partial is None else rows[: place.taken]
    elif (left := batch.cut.leftover) is not None:
        # The feed was resumed within a call, and the batch has rows of that call alone.
        epoch, index = (epoch if left.call < index else epoch - 1), left.call
        rows = _of_call(asked, epoch, index)[: left.taken]
    while len(rows) < batch.rows:
        if not index:
            epoch -= 1
            index = _num_calls(asked, epoch)
        index -= 1
        rows = _of_call(asked, epoch, index) + rows
    return tuple(rows[len(rows) - batch.rows :])
