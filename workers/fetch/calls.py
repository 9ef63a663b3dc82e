"""How a fetch function is called, and how it is put back to where it was.

There is one object for each partition of calls, since what a call depends on is the partition's
alone: its worker id, its cursor, or the calls that have to be made again before it. The forms of
fetch functions (pure, by cursor, replayed, iterable) differ here and nowhere else: from here on all
of them are calls by number.
"""

from __future__ import annotations

import logging
import time
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from feeder.workers.errors import (
    CallLost,
    ConfigError,
    FetchError,
    FetchTimeout,
    ResumeError,
    in_words,
)
from feeder.workers.fetch.tickets import Ticket
from feeder.workers.stats import FetchStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import Schema, arrow_chunks, is_table, leaves
from feeder.workers.stream.digests import chain_marks
from feeder.workers.stream.placement import Placement, writing_to
from feeder.workers.stream.position import Cut, Position
from feeder.workers.stream.spec import RunSpec, StreamSpec

FIRST_NONE_PAUSE_S = 0.001
"""A call that gave None is made again after so long; doubled each time."""

_PROGRESS_S = 5.0
"""So often a replay tells how far it has come."""
# For a person who reads the log; no figure depends on it (2026-11-21).

# ---- Cursors of pure fetch functions: they make the first call after a resume quick.
#
# A pure function is resumed by calling it with the next index. Where finding the rows of an index
# takes the longer the further the stream has come, it may have, beside `__call__(call)`,
#
#     cursor(call) -> bytes       what a new function needs to answer the calls after `call` at once
#     seek(call, cursor)          takes it, before its first call, which is `call`
#
# A cursor never changes what a call returns. It is asked for when a position is written down, not
# at every call; index -1 stands for the place before an epoch's first call.


MAX_BYTES = 60 * 1024
"""A longer cursor is left out, so that the token stays below its limit; resuming then walks."""


def add_cursor(spec: StreamSpec, encode: Callable[[Cut], bytes]) -> Callable[[Cut], bytes]:
    """The encoder of a stream's cuts, which writes the fetch function's cursor down with them."""
    if not has_cursor(spec):
        return encode
    fetch: Any = spec.fetch

    def encode_with_cursor(cut: Cut) -> bytes:
        cursor = (
            None if cut.finished else fetch.cursor(spec.call(cut.position.epoch, _first(cut) - 1))
        )
        if not isinstance(cursor, bytes | None):
            raise ConfigError(
                f"cursor(call) of the fetch function gave {type(cursor).__name__}, expected bytes"
            )
        marks = (cursor if cursor and len(cursor) <= MAX_BYTES else None,)
        return encode(replace(cut, position=cut.position._replace(marks=marks)))

    return encode_with_cursor


def seek(spec: StreamSpec, cut: Cut) -> None:
    """Give a fetch function the cursor that was written down with a cut; before its first call."""
    cursor = cut.position.marks[0]
    if cursor and has_cursor(spec):
        fetch: Any = spec.fetch
        fetch.seek(spec.call(cut.position.epoch, _first(cut)), cursor)


def has_cursor(spec: StreamSpec) -> bool:
    """Whether the stream's fetch function is pure and has cursors all the same."""
    return spec.pure and all(
        callable(getattr(spec.fetch, name, None)) for name in ("cursor", "seek")
    )


def _first(cut: Cut) -> int:
    """The smallest index that is called when the stream goes on at a cut, that of a chunk that is
    fetched again included."""
    index, again = cut.position.calls[0], cut.leftover or cut.checked
    return index if again is None else min(index, again.call)


# ---- First cursors: where the workers of a fetch function stood before their first call
#
# A position has no cursor of a worker that gave nothing up to there. A new function object stands
# where such a worker has to be. One that was called, ahead of the position or for an earlier
# stream, has to be put back: its rows were lost in silence otherwise. So the first cursors are kept
# for as long as the function is. (Kept by each pipeline, they were missing at the second hand-over
# to a server.)


Origins = dict[int, bytes | None]
"""By worker id, of those that may have been called, the cursor before the first call; None where it
is not known, or no longer which first call is meant."""

_known: dict[int, tuple[Callable[[], Any], Origins]] = {}


def origins_of(fetch: Any, cursor: Any) -> Origins:
    """What is known of a fetch function. Any thread may ask; the thread that calls a worker reads
    and writes that worker's entry.

    Methods share what is known of their object, however often the method was looked up."""
    methods = (function for function in (cursor, fetch) if isinstance(function, types.MethodType))
    owner = next((method.__self__ for method in methods), fetch)
    key = id(owner)
    # By identity: what a function object is equal to is its own affair.
    if (known := _known.get(key)) is not None and known[0]() is owner:
        return known[1]
    origins: Origins = {}
    refer: Callable[[], Any]
    try:
        refer = weakref.ref(owner, lambda _: _known.pop(key, None))
    except TypeError:
        # It cannot be referred to weakly: kept, since rows would be lost if it were forgotten.
        def refer() -> Any:
            return owner

    _known[key] = (refer, origins)
    return origins


def begin_anew(fetch: Any, cursor: Any, worker_ids: Iterable[int]) -> None:
    """A stream begins where the function stands, and goes on from no other stream. Workers that
    were called before have two beginnings from now on, and no position says which one it means."""
    origins = origins_of(fetch, cursor)
    for worker_id in worker_ids:
        if worker_id in origins:
            origins[worker_id] = None


logger = logging.getLogger("feeder")


class IndexCalls:
    """Calls of `fetch(call)`. Never changes; fetcher threads use it."""

    def __init__(self, spec: StreamSpec, places: Placement | None = None) -> None:
        self._fetch = spec.fetch
        self._places = places
        self._first_worker_id, self._num_workers = spec.first_worker_id, spec.num_workers
        self._rows_asked, self._seed = spec.rows_asked, spec.seed

    def put_back(self) -> Iterable[float]:
        """Bring a new fetch function to where the stream goes on, step by step. After each step the
        caller waits for as many seconds as it gives, and may stop. A pure function is called with
        the index to go on at."""
        return ()

    def begin(self, ticket: Ticket) -> Callable[[int], Any]:
        """What makes the call of a number, of those of the ticket in order. It may raise anything,
        StopIteration at the epoch's end."""
        fetch, places, epoch = self._fetch, self._places, ticket.epoch
        first_worker_id, num_workers = self._first_worker_id, self._num_workers
        rows_asked, seed = self._rows_asked, self._seed

        def make(index: int) -> Any:
            # As `StreamSpec.call` does, without a call of Python's for each of its numbers.
            call = Call(index, epoch, first_worker_id + index % num_workers, rows_asked, seed)
            place = None if places is None else places.place(epoch, index)
            if place is None:
                return fetch(call)
            # Written again by a call that is made again: nobody sees the slot before all calls of
            # its batch have returned.
            with writing_to(place, call):
                return fetch(call)

        return make

    def mark(self) -> bytes:
        """The cursor after the last call, as bytes."""
        return b""

    def undo(self) -> None:
        """Put the fetch function back to before a call that raised: to make a pure one again is
        enough."""


class WorkerCalls:
    """Calls of `fetch(worker_id, batch_size)`.

    Owner: the fetcher that has the worker's ticket. `sizes` is shared by all workers; each writes
    its own number, and a sum that is a moment old only delays the error by a call.
    """

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        start: Position,
        partition: int,
        resumed: bool,
        sizes: list[int],
    ) -> None:
        self._spec = spec
        self._run = run
        self._start = start
        self._partition = partition
        self._worker_id = spec.worker_id(partition, 0)
        self._last_mark = start.marks[partition]
        self._resumed = resumed
        self._origins = origins_of(spec.fetch, spec.cursor)
        self._sizes = sizes

    def begin(self, ticket: Ticket) -> Callable[[int], Any]:
        fetch, worker_id, rows = self._spec.fetch, self._worker_id, self._spec.rows_asked
        return lambda number: fetch(worker_id, rows)

    def put_back(self) -> Iterable[float]:
        if not self._spec.seekable:
            return _replay(self._spec, self._start, self._partition)
        origins, worker_id = self._origins, self._worker_id
        is_new = worker_id not in origins
        if is_new:
            origins[worker_id] = self._first_cursor()
        # A position has no cursor of a worker that gave nothing: a new function stands where that
        # worker has to be. One that was called for an earlier stream has to go back.
        if self._last_mark is None and (is_new or not self._resumed):
            # A call that fails has to be put back, also the first one.
            if self._run.retries:
                self.mark()
            return ()
        self._last_mark = self._last_mark or origins[worker_id]
        if self._last_mark is None:
            raise ResumeError(
                f"worker {worker_id} of the fetch function may have been called before, and where "
                "it stood at first is not known: resume with a new function object, and let "
                "cursor(worker_id) work before the first call"
            )
        self._seek()
        return ()

    def _first_cursor(self) -> bytes | None:
        try:
            return self._encode()
        except ConfigError:
            raise  # No position could hold it, and that is better known before the first row.
        except Exception:
            return None  # It is missed only where somebody has to go back there.

    def mark(self) -> bytes:
        self._last_mark = self._encode()
        return self._last_mark

    def undo(self) -> None:
        self._seek()

    def _encode(self) -> bytes:
        assert self._spec.cursor is not None
        cursor = self._spec.cursor(self._worker_id)
        try:
            mark = self._run.encode_cursor(cursor)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"no position can hold the cursor of worker {self._worker_id}: {error}"
            ) from error
        self._check_size(len(mark))
        return mark

    def _check_size(self, num_bytes: int) -> None:
        """Raise `ConfigError` where tokens would become too large: they hold the cursor of each
        worker, and of the one whose rows are left over that before its last call."""
        sizes = self._sizes
        if num_bytes == sizes[self._partition]:
            return
        sizes[self._partition] = num_bytes
        if sum(sizes) + max(sizes) > MAX_BYTES:
            raise ConfigError(
                f"the cursor of worker {self._worker_id} has {num_bytes} bytes; expected that all "
                f"{len(sizes)} workers' have at most {MAX_BYTES} together, the largest counted "
                "twice: a cursor should name a place, not hold data"
            )

    def _seek(self) -> None:
        assert self._last_mark is not None and self._spec.seek is not None
        self._spec.seek(self._worker_id, self._run.decode_cursor(self._last_mark))


PartitionCalls = IndexCalls | WorkerCalls
"""The calls of one partition: of a pure function, which any number of threads make at once, or of
one worker, which one thread at a time makes."""


def make_calls(
    spec: StreamSpec, run: RunSpec, start: Position, *, resumed: bool,
    places: Placement | None = None,
) -> Sequence[PartitionCalls]:  # fmt: skip
    """The calls of each partition of a stream that begins at `start`; if it is `resumed` a stream
    may have been there before. `places` says where calls may write their rows."""
    if spec.pure:
        return [IndexCalls(spec, places)]
    # The bytes of each worker's cursor: a token holds all cursors.
    sizes = [0] * spec.num_workers
    return [
        WorkerCalls(spec, run, start, number, resumed, sizes) for number in range(spec.num_workers)
    ]


def fetch_again(
    spec: StreamSpec, run: RunSpec, call: Call, stats: FetchStats
) -> Generator[float, None, Any]:
    """The chunk of one call of a pure function, out of turn. Before another attempt the caller
    waits for as many seconds as a step gives, and may stop.

    A call that raises is made again as any other call is; `stats` count it for its partition."""
    began, made = time.monotonic(), f"worker {call.worker_id}, call {call.index}"
    number, failures = call.index % len(stats.retries), 0
    while True:
        try:
            chunk = spec.fetch(call)
        except StopIteration:
            raise spec.not_repeatable(
                call.worker_id, call.index, "the epoch ended instead"
            ) from None
        except BaseException as error:
            stats.fail(number, in_words(error))
            is_lost = isinstance(error, CallLost)
            if failures >= run.retries or not isinstance(error, Exception) or is_lost:
                raise FetchError(
                    f"{made}: {told_of(error)}",
                    worker_id=call.worker_id,
                    call=call.index,
                ) from error
            stats.retries[number] += 1
            pause_s = run.retry_backoff_s * 2**failures
            failures += 1
        else:
            if chunk is not None:
                return as_tuple(chunk, spec.names)
            if time.monotonic() - began > run.timeout_s:
                raise FetchTimeout(
                    f"{made}: no chunk for {run.timeout_s} s when it was made again for the "
                    "resume; it gave one before: raise timeout",
                    worker_id=call.worker_id,
                    call=call.index,
                )
            pause_s = FIRST_NONE_PAUSE_S
        yield pause_s


def told_of(error: BaseException) -> str:
    """What a call came to that gave no chunk."""
    # The fetch function has not raised anything where its process is gone.
    if isinstance(error, CallLost):
        return str(error)
    # Such as which sample it was; a traceback has more lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return ", ".join([f"fetch function raised {in_words(error)}", *notes])


def as_tuple(chunk: Any, names: tuple[str, ...]) -> Any:
    """A chunk as a tuple in the order of the input names; left as it is where it cannot be."""
    if isinstance(chunk, (list, tuple)):
        return tuple(chunk)
    if is_table(chunk) and not isinstance(chunk, Mapping):
        chunk = arrow_chunks().to_chunk(chunk)
    if not isinstance(chunk, Mapping):
        return chunk
    if chunk.keys() != set(names):
        columns = list(leaves(chunk))
        # Else two of them would have one name, and what is wrong is told of the chunk as it is.
        if len(dict(columns)) == len(columns):
            chunk = dict(columns)
    return tuple(chunk[name] for name in names) if chunk.keys() == set(names) else chunk


def _replay(spec: StreamSpec, start: Position, partition: int) -> Iterator[float]:
    """Call a new fetch function as often as the old one was called, and discard what it gives.

    Gives the seconds to wait before each call. Calls that gave None do not count. Raises
    `ResumeError` where the rows are not those of then.
    """
    calls, rows, mark = start.calls[partition], start.rows[partition], start.marks[partition]
    ends = start.epoch + (0 if start.live[partition] else 1)
    worker_id, schema = spec.worker_id(partition, 0), Schema(spec.names, spec.axes, ragged=True)
    seen_calls = seen_rows = seen_ends = 0
    seen_mark: bytes | None = None
    shown = time.monotonic()
    while True:
        yield 0.0
        if seen_calls >= calls and seen_ends >= ends:
            break
        try:
            chunk = spec.fetch(worker_id, spec.rows_asked)
        except StopIteration:
            seen_ends += 1
            if seen_ends > ends:
                raise spec.not_repeatable(worker_id, seen_calls, "the epoch ended early") from None
            continue
        if chunk is None:
            yield FIRST_NONE_PAUSE_S
            continue
        arranged = schema.arrange([as_tuple(chunk, spec.names)])
        if arranged.error is not None or seen_calls >= calls:
            raise spec.not_repeatable(worker_id, seen_calls, "another chunk than before")
        seen_mark = chain_marks(seen_mark, seen_calls, arranged.columns, range(1))[0]
        seen_calls += 1
        seen_rows += arranged.rows[0]
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            logger.info("worker %d: replayed %d of %d calls", worker_id, seen_calls, calls)
    if seen_rows != rows or (seen_mark or b"") != (mark or b""):
        what = f"{rows} rows then, {seen_rows} now" if seen_rows != rows else "other rows"
        raise spec.not_repeatable(worker_id, seen_calls, what)
