"""Which records a batch was made of: arithmetic over the rows that each epoch of a source has.

A source's stream follows from numbers, so the batch of any step is found without making those
before it: the step says which rows of which epoch it has, and the source's order says which records
lie there. Nothing is read, whether the step is past or to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from feeder.config import FeedConfig
from feeder.errors import ConfigError
from feeder.feeds.length import num_batches
from feeder.workers.stream.batch import Call
from feeder.workers.stream.spec import StreamSpec

if TYPE_CHECKING:
    # A feed of a function needs no source.
    from feeder.workers.sources.source import Source
    from feeder.workers.sources.stores.reading import Record

Rows: TypeAlias = "tuple[tuple[Record, ...], ...]"
"""The records of each row of a batch."""


def records_of(config: FeedConfig, step: int) -> Rows:
    """The records of the rows of the stream's batch of that number. Raises `ConfigError` if they
    do not follow from numbers, or there is no such batch."""
    if why := _why_unknown(config):
        raise ConfigError(
            f"the records of a step of feed {config.name!r} are not known before they are read: "
            f"{why}; have each record's number as a column of its batches"
        )
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step is {step!r}, expected a whole number of at least 0")
    source: Any = config.stream.fetch
    calls = [*_calls(config.stream, source, step)] if _is_given(config, step) else []
    if not calls:
        raise ConfigError(f"step is {step}, and the feed has ended before it")
    return tuple(row for call in calls for row in source.records_of(call))


def _is_given(config: FeedConfig, step: int) -> bool:
    """Whether a batch is not left out with a round that is not complete."""
    num = len(config.devices)
    if config.stream.last_round != "drop" or num == 1:
        return True
    given = [num_batches(config, device) for device in range(num)]
    return step < sum(math.inf if one is None else one for one in given)


def _why_unknown(config: FeedConfig) -> str:
    """Why the records of a batch do not follow from its number; empty if they do."""
    stream = config.stream
    source: Any = stream.fetch
    if not hasattr(source, "records_of"):
        return "rows of a fetch function are its own, and those of sources alone have numbers"
    traits = source.traits
    if traits.may_skip or traits.walks or traits.one_per_call:
        return f"which rows {source.kind} has depends on what is in the records"
    if stream.dont_rebatch or stream.order == "arrival":
        return "batches are made of calls as they come"
    if stream.global_batch_size is not None:
        return "the rows of a batch depend on the number of queues that each run had"
    if stream.rounds == "epoch" and len(config.devices) > 1:
        return "rounds end with an epoch"
    return ""


def _calls(stream: StreamSpec, source: Source, step: int) -> Iterator[Call]:
    """The calls that give a batch's rows, if calls are asked for as many rows as a batch has; none
    if the stream has ended before it."""
    size, carries = stream.batch_size, stream.last_batch == "carry"
    run: Any = getattr(source, "run", None)
    if run is not None:
        # A run that has been edited.
        epoch, index = run.call_of(step, stream.last_batch)
        if stream.epochs is None or epoch < stream.epochs:
            yield stream.call(epoch, index)
        return
    # What an epoch has more than the one before: batches, or rows that flow into the next batch.
    rows = [source.rows(epoch, size) for epoch in range(source.num_turns)]
    unit = rows if carries else [
        num // size if stream.last_batch == "drop" else -(-num // size) for num in rows
    ]  # fmt: skip
    missing, most = size, stream.epochs
    laps, at = divmod(step * (size if carries else 1), max(1, sum(unit)))
    epoch = laps * len(unit)
    while missing and (most is None or epoch < most) and any(unit):
        turn = epoch % len(unit)
        if at >= unit[turn]:
            epoch, at = epoch + 1, at - unit[turn]
            continue
        first = at if carries else at * size
        # With rows that are carried, the first call of an epoch gives what the batch before lacks.
        index = -(-first // size) if carries else at
        yield stream.call(epoch, 0)._replace(index=index, batch_size=size)
        missing = missing - min(missing, rows[turn] - first) if carries else 0
        epoch, at = epoch + 1, 0
