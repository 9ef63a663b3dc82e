"""The threads that call the fetch function, and at times make the batches as well."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from feeder.workers.errors import FeedError, FetchError, in_words
from feeder.workers.fetch.calls import NONE_BACKOFF_S, PartitionCalls, as_tuple
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.policy import GRACE_S, Pace, Trials
from feeder.workers.fetch.scheduler import BufferBudget, End, Partition
from feeder.workers.spec import RunSpec, StreamSpec
from feeder.workers.stats import FetchStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import count_bytes
from feeder.workers.stream.copying import DROP_GIL_BYTES, is_unshared
from feeder.workers.stream.digests import OTHER_ROWS, Prints, digest_chunk, hash_chunk

logger = logging.getLogger("feeder")

_MAX_NONE_BACKOFF_S = 0.25
# Of more chunks than these the first have left the caches when they are merged. A chunk without
# rows counts as one with a row.
_MOST_CALLS = 512
# Smaller, and threads wake each other more than they work: 64 kB and 8 batches gave half the 8 KB
# batches per second, 8 MiB nine tenths of a server's 1 MB batches; 32 MiB and 128 gave no more.
_BUNDLE_BYTES = 16 * 1024 * 1024
_BUNDLE_BATCHES = 64
# Of quick calls one thread makes the bundles of all workers in turn, and then copies them: from its
# caches, if they are not more than these in all; but some batches each, to have fewer turns.
_QUICK_BYTES = 8 * 1024 * 1024
_QUICK_BATCHES, _MOST_QUICK_BYTES = 6, 12 * 1024 * 1024
# Larger batches are fetched in parts of this, else they have left the caches when they are merged.
_PART_BYTES = 4 * 1024 * 1024
# What comes faster is about as fast as it can be merged: a thread copies 10 to 30 GB/s.
_FLOOD_BYTES_PER_S = 10e9
_LEAST_WAIT_S = 0.001
# Beside longer calls it is nothing to wake the enqueuer.
_LEADING_CALL_S = 0.005


class Fetcher:
    """Runs the calls of a stream's partitions; what fetcher threads share."""

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        channel: Channel,
        ledger: BufferBudget,
        calls: Sequence[PartitionCalls],
        stats: FetchStats,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._run = run
        self._channel = channel
        self._calls = calls
        self._stats = stats
        # Of each partition the rows that its bundle may get to.
        self._targets = [0] * len(calls)
        self._fresh = [True] * len(calls)
        self._failures = [0] * len(calls)
        trials = Trials()
        self._paces = [Pace(trials) for _ in calls]
        self._axis = spec.axes[0]
        self.row_bytes: int | None = None
        """Bytes of a row, once all rows are known to have the same number."""
        self.passes = False
        """Whether what was fetched last went to the user as it was, without a copy."""
        # The first call of the run, and the digest of its rows, until it has been made again.
        self._first: tuple[Call, int] | None = None
        self._looks_at_first = spec.pure and spec.repeatable and not run.debug
        self.prints: Prints = {}
        """Digests of chunks as they were returned (debug switch), by partition, epoch and call; or
        `OTHER_ROWS`."""

    def fill(self, partition: Partition) -> bool:
        """Make calls on a partition until a bundle is full, and give the partition back. True where
        the caller is to lead."""
        calls = self._calls[partition.number]
        try:
            partition.next += calls.begin(partition.epoch)
            if self._fresh[partition.number]:
                self._put_back(partition, calls)
        except BaseException as error:
            self._stats.fail(partition.number, in_words(error))
            failed = (
                error
                if isinstance(error, FeedError)
                else self._failed(partition, partition.next, error)
            )
            return self._channel.release(partition, 0, 0, failed)
        first = partition.next
        stats = self._stats
        row_bytes = self.row_bytes
        partition.called_at = began = time.monotonic()
        computed = time.thread_time()
        stats.begin(partition.number, began)
        rows, num_bytes, num_calls, outcome = self._call(partition, calls, row_bytes)
        self._targets[partition.number] = 0
        if row_bytes is not None:
            num_bytes = rows * row_bytes
        ended, computed = time.monotonic(), time.thread_time() - computed
        took = ended - began
        waited = took - computed
        # Less is waited for the interpreter, by calls that compute.
        partition.waits = waited > max(computed, _LEAST_WAIT_S)
        # While larger chunks are copied the interpreter is free, for a fetcher.
        are_small = num_bytes < DROP_GIL_BYTES * max(1, num_calls)
        pace = self._paces[partition.number]
        partition.is_quick = pace.note(num_calls, took, waited, ended) and are_small
        is_fast = num_bytes > took * _FLOOD_BYTES_PER_S
        floods = is_fast and num_calls == 1 and num_bytes >= _PART_BYTES
        # What somebody holds anyway, or gets as it is, is not memory that is written again.
        partition.floods = floods and not self.passes and any(map(is_unshared, partition.chunks))
        # A batch that is passed on is made in less time than it takes to wake another thread. But
        # a partition that waits for something else has to go on waiting: the merge waits for it,
        # too.
        computes = is_fast or waited < computed
        partition.leads = self.passes and computes and took < _LEADING_CALL_S * num_calls
        stats.count(partition.number, num_calls, rows, num_bytes, ended)
        if num_calls:
            self._ledger.note_bundle(num_bytes)
            self._failures[partition.number] = 0
            partition.backoff_s = 0.0
            partition.failure = None
        return self._settle(partition, calls, rows, num_bytes, first + num_calls, outcome)

    def _put_back(self, partition: Partition, calls: PartitionCalls) -> None:
        def keep_going(pause_s: float) -> bool:
            if not pause_s:
                partition.silent_since = time.monotonic()
            return self._channel.pause(pause_s)

        calls.put_back(keep_going)
        self._fresh[partition.number] = False

    def _call(
        self, partition: Partition, calls: PartitionCalls, row_bytes: int | None
    ) -> tuple[int, int, int, object]:
        """Call until the bundle is full or something else comes.

        Returns the rows, their bytes (where `row_bytes` are not known), the calls that gave a
        chunk, and what came: None for "nothing right now", an exception, or `_FULL`."""
        channel, next_call, chunks = self._channel, calls.next_call, partition.chunks
        append = chunks.append
        mark = calls.mark if self._spec.seekable else None
        note = self._print if self._run.debug else None
        if self._looks_at_first:
            note = self._note_first
        axis, names, first, monotonic = self._axis, self._spec.names, partition.next, time.monotonic
        target = self._targets[partition.number] = (
            0 if calls.one_by_one else self._target_rows(partition)
        )
        most_calls = min(target, _MOST_CALLS)
        measure = count_bytes if row_bytes is None else None  # Later the merge may have taken some.
        rows = num_bytes = num_calls = 0
        try:
            while True:
                chunk = next_call()
                if chunk is None:
                    return rows, num_bytes, num_calls, None
                if type(chunk) is not tuple:
                    chunk = tuple(chunk) if type(chunk) is list else as_tuple(chunk, names)
                cursor = mark() if mark is not None else b""
                if note is not None:
                    note(partition, first + num_calls, chunk)
                try:
                    rows += chunk[0].shape[axis]
                except (AttributeError, IndexError, TypeError, KeyError):
                    rows += 1  # Not a chunk; the merge will say so in its place in the stream.
                if measure is not None:
                    num_bytes += measure(chunk)
                    if num_bytes >= _PART_BYTES:
                        most_calls = 0
                num_calls += 1
                append(chunk)
                chunk = None  # The merge may take it meanwhile, and pass it on if nobody has it.
                if mark is not None:
                    partition.marks.append(cursor)
                # Of chunks that are taken already the partition has to be given back, to be
                # counted.
                taken = len(chunks) < num_calls
                if taken or rows >= target or num_calls >= most_calls or channel.closed:
                    return rows, num_bytes, num_calls, _FULL
                since = partition.wanted_since
                if since is None or (partition.is_quick and num_calls & (num_calls - 1)):
                    continue  # Of quick calls the clock is read at the 1st, 2nd, 4th, 8th...
                if monotonic() - since > GRACE_S:
                    return rows, num_bytes, num_calls, _FULL
        except BaseException as error:
            return rows, num_bytes, num_calls, error

    def _settle(
        self,
        partition: Partition,
        calls: PartitionCalls,
        rows: int,
        num_bytes: int,
        call: int,
        outcome: object,
    ) -> bool:
        """Give the partition back with what its calls came to."""
        channel = self._channel
        if outcome is _FULL:
            return channel.release(partition, rows, num_bytes)
        if outcome is None:
            self._stats.nothings[partition.number] += 1
            partition.backoff_s = min(
                2 * partition.backoff_s or NONE_BACKOFF_S, _MAX_NONE_BACKOFF_S
            )
            return channel.release(partition, rows, num_bytes, put_off_s=partition.backoff_s)
        if isinstance(outcome, StopIteration):
            return channel.release(partition, rows, num_bytes, self._end(partition, calls, call))
        assert isinstance(outcome, BaseException)
        return self._retry(partition, calls, rows, num_bytes, call, outcome)

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
        rows: int,
        num_bytes: int,
        call: int,
        error: BaseException,
    ) -> bool:
        failures = self._failures[partition.number]
        self._stats.fail(partition.number, in_words(error))
        if failures < self._run.retries and isinstance(error, Exception):
            self._failures[partition.number] += 1
            partition.failure = error
            self._stats.retries[partition.number] += 1
            try:
                calls.undo()
            except BaseException as undo_error:
                error = undo_error
            else:
                put_off_s = self._run.retry_backoff_s * 2**failures
                return self._channel.release(partition, rows, num_bytes, put_off_s=put_off_s)
        return self._channel.release(
            partition, rows, num_bytes, self._failed(partition, call, error)
        )

    def _failed(self, partition: Partition, call: int, error: BaseException) -> FetchError:
        worker_id, number = self._channel.describe(partition.number, call)
        failed = FetchError(
            f"worker {worker_id}, call {number}: fetch function raised {in_words(error)}",
            worker_id=worker_id,
            call=number,
        )
        failed.__cause__ = error
        return failed

    def _target_rows(self, partition: Partition) -> int:
        """Rows at which a bundle is full: some of a batch where batches are large, several of them
        where they are small and there is room for them beside the bundles that others have begun.
        All together always have half the bound: with smaller bundles threads wake each other more
        than they work."""
        batch, ledger, num_partitions = self._spec.batch_size, self._ledger, len(self._targets)
        if not ledger.has_bytes_for(ledger.num_calling - 1):
            return 1  # This is the one call that somebody waits for, above the bound.
        if self.row_bytes is None:
            return batch
        max_bytes = self._run.max_bytes // 2
        if batch * self.row_bytes > _PART_BYTES:
            return max(1, min(_PART_BYTES, max_bytes // num_partitions) // self.row_bytes)
        batch_bytes = max(1, batch * self.row_bytes)
        most = _BUNDLE_BYTES
        if partition.is_quick:
            some = max(_QUICK_BYTES, _QUICK_BATCHES * batch_bytes * num_partitions)
            most = min(_MOST_QUICK_BYTES, some) // num_partitions
        some = min(most, max_bytes // num_partitions) // batch_bytes
        room = ledger.max_rows - ledger.rows - ledger.kept_rows - sum(self._targets)
        share = max(room, ledger.max_rows // 2)
        return batch * max(1, min(some, _BUNDLE_BATCHES, share // num_partitions // batch))

    def _note_first(self, partition: Partition, call: int, chunk: Any) -> None:
        """Note the rows of the run's first call, before anybody may write into them."""
        if not self._looks_at_first:
            return
        self._looks_at_first = False
        # What is no chunk is told in its place in the stream.
        with contextlib.suppress(Exception):
            _, index = self._channel.describe(partition.number, call)
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
            _, index = self._channel.describe(partition.number, call)
            if not self._repeats(self._spec.call(partition.epoch, index), printed, hash_chunk):
                printed = OTHER_ROWS
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


_FULL = object()


def run_fetcher(
    channel: Channel,
    fill: Callable[[Partition], bool],
    lead: Callable[[], None],
    repeat_first: Callable[[], None],
) -> None:
    """Thread body: hold one partition after the other until no call is left."""
    while (partition := channel.acquire()) is not None:
        if fill(partition):
            lead()
        repeat_first()  # Not before: what came may be all that somebody waits for.
