"""Which records a batch was made of, and when a record comes: arithmetic over the rows of epochs.

A source's stream follows from numbers, so the batch of any step is found without making those
before it: the step says which rows of which epoch it has, and the source's order says which records
lie there. The inverse of the order says in which rows a record lies, and so at which steps. Nothing
is read, whether the step is past or to come; a position alone is enough, which has the description
of its source.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from feeder.errors import ConfigError, ResumeError
from feeder.feeds.length import num_batches
from feeder.state.fingerprint import fingerprint_digest
from feeder.state.history import described
from feeder.state.snapshot import StreamState
from feeder.state.token import StreamId
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Cut
from feeder.workers.stream.rounds import Dealing
from feeder.workers.stream.spec import StreamSpec

if TYPE_CHECKING:
    # A feed of a function needs no source.
    from feeder.config import FeedConfig
    from feeder.workers.sources.source import Source
    from feeder.workers.sources.stores.reading import Record, Seen

logger = logging.getLogger("feeder")

Rows: TypeAlias = "tuple[tuple[Record, ...], ...]"
"""The records of each row of a batch."""

_MOST_EPOCHS = 1000
"""A record that does not come in so many epochs, or in 20 rounds of a source's shards, is looked
for no longer."""


_NO_ROWS = ("batch_by_tokens", "offsets")
"""Steps whose rows are not told by records."""


class Asked(NamedTuple):
    """A stream that is asked for its records."""

    name: str
    stream: StreamSpec
    num_queues: int
    first: int
    """A batch at which a round of the queues begins."""
    num_batches: float
    """Batches that are handed out, of all queues together; infinity if nobody knows."""

    @classmethod
    def of_feed(cls, config: FeedConfig, dealing: Dealing | None) -> Asked:
        """A stream of a feed, whose batches are dealt out so."""
        num, first = len(config.devices), 0 if dealing is None else dealing.start
        given, stream = math.inf, config.stream
        if stream.last_round == "drop" and num > 1:
            if stream.rounds == "stream":
                # The number of all, as rounds may begin elsewhere than at 0 since a resume.
                config = config._replace(stream=stream._replace(last_round="uneven"))
            each = [num_batches(config, device) for device in range(num)]
            given = sum(math.inf if one is None else one for one in each)
            if stream.rounds == "stream" and given < math.inf:
                given -= (given - first) % num
        return cls(config.name, stream, num, first, given)

    def queue(self, step: int) -> int:
        """The queue that a batch goes to."""
        return (step - self.first) % self.num_queues

    def begins_round(self, step: int) -> int:
        """The first batch of the round that a batch may fill, if `last_round` is "pad"; otherwise
        the batch itself. A batch behind the end has no rows if that one has some."""
        return max(0, step - self.queue(step)) if self.stream.last_round == "pad" else step

    def step_of(self, step: int, queue: int) -> int:
        """The batch of a queue, by its number among the batches of that queue."""
        if not 0 <= queue < self.num_queues:
            raise ConfigError(f"rank is {queue}, expected 0 to {self.num_queues - 1}")
        return self.first + checked("step", step) * self.num_queues + queue


def checked(what: str, number: object) -> int:
    """A whole number of at least 0. Raises `ConfigError`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(f"{what} is {number!r}, expected a whole number of at least 0")
    return number


def records_of(asked: Asked, step: int) -> Rows:
    """The records of the rows of the stream's batch of that number. Raises `ConfigError` if they
    do not follow from numbers, or there is no such batch."""
    _check_known(asked)
    checked("step", step)
    source: Any = asked.stream.fetch
    calls = [*_calls(asked.stream, source, step)] if step < asked.num_batches else []
    if not calls and not (
        (first := asked.begins_round(step)) < step and any(_calls(asked.stream, source, first))
    ):
        raise ConfigError(f"step is {step}, and the feed has ended before it")
    return tuple(row for call in calls for row in source.records_of(call))


def ranges_in(asked: Asked, steps: Iterable[int]) -> dict[str, list[range]]:
    """The numbers of the records of some batches, by source, as ranges. Raises `ConfigError`."""
    numbers: dict[str, set[int]] = {}
    for step in steps:
        for row in records_of(asked, step):
            for record in row:
                numbers.setdefault(record.source, set()).add(record.number)
    found: dict[str, list[range]] = {}
    for source, those in numbers.items():
        runs = found[source] = []
        for number in sorted(those):
            if runs and runs[-1].stop == number:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
    return found


def _check_known(asked: Asked) -> None:
    if why := why_unknown(asked):
        cure = "have each record's number as a column of its batches"
        if is_read(asked):
            cure = "records(step, read=True) reads them from the nearest place, or " + cure
        raise ConfigError(
            f"the records of a step of feed {asked.name!r} are not known before they are read: "
            f"{why}; {cure}"
        )


def has_calls(asked: Asked) -> bool:
    """Whether the records of a batch follow from the calls that it has rows of, if these are read
    where that has to be."""
    source: Any = asked.stream.fetch
    return (
        hasattr(source, "records_of") and asked.stream.order != "arrival"
        and not source.traits.walks and source.kind not in _NO_ROWS
    )  # fmt: skip


def is_read(asked: Asked) -> bool:
    """Whether the records of a step are known if all calls from a place on are read."""
    stream = asked.stream
    rounds_end = stream.rounds == "epoch" and asked.num_queues > 1
    return has_calls(asked) and stream.global_batch_size is None and not rounds_end


def why_unknown(asked: Asked) -> str:
    """Why the records of a batch do not follow from its number; empty if they do."""
    stream = asked.stream
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
    if stream.rounds == "epoch" and asked.num_queues > 1:
        return "rounds end with an epoch"
    return ""


# ---- Steps and rows


class _Laps(NamedTuple):
    """What epochs have, which come in laps of equally many."""

    rows: list[int]
    """Rows of each epoch of a lap."""
    unit: list[int]
    """What counts of them: batches, or rows if these flow into the next batch."""

    @classmethod
    def of(cls, stream: StreamSpec, source: Source) -> _Laps:
        size = stream.batch_size
        rows = [source.rows(epoch, size) for epoch in range(source.num_turns)]
        if stream.last_batch == "carry":
            return cls(rows, rows)
        drops = stream.last_batch == "drop"
        return cls(rows, [num // size if drops else -(-num // size) for num in rows])

    def before(self, epoch: int) -> int:
        """What all epochs before one have."""
        laps, turn = divmod(epoch, len(self.unit))
        return laps * sum(self.unit) + sum(self.unit[:turn])


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
    rows, unit = _Laps.of(stream, source)
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


# ---- When a record comes


def when(asked: Asked, source: str, record: int) -> Iterator[Seen]:
    """Where a record comes, in the order of steps, without an end if the epochs have none. Raises
    `ConfigError` if that does not follow from numbers, or if it never comes."""
    from feeder.workers.sources.steps.rows import has_inverse

    _check_known(asked)
    fetch: Any = asked.stream.fetch
    check_record(fetch.sizes_of(), source, record)
    if not has_inverse(fetch):
        logger.info("all records of an epoch are looked at: DALI's shuffles have no inverse")
    return _seen(asked, fetch, source, record)


def check_record(sizes: Mapping[str, int], source: str, record: int) -> None:
    """Raise `ConfigError` if there is no such record of sources of these sizes."""
    if source not in sizes:
        known = "has one source without a name, ''" if set(sizes) == {""} else f"has {[*sizes]}"
        raise ConfigError(f"source is {source!r}, and the feed {known}")
    if checked("record", record) >= sizes[source]:
        raise ConfigError(f"record is {record}, and {_of(source)} has {sizes[source]} records")


def _of(source: str) -> str:
    return f"source {source!r}" if source else "the source"


def _seen(asked: Asked, fetch: Any, source: str, record: int) -> Iterator[Seen]:
    stream = asked.stream
    run: Any = getattr(fetch, "run", None)
    is_out = fetch.leaves_out(source, record, stream.call(0, 0))
    last = 0 if run is None else max(edit.epoch for edit in run.edits) + 1
    laps = None if run is not None else _Laps.of(stream, fetch)
    most = max(_MOST_EPOCHS, 0 if laps is None else 20 * len(laps.rows))
    until, found = most, False
    for epoch in count():
        if epoch == stream.epochs or epoch >= until or (is_out and epoch > last):
            break
        rows = fetch.rows_of(source, record, stream.call(epoch, 0))
        for seen in _seen_in(asked, laps, epoch, rows):
            if seen.step >= asked.num_batches:
                return
            until, found = epoch + most, True
            yield seen
    if not found:
        why = "is excluded" if is_out else f"is not in the first {epoch} epochs"
        if run is not None and (since := run.out_since(source)) is not None:
            why = f"had not come when {_of(source)} was taken out by the edit at step {since}"
        raise ConfigError(f"record {record} of {_of(source)} {why}: no step has it")


def _seen_in(
    asked: Asked, laps: _Laps | None, epoch: int, rows: Iterator[int]
) -> Iterator[Seen]:  # fmt: skip
    """Where rows of an epoch come; a run that has been edited has no laps."""
    from feeder.workers.sources.stores.reading import Seen

    stream, size = asked.stream, asked.stream.batch_size
    for at in rows:
        if laps is None:
            run: Any = stream.fetch.run  # type: ignore[attr-defined]
            index = run.call_of_record(epoch, at)
            step = run.step_of(epoch, index, stream.last_batch)
            row = at - run.rows_of(epoch, index)[0]
        elif stream.last_batch == "carry":
            step, row = divmod(laps.before(epoch) + at, size)
        else:
            index, row = divmod(at, size)
            is_given = index < laps.unit[epoch % len(laps.unit)]
            step = laps.before(epoch) + index if is_given else None
        if step is not None:
            yield Seen(step, row, epoch, asked.queue(step))


# ---- A position alone


def asked_of(state: StreamState) -> tuple[Asked, Cut]:
    """The stream that a position is of, without its data, and the place. Raises `ConfigError` if
    the position does not hold what is needed, `ResumeError` if there is no sense in it."""
    fields = state.fingerprint
    cut = StreamId(state.name, state.number, fingerprint_digest(fields)).decode(state.token, None)
    if "source.source" not in fields:
        raise ConfigError(
            f"the position of feed {state.name!r} is of a fetch function, whose rows are its own: "
            "those of sources alone have numbers"
        )
    dealing = cut.dealing or Dealing(0, 1, fields.get("batch_size", 1))
    try:
        stream = _described_stream(fields, dealing)
        if state.left_out:
            raise ConfigError(
                "it does not hold which rows there are after records were left out "
                f"(on_error='skip'), such as {state.left_out[0][2]}"
            )
    except ConfigError as error:
        raise ConfigError(
            f"the records of feed {state.name!r} do not follow from its position alone: {error}; "
            "ask feed.records(step) in a program that makes the feed"
        ) from error
    except (LookupError, TypeError) as error:
        raise ResumeError(
            f"the position of feed {state.name!r} lacks a setting: {error}"
        ) from error
    source: Any = stream.fetch
    if stream.last_batch == "carry" and cut.position.calls == (0,):
        # A position of one queue does not hold the number of epochs; if its last batch is short,
        # the stream has ended there.
        has_come = _Laps.of(stream, source).before(cut.position.epoch)
        if has_come < cut.step * stream.batch_size:
            stream = stream._replace(epochs=cut.position.epoch)
    most = math.inf
    if stream.last_round == "drop" and dealing.epochs is not None and not hasattr(source, "run"):
        most = _Laps.of(stream, source).before(dealing.epochs)
        most = -(-most // stream.batch_size) if stream.last_batch == "carry" else most
        most -= (most - dealing.start) % dealing.num
    return Asked(state.name, stream, dealing.num, dealing.start, most), cut


def _described_stream(fields: Mapping[str, Any], dealing: Dealing) -> StreamSpec:
    source: Any = described(fields)
    fetch = source.carrying() if fields["last_batch"] == "carry" else source
    return StreamSpec(
        fetch=fetch, pure=True, cursor=None, seek=None, names=(), axes=(),
        batch_size=dealing.batch_size, num_workers=1, first_worker_id=0, seed=fields["seed"],
        epochs=dealing.epochs, last_batch=fields["last_batch"], last_round=fields["last_round"],
        order=fields["order"], dont_rebatch=fields["dont_rebatch"], repeatable=True,
        rounds=fields.get("rounds", "stream"), global_batch_size=fields.get("global_batch_size"),
    )  # fmt: skip
