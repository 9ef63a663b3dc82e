"""What a fetcher thread does with a ticket: it calls the user's fetch function.

A user's function may return, give nothing for now, end its epoch, fail once or for good, or never
come back. Each outcome becomes one word to the queue about the ticket, so that whoever waits for a
call learns of it in one place. A fetcher has no state of its own between two tickets but how many
calls take about half a millisecond: any thread can go on with any ticket that another has given
back, which is how a call that failed, or a pause, holds up nobody.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from feeder.workers.errors import CallLost, ClosedError, FeedError, FetchError, in_words
from feeder.workers.fetch.calls import FIRST_NONE_PAUSE_S, PartitionCalls, as_tuple, told_of
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.tickets import MOST_CALLS, Ticket
from feeder.workers.stats import FetchStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import count_bytes
from feeder.workers.stream.digests import OTHER_ROWS, Prints, digest_chunk, hash_chunk
from feeder.workers.stream.merge import End
from feeder.workers.stream.spec import CallNames, RunSpec

logger = logging.getLogger("feeder")

_TICKET_S = 0.0005
"""A ticket is for as many calls as take about so long."""
# To draw and to wake for each call takes longer than a quick call: 64 workers of 8 KB batches take
# 48 us of CPU a batch one by one, and 19 to 23 so (2026-11-27).

_LAST_NONE_S = 0.25
"""A call that gave None is made again after so long; doubled up to the second."""
# An idle source costs no core, and its next row is late by a quarter of a second at most.

_CPU_READ_S = 0.001
"""The processor time of shorter tickets is taken to be their time: to read it takes as long as a
quick call."""


_DONE = object()
"""The ticket is done, or its other calls are to be made later."""


def _next_of(tickets: deque[Ticket]) -> Ticket | None:
    try:
        return tickets.popleft()
    except IndexError:
        return None  # The others may have been taken back.


class Fetcher:
    """Runs the calls of a stream.

    Shared by all fetcher threads. What lies here by partition belongs to the thread that has the
    partition's ticket; the rest never changes, but for the first call, which one thread notes.
    """

    def __init__(
        self,
        names: CallNames,
        run: RunSpec,
        queue: Queue,
        calls: Sequence[PartitionCalls],
        stats: FetchStats,
        call_again: Callable[[Call], Any],
    ) -> None:
        """`call_again` makes a call of a pure function that was made before."""
        self._call_again = call_again
        self._names = names
        self._spec = spec = names.spec
        self._run = run
        # An interrupt of the user's thread is the user's, and no error of the stream.
        self._is_inline = run.num_threads == 0
        self._queue = queue
        self._calls = calls
        self._stats = stats
        self._is_fresh = [True] * len(calls)
        # The first call of the run, and the digest of its rows, until it has been made again.
        self._first: tuple[Call, int] | None = None
        self._looks_at_first = spec.pure and spec.repeatable and not run.debug
        self.prints: Prints = {}
        """Digests of chunks as they were returned (debug switch), by partition, epoch and call; or
        `OTHER_ROWS`. Fetchers write, the merge takes out."""

    def run(self, thread: int) -> None:
        """Thread body: draw tickets and make their calls, until no call is left."""
        most = 1
        while (tickets := self._queue.draw(most)) is not None:
            began, num, asked = time.monotonic(), 0, 0
            while (ticket := _next_of(tickets)) is not None:
                asked += ticket.num_left
                num += self._make(ticket, thread if self._spec.pure else ticket.partition)
            if self._run.executor is None:
                took = max(time.monotonic() - began, 1e-7)
                enough = int(_TICKET_S * max(1, num) / took)
            else:
                # How long a round trip takes says nothing of the calls. A process that has time for
                # all has time for more.
                enough = num if num < asked else 2 * num
            most = max(1, min(MOST_CALLS, 2 * most, enough))
            # Not before: what came may be all that somebody waits for.
            self.repeat_first()

    def make_some(self, most: int) -> None:
        """Make so many calls at most, in the thread of the user, who waits for them."""
        tickets = self._queue.draw(most) or deque()
        while (ticket := _next_of(tickets)) is not None:
            self._make(ticket, 0 if self._spec.pure else ticket.partition)
        self.repeat_first()

    def _make(self, ticket: Ticket, number: int) -> int:
        """Make the calls of a ticket, and give it back; returns how many gave a chunk. `number` is
        that of its statistics."""
        stats, calls = self._stats, self._calls[ticket.partition]
        try:
            if self._is_fresh[ticket.partition]:
                self._put_back(ticket, calls)
        except BaseException as error:
            self._fail(ticket, ticket.first, number, (0, 0), error)
            return 0
        # Not asked of the ticket later: what came may be taken from it at any moment.
        first = ticket.first
        began, computed = time.monotonic(), time.thread_time()
        stats.begin_list(number, began)
        num_calls, rows, num_bytes, outcome = self._call(ticket, calls)
        now = time.monotonic()
        took = now - began
        computed_s = took if took < _CPU_READ_S else min(took, time.thread_time() - computed)
        stats.end_list(number, num_calls, rows, num_bytes, now, computed_s)
        if num_calls:
            ticket.pause_s, ticket.failures, ticket.failure = 0.0, 0, None
        self._judge(ticket, first + num_calls, calls, number, (rows, num_bytes), outcome)
        return num_calls

    def _put_back(self, ticket: Ticket, calls: PartitionCalls) -> None:
        """Bring a new fetch function to where the stream goes on."""

        pauses = calls.put_back()

        def steps() -> Generator[float, None, None]:
            for pause_s in pauses:
                # Replayed calls give no chunk: without this the timeout would count them.
                if not pause_s:
                    self._queue.report_progress(ticket)
                yield pause_s

        self._queue.run_steps(steps())
        self._is_fresh[ticket.partition] = False

    def _call(self, ticket: Ticket, calls: PartitionCalls) -> tuple[int, int, int, object]:
        """Make calls until the ticket is done or something else than a chunk comes. Returns how
        many gave a chunk, their rows and bytes, and what came last: `_DONE`, None for "nothing
        right now", or what the call raised."""
        # The loop runs once per call, which may take a microsecond: what it needs are locals.
        queue, names, axis = self._queue, self._spec.names, self._spec.axes[0]
        append, marks = ticket.chunks.append, ticket.marks
        mark = calls.mark if self._spec.seekable else None
        note_first = self._note_first if self._looks_at_first else None
        note = self._print if self._run.debug else note_first
        row_bytes = queue.row_bytes
        measure = count_bytes if row_bytes is None else None  # Later the merge may have taken some.
        number, most_rows, most_bytes = ticket.first, ticket.most_rows, ticket.most_bytes
        rows = num_bytes = num_calls = 0
        try:
            call = calls.begin(ticket)
            is_remote = ticket.bundle is not None  # Then a ticket is one round trip.
            while True:
                chunk = call(number)
                if chunk is None:
                    outcome: object = None
                    break
                if type(chunk) is not tuple:
                    chunk = as_tuple(chunk, names)
                if note is not None:
                    note(ticket, number, chunk)
                # Only counted here: the merge checks chunks, in the order of the stream.
                try:
                    rows += chunk[0].shape[axis]
                except (AttributeError, IndexError, TypeError, KeyError):
                    rows += 1
                if measure is not None:
                    num_bytes += measure(chunk)
                    if num_bytes >= most_bytes:
                        most_rows = 0
                cursor = mark() if mark is not None else b""
                number += 1
                num_calls += 1
                append(chunk)
                chunk = None  # It may be taken meanwhile, and passed on if nobody has it.
                if mark is not None:
                    marks.append(cursor)
                is_over = number >= ticket.stop or rows >= most_rows or queue.cuts_short
                # What came along from a process is here, and takes no time.
                if (is_over or is_remote) and not ticket.bundle:
                    outcome = _DONE
                    break
        except BaseException as error:
            # Also what is no Exception: a fetcher that ended of it would be waited for.
            outcome = error
        if row_bytes is not None:
            num_bytes = rows * row_bytes
        return num_calls, rows, num_bytes, outcome

    def _judge(
        self, ticket: Ticket, call: int, calls: PartitionCalls, number: int,
        came: tuple[int, int], outcome: object,
    ) -> None:  # fmt: skip
        """Give a ticket back whose calls gave so many rows and bytes, and the last one, `call`,
        this."""
        if outcome is _DONE:
            self._queue.give_back(ticket, *came)
        elif outcome is None:
            self._stats.nothings[number] += 1
            # Twice as long each time.
            ticket.pause_s = pause_s = min(2 * ticket.pause_s or FIRST_NONE_PAUSE_S, _LAST_NONE_S)
            self._queue.give_back(ticket, *came, put_off_s=pause_s)
        elif isinstance(outcome, StopIteration):
            try:
                ending: End | FeedError = End(calls.mark() if self._spec.seekable else None)
            except BaseException as error:
                ending = self._failed(ticket, call, error)
            self._queue.give_back(ticket, *came, ending=ending)
        else:
            assert isinstance(outcome, BaseException)
            self._retry(ticket, call, calls, number, came, outcome)

    def _retry(
        self, ticket: Ticket, call: int, calls: PartitionCalls, number: int,
        came: tuple[int, int], error: BaseException,
    ) -> None:  # fmt: skip
        """A call raised: have it made again, or put its error in its place in the stream."""
        is_lost = isinstance(error, CallLost) or not isinstance(error, Exception)
        if is_lost or ticket.failures >= self._run.retries or self._is_of_the_end(error):
            self._fail(ticket, call, number, came, error)
            return
        self._stats.fail(number, in_words(error))
        self._stats.retries[number] += 1
        # The call may have failed half-way: made again from there, it would skip rows.
        try:
            calls.undo()
        except BaseException as undo_error:
            ending = self._failed(ticket, call, undo_error)
            self._queue.give_back(ticket, *came, ending=ending)
            return
        pause_s = self._run.retry_backoff_s * 2**ticket.failures
        ticket.failures, ticket.failure = ticket.failures + 1, error
        self._queue.give_back(ticket, *came, put_off_s=pause_s)

    def _fail(
        self, ticket: Ticket, call: int, number: int, came: tuple[int, int], error: BaseException
    ) -> None:
        """An error takes the place of all that the partition could give from here on."""
        if self._is_inline and not isinstance(error, Exception):
            raise error
        if self._is_of_the_end(error):
            self._queue.give_back(ticket, *came)
            return
        self._stats.fail(number, in_words(error))
        # What a function raises as it is put back says so by itself.
        if not (isinstance(error, FeedError) and self._is_fresh[ticket.partition]):
            error = self._failed(ticket, call, error)
        self._queue.give_back(ticket, *came, ending=error)

    def _is_of_the_end(self, error: BaseException) -> bool:
        """Whether a call in a process was cut off because the stream is over: no fault of its."""
        return isinstance(error, ClosedError) and self._queue.closed

    def _failed(self, ticket: Ticket, call: int, error: BaseException) -> FetchError:
        worker_id, call = self._names.of_call(ticket.partition, call)
        failed = FetchError(
            f"worker {worker_id}, call {call}: {told_of(error)}", worker_id=worker_id, call=call
        )
        failed.__cause__ = error
        return failed

    def _note_first(self, ticket: Ticket, number: int, chunk: Any) -> None:
        """Note the rows of the run's first call, before anybody may write into them."""
        if not self._looks_at_first:
            return
        self._looks_at_first = False
        # What is no chunk is told in its place in the stream.
        with contextlib.suppress(Exception):
            self._first = self._spec.call(ticket.epoch, number), digest_chunk(chunk)

    def repeat_first(self) -> None:
        """Make the run's first call again, once, and warn where it gives other rows: so does what
        draws from a state that all threads share, and no position of such a feed is exact. It is a
        fetcher's thread that calls, for its calls are what the function has to bear."""
        first, self._first = self._first, None
        if first is None or self._queue.closed:
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

    def _print(self, ticket: Ticket, number: int, chunk: Any) -> None:
        printed = hash_chunk(chunk)
        if self._spec.pure and self._spec.repeatable:
            call = self._spec.call(ticket.epoch, number)
            if not self._repeats(call, printed, hash_chunk):
                printed = OTHER_ROWS
        # Before the chunk, which the merge may take from under this ticket.
        self.prints[ticket.partition, ticket.epoch, number] = printed

    def _repeats(self, call: Call, printed: int, digest: Callable[[Any], int]) -> bool:
        """Whether a call that is made again gives the same rows, as far as can be told."""
        try:
            again = self._call_again(call)
            return again is None or digest(as_tuple(again, self._spec.names)) == printed
        except StopIteration:
            return False
        except BaseException as error:
            # Such as an exit: of a call that nobody waits for it means nothing.
            if self._is_inline and not isinstance(error, Exception):
                raise
            return True
