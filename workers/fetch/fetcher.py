"""What a fetcher thread does with a partition: it calls the user's fetch function."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from feeder.workers.errors import CallLost, ClosedError, FeedError, FetchError, in_words
from feeder.workers.fetch.calls import PartitionCalls, as_tuple, told_of
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.scheduler import Called, CallsReport, Partition, Turn
from feeder.workers.spec import CallNames, RunSpec
from feeder.workers.stats import FetchStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import End, count_bytes
from feeder.workers.stream.digests import OTHER_ROWS, Prints, digest_chunk, hash_chunk
from feeder.workers.tuning import TUNING, Tuning

logger = logging.getLogger("feeder")

_NOTHING = CallsReport()


_Calls = tuple[int, int, int, object]
"""What a loop of calls came to: calls that gave a chunk, rows, and bytes where they had to be
measured; and what came last: `_FULL`, None for "nothing right now", or what the call raised."""

_FULL = object()
"""The chunk list is full, or the merge waits for it."""


class _Laps:
    """How long each partition's calls take, and for how much of it they wait. Owner: the thread
    that makes the calls.

    The thread's own time tells calls that compute from calls that wait. It is read only after what
    may have been a wait: to read it takes as long as a quick call.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._least_s = tuning.waiting_list_s
        self.at = self._read_at = time.monotonic()
        """When the last lap ended."""
        self._computed = time.thread_time()

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and how many of them the thread waited for something."""
        before, self.at = self.at, time.monotonic()
        took = self.at - before
        if took < self._least_s:
            return took, 0.0
        computed = time.thread_time()
        waited = self.at - self._read_at - (computed - self._computed)
        self._read_at, self._computed = self.at, computed
        return took, min(took, waited)


class Fetcher:
    """Runs the calls of a stream's partitions.

    Shared by all fetcher threads. What lies here by partition belongs to the thread that holds the
    partition; the rest never changes, but for the first call, which one thread notes.
    """

    def __init__(
        self,
        names: CallNames,
        run: RunSpec,
        channel: Channel,
        calls: Sequence[PartitionCalls],
        stats: FetchStats,
        tuning: Tuning = TUNING,
    ) -> None:
        self._names = names
        self._spec = spec = names.spec
        self._run = run
        self._channel = channel
        self._calls = calls
        self._stats = stats
        self._tuning = tuning
        self._fresh = [True] * len(calls)
        self._failures = [0] * len(calls)
        self._axis, self._marked = spec.axes[0], spec.seekable
        # The first call of the run, and the digest of its rows, until it has been made again.
        self._first: tuple[Call, int] | None = None
        self._looks_at_first = spec.pure and spec.repeatable and not run.debug
        self.prints: Prints = {}
        """Digests of chunks as they were returned (debug switch), by partition, epoch and call; or
        `OTHER_ROWS`. Fetchers write, the merge takes out."""

    def fill(self, turn: Turn) -> int:
        """Make calls on each partition of a turn until its chunk list is full, and give all back;
        returns how many the next turn may have."""
        laps, num = _Laps(self._tuning), 0
        last = laps.at + self._tuning.turn_s
        while (partition := turn.take_next()) is not None:
            turn.done.append(self._call_partition(partition, laps))
            num += 1
            if laps.at > last or self._channel.cuts_short:
                break  # The others go back as they are.
        self._channel.release(turn)
        took = laps.at - last + self._tuning.turn_s
        return max(1, min(2 * num, int(num * self._tuning.turn_s / max(took, 1e-9))))

    def _call_partition(self, partition: Partition, laps: _Laps) -> Called:
        number, stats = partition.number, self._stats
        calls = self._calls[number]
        try:
            if num_done := calls.begin_epoch(partition.epoch):
                partition.pass_over(num_done)
            if self._fresh[number]:
                self._put_back(partition, calls)
                laps.lap()
        except BaseException as error:
            if self._is_of_the_end(error):
                return Called(partition, _NOTHING)
            stats.fail(number, in_words(error))
            if not isinstance(error, FeedError):
                error = self._failed(partition, partition.next, error)
            return Called(partition, _NOTHING, error)
        # Once known, bytes are counted by rows: the merge may take chunks from under the call.
        first, row_bytes = partition.next, self._channel.row_bytes
        partition.begin_calls(laps.at)
        stats.begin_list(number, laps.at)
        num_calls, rows, num_bytes, outcome = self._call(partition, calls, row_bytes)
        took, waited = laps.lap()
        if row_bytes is not None:
            num_bytes = rows * row_bytes
        report = CallsReport(num_calls, rows, num_bytes, took, waited)
        stats.end_list(number, num_calls, rows, num_bytes, laps.at, took - waited)
        if num_calls:
            self._failures[number] = 0
            partition.note_chunks()
        if outcome is _FULL:
            return Called(partition, report)
        return self._judge(partition, calls, report, first + num_calls, outcome)

    def _put_back(self, partition: Partition, calls: PartitionCalls) -> None:
        """Bring a new fetch function to where the stream goes on."""

        pauses = calls.put_back()

        def steps() -> Generator[float, None, None]:
            for pause_s in pauses:
                # Replayed calls give no chunk: without this the timeout would count them.
                if not pause_s:
                    self._channel.report_progress(partition)
                yield pause_s

        self._channel.run_steps(steps())
        self._fresh[partition.number] = False

    def _call(self, partition: Partition, calls: PartitionCalls, row_bytes: int | None) -> _Calls:
        """Call until the chunk list is full or something else than a chunk comes."""
        # The loop runs once per call, which may take a microsecond: what it needs are locals.
        channel, chunks = self._channel, partition.chunks
        append = chunks.append
        mark = calls.mark if self._marked else None
        note_first = self._note_first if self._looks_at_first else None
        note = self._print if self._run.debug else note_first
        axis, names, first, monotonic = self._axis, self._spec.names, partition.next, time.monotonic
        most_rows, most_calls, most_bytes, grace_s = partition.limits
        most_calls = 1 if calls.one_by_one else most_calls
        next_call = calls.begin_list(partition.limits)
        measure = count_bytes if row_bytes is None else None  # Later the merge may have taken some.
        rows = num_bytes = num_calls = 0
        try:
            while True:
                chunk = next_call()
                if chunk is None:
                    return num_calls, rows, num_bytes, None
                if type(chunk) is not tuple:
                    # Most functions return a list, and small chunks feel each call of a function.
                    chunk = tuple(chunk) if type(chunk) is list else as_tuple(chunk, names)
                cursor = mark() if mark is not None else b""
                if note is not None:
                    note(partition, first + num_calls, chunk)
                # Only counted here. The merge checks chunks, in the order of the stream: checked as
                # they arrive, of two workers that disagree now the one would be blamed, now the
                # other.
                try:
                    rows += chunk[0].shape[axis]
                except (AttributeError, IndexError, TypeError, KeyError):
                    rows += 1
                if measure is not None:
                    num_bytes += measure(chunk)
                    if num_bytes >= most_bytes:
                        most_calls = 0
                num_calls += 1
                append(chunk)
                chunk = None  # The merge may take it meanwhile, and pass it on if nobody has it.
                if mark is not None:
                    partition.marks.append(cursor)
                # Where the merge has taken chunks from under this call, the partition has to be
                # given back, so that they are counted.
                taken = len(chunks) < num_calls
                is_full = rows >= most_rows or num_calls >= most_calls or channel.cuts_short
                since = partition.wanted_since
                if is_full or taken or (since is not None and monotonic() - since > grace_s):
                    return num_calls, rows, num_bytes, _FULL
        except BaseException as error:
            # Also what is no Exception: a fetcher that ended of it would be waited for.
            return num_calls, rows, num_bytes, error

    def _judge(
        self,
        partition: Partition,
        calls: PartitionCalls,
        report: CallsReport,
        call: int,
        outcome: object,
    ) -> Called:
        """How a partition goes on whose last call gave no chunk; `call` is that call's number."""
        if outcome is None:
            self._stats.nothings[partition.number] += 1
            tuning = self._tuning
            put_off_s = partition.back_off(tuning.first_none_pause_s, tuning.last_none_pause_s)
            return Called(partition, report, None, put_off_s)
        if isinstance(outcome, StopIteration):
            return Called(partition, report, self._end(partition, calls, call))
        assert isinstance(outcome, BaseException)
        return self._retry(partition, calls, report, call, outcome)

    def _end(self, partition: Partition, calls: PartitionCalls, call: int) -> End | FetchError:
        if not self._spec.seekable:
            return End(None)
        try:
            return End(calls.mark())
        except BaseException as error:
            return self._failed(partition, call, error)

    def _retry(
        self,
        partition: Partition,
        calls: PartitionCalls,
        report: CallsReport,
        call: int,
        error: BaseException,
    ) -> Called:
        """A call raised: have it made again, or put its error in its place in the stream."""
        if self._is_of_the_end(error):
            return Called(partition, report)
        number = partition.number
        failures = self._failures[number]
        self._stats.fail(number, in_words(error))
        is_lost = isinstance(error, CallLost)
        if failures < self._run.retries and isinstance(error, Exception) and not is_lost:
            self._failures[number] += 1
            partition.note_failure(error)
            self._stats.retries[number] += 1
            # The call may have failed half-way: made again from there, it would skip rows.
            try:
                calls.undo()
            except BaseException as undo_error:
                error = undo_error
            else:
                put_off_s = self._run.retry_backoff_s * 2**failures
                return Called(partition, report, None, put_off_s)
        return Called(partition, report, self._failed(partition, call, error))

    def _is_of_the_end(self, error: BaseException) -> bool:
        """Whether a call in a process was cut off because the stream is over: no fault of its."""
        return isinstance(error, ClosedError) and self._channel.closed

    def _failed(self, partition: Partition, call: int, error: BaseException) -> FetchError:
        worker_id, number = self._names.of_call(partition.number, call)
        failed = FetchError(
            f"worker {worker_id}, call {number}: {told_of(error)}",
            worker_id=worker_id,
            call=number,
        )
        failed.__cause__ = error
        return failed

    def _note_first(self, partition: Partition, call: int, chunk: Any) -> None:
        """Note the rows of the run's first call, before anybody may write into them."""
        if not self._looks_at_first:
            return
        self._looks_at_first = False
        # What is no chunk is told in its place in the stream.
        with contextlib.suppress(Exception):
            _, index = self._names.of_call(partition.number, call)
            self._first = self._spec.call(partition.epoch, index), digest_chunk(chunk)

    def repeat_first(self) -> None:
        """Make the run's first call again, once, and warn where it gives other rows: so does what
        draws from a state that all threads share, and no position of such a feed is exact. It is a
        fetcher's thread that calls, for its calls are what the function has to bear."""
        first, self._first = self._first, None
        if first is None or self._channel.closed:
            return
        call, digest = first
        if not self._repeats(call, digest, digest_chunk):
            logger.warning(
                "worker %d, call %d: the fetch function gave other rows when the call was made "
                "again, so the feed gives other batches in each run and after a resume; draw "
                "from call.rng (sources.samples: from info.rng) and not from random, numpy.random "
                "or torch, whose state all threads share, or read in processes; or say "
                "repeatable=False", call.worker_id, call.index,
            )  # fmt: skip

    def _print(self, partition: Partition, call: int, chunk: Any) -> None:
        printed = hash_chunk(chunk)
        if self._spec.pure and self._spec.repeatable:
            _, index = self._names.of_call(partition.number, call)
            if not self._repeats(self._spec.call(partition.epoch, index), printed, hash_chunk):
                printed = OTHER_ROWS
        # Before the chunk, which the merge may take from under this call.
        self.prints[partition.number, partition.epoch, call] = printed

    def _repeats(self, call: Call, printed: int, digest: Callable[[Any], int]) -> bool:
        """Whether a call that is made again gives the same rows, as far as can be told."""
        try:
            again = self._spec.fetch(call)
            return again is None or digest(as_tuple(again, self._spec.names)) == printed
        except StopIteration:
            return False
        except BaseException:  # Such as an exit: of a call that nobody waits for it means nothing.
            return True
