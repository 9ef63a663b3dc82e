"""How a fetch function is called, and how it is put back to where it was.

One object per lane, used by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import xxhash

from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import Schema
from feeder.workers.fetch.cursors import MAX_BYTES
from feeder.workers.stream.digests import digest_chunk
from feeder.workers.errors import ConfigError, FetchError, FetchTimeout, ResumeError, in_words
from feeder.workers.fetch.origins import origins_of
from feeder.workers.stream.position import Lanes, Position
from feeder.workers.spec import RunSpec, StreamSpec
from feeder.workers.stats import FetchStats

logger = logging.getLogger("feeder")

_SAMPLED_CALLS = 16
_SAMPLE_EVERY = 256
_PROGRESS_S = 5.0

NONE_BACKOFF_S = 0.001
"""Pause after a fetch function gave None for the first time; doubled for each further time."""


class LaneCalls(Protocol):
    """The calls of one lane."""

    @property
    def one_by_one(self) -> bool:
        """Whether the next calls are not consecutive, so that each is a bundle of its own."""

    def begin(self, epoch: int) -> int:
        """Get ready to be called in `epoch`; returns the number of calls to pass over."""

    def put_back(self, keep_going: Callable[[float], bool]) -> None:
        """Bring a new fetch function to where the stream goes on.

        `keep_going(pause_s)` waits so long and tells whether to go on."""

    @property
    def next_call(self) -> Callable[[], Any]:
        """Calls the fetch function. It may raise anything, StopIteration at the epoch's end."""

    def mark(self) -> bytes:
        """The cursor after the last call, as bytes."""

    def undo(self) -> None:
        """Put the fetch function back to before a call that raised."""


def make_calls(
    spec: StreamSpec, run: RunSpec, lanes: Lanes, start: Position, *, resumed: bool
) -> Sequence[LaneCalls]:
    """The calls of each lane of a stream that begins at `start`; where it is `resumed` a stream may
    have been there before."""
    if spec.pure:
        return [IndexCalls(spec, lanes, start, lane) for lane in range(lanes.num_lanes)]
    # Of each lane the bytes of its cursor: a token holds them all.
    sizes = [0] * lanes.num_lanes
    return [WorkerCalls(spec, run, start, lane, resumed, sizes) for lane in range(lanes.num_lanes)]


class IndexCalls:
    """Calls of `fetch(call)`: every `num_lanes`-th index of the epoch."""

    def __init__(self, spec: StreamSpec, lanes: Lanes, start: Position, lane: int) -> None:
        self._fetch = spec.fetch
        self._spec = spec
        self._lanes = lanes
        self._lane = lane
        self._epoch = start.epoch
        self._number = start.calls[lane]
        self._done = frozenset(start.done)

    @property
    def one_by_one(self) -> bool:
        return bool(self._done)

    def begin(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._number, self._done = epoch, 0, frozenset()
        before = self._number
        while self._done and self._index() in self._done:
            self._number += 1
        return self._number - before

    def put_back(self, keep_going: Callable[[float], bool]) -> None:
        """Nothing: a pure function is called with the index to go on at."""

    def _index(self) -> int:
        return self._lanes.number(self._lane, self._number)

    @property
    def next_call(self) -> Callable[[], Any]:
        return self._call

    def _call(self) -> Any:
        spec, index = self._spec, self._index()
        worker_id = spec.worker_id(self._lane, index)
        call = Call(index, self._epoch, worker_id, spec.batch_size, spec.seed)
        chunk = self._fetch(call)
        if chunk is None:
            return None
        self._number += 1
        return chunk

    def mark(self) -> bytes:
        return b""

    def undo(self) -> None:
        """Nothing: the index is only counted when a chunk came."""


class WorkerCalls:
    """Calls of `fetch(worker_id, batch_size)`."""

    one_by_one = False

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        start: Position,
        lane: int,
        resumed: bool,
        sizes: list[int],
    ) -> None:
        self._spec = spec
        self._run = run
        self._start = start
        self._lane = lane
        self._worker_id = spec.worker_id(lane, 0)
        self._last_mark = start.marks[lane]
        self._resumed = resumed
        self._origins = origins_of(spec.fetch, spec.cursor)
        self._sizes = sizes

    def begin(self, epoch: int) -> int:
        return 0

    def put_back(self, keep_going: Callable[[float], bool]) -> None:
        if not self._spec.seekable:
            _replay(self._spec, self._start, self._lane, keep_going)
            return
        origins, worker_id = self._origins, self._worker_id
        is_new = worker_id not in origins
        if is_new:
            origins[worker_id] = self._first_cursor()
        if self._last_mark is None and (is_new or not self._resumed):
            if self._run.retries:
                self.mark()
            return
        self._last_mark = self._last_mark or origins[worker_id]
        if self._last_mark is None:
            raise ResumeError(
                f"worker {worker_id} of the fetch function may have been called before, and where "
                "it stood at first is not known: resume with a new function object, and let "
                "cursor(worker_id) work before the first call"
            )
        self._seek()

    def _first_cursor(self) -> bytes | None:
        try:
            return self._encode()
        except ConfigError:
            raise  # No position could hold it, and that is better known before the first row.
        except Exception:
            return None  # It is missed only where somebody has to go back there.

    @property
    def next_call(self) -> Callable[[], Any]:
        return partial(self._spec.fetch, self._worker_id, self._spec.batch_size)

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
        if len(mark) != self._sizes[self._lane]:
            self._check_size(len(mark))
        return mark

    def _check_size(self, num_bytes: int) -> None:
        """Raise `ConfigError` where tokens would become too large: they hold the cursor of each
        worker, and of the one whose rows are left over that before its last call."""
        sizes = self._sizes
        sizes[self._lane] = num_bytes
        if sum(sizes) + max(sizes) > MAX_BYTES:
            raise ConfigError(
                f"the cursor of worker {self._worker_id} has {num_bytes} bytes; expected that all "
                f"{len(sizes)} workers' have at most {MAX_BYTES} together, the largest counted "
                "twice: a cursor should name a place, not hold data"
            )

    def _seek(self) -> None:
        assert self._last_mark is not None and self._spec.seek is not None
        self._spec.seek(self._worker_id, self._run.decode_cursor(self._last_mark))


def fetch_again(
    spec: StreamSpec, run: RunSpec, call: Call, stats: FetchStats, pause: Callable[[float], bool]
) -> Any:
    """The chunk of one call of a pure function, out of turn; None where the stream is over.

    A call that raises is made again as any other call is; `stats` count it for its lane."""
    began, made = time.monotonic(), f"worker {call.worker_id}, call {call.index}"
    lane, failures = call.index % len(stats.retries), 0
    while True:
        try:
            chunk = spec.fetch(call)
        except StopIteration:
            raise not_repeatable(call.worker_id, call.index, "the epoch ended instead") from None
        except BaseException as error:
            stats.fail(lane, in_words(error))
            if failures >= run.retries or not isinstance(error, Exception):
                raise FetchError(
                    f"{made}: fetch function raised {in_words(error)}",
                    worker_id=call.worker_id,
                    call=call.index,
                ) from error
            stats.retries[lane] += 1
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
            pause_s = NONE_BACKOFF_S
        if not pause(pause_s):
            return None


def as_tuple(chunk: Any, names: tuple[str, ...]) -> Any:
    """A chunk as a tuple in the order of the input names; left as it is where it cannot be."""
    if isinstance(chunk, (list, tuple)):
        return tuple(chunk)
    if isinstance(chunk, Mapping) and chunk.keys() == set(names):
        return tuple(chunk[name] for name in names)
    return chunk


def chain_marks(
    mark: bytes | None, first: int, num: int, arrays_of: Callable[[int], tuple[Any, ...]]
) -> list[bytes]:
    """The running digests of a worker after each of `num` calls, the first of them `first`.

    Of the first calls every one is sampled, later every 256th, so that the cost of a one-row
    chunk is not the digest. Replay compares them; rows are counted beside them for every call.
    """
    marks: list[bytes] = []
    current = mark or b""
    i = 0
    while i < num:
        number = first + i
        if number < _SAMPLED_CALLS or number % _SAMPLE_EVERY == 0:
            current = _chain(current, number, arrays_of(i))
            marks.append(current)
            i += 1
        else:
            gap = min(num - i, _SAMPLE_EVERY - number % _SAMPLE_EVERY)
            marks.extend([current] * gap)
            i += gap
    return marks


def _chain(mark: bytes, number: int, arrays: tuple[Any, ...]) -> bytes:
    words = (number.to_bytes(8, "little"), digest_chunk(arrays).to_bytes(8, "little"))
    return xxhash.xxh3_64_digest(b"".join((mark, *words)))


def _replay(
    spec: StreamSpec, start: Position, lane: int, keep_going: Callable[[float], bool]
) -> None:
    """Call a new fetch function as often as the old one was called, and discard what it gives.

    Calls that gave None do not count. Raises `ResumeError` where the rows are not those of then.
    """
    calls, rows, mark = start.calls[lane], start.rows[lane], start.marks[lane]
    ends = start.epoch + (0 if start.live[lane] else 1)
    worker_id, schema = spec.worker_id(lane, 0), Schema(spec.names, spec.axes, ragged=True)
    seen_calls = seen_rows = seen_ends = 0
    seen_mark: bytes | None = None
    shown = time.monotonic()
    while keep_going(0.0) and (seen_calls < calls or seen_ends < ends):
        try:
            chunk = spec.fetch(worker_id, spec.batch_size)
        except StopIteration:
            seen_ends += 1
            if seen_ends > ends:
                raise not_repeatable(worker_id, seen_calls, "the epoch ended early") from None
            continue
        if chunk is None:
            keep_going(NONE_BACKOFF_S)
            continue
        arranged = schema.arrange([as_tuple(chunk, spec.names)])
        if arranged.error is not None or seen_calls >= calls:
            raise not_repeatable(worker_id, seen_calls, "another chunk than before")
        arrays = tuple(column[0] for column in arranged.columns)
        seen_mark = chain_marks(seen_mark, seen_calls, 1, lambda _, arrays=arrays: arrays)[0]  # type: ignore[misc]
        seen_calls += 1
        seen_rows += arranged.rows[0]
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            logger.info("worker %d: replayed %d of %d calls", worker_id, seen_calls, calls)
    if keep_going(0.0) and (seen_rows != rows or (seen_mark or b"") != (mark or b"")):
        what = f"{rows} rows then, {seen_rows} now" if seen_rows != rows else "other rows"
        raise not_repeatable(worker_id, seen_calls, what)


def not_repeatable(worker_id: int, call: int, what: str) -> ResumeError:
    """The error of a fetch function that gives something else than it gave before."""
    return ResumeError(
        f"fetch function is not deterministic: worker {worker_id}, call {call}: {what}; resume "
        "from a snapshot, which holds the rows left over, give the function cursor(worker_id) and "
        "seek(worker_id, cursor), or make it repeat itself"
    )
