"""The bounded queue: one lock, and everything that fetchers, the enqueuer and the user share.

Fetchers draw tickets here, and give them back with what their calls gave. The enqueuer takes all
that came at once, whatever its order: what comes first follows from numbers, and the merge knows
them. So the queue is a list that is taken as a whole, and nobody searches it. It is bounded in
calls, rows and bytes, counted until the user has them: the user's thread makes room here as well.

To wake a thread costs more than a quick call. So whoever waits for a call is woken when nothing
else can come, as no other call is under way or the bound is reached, or after a grace for what came
by then; and only if the call takes longer than that, as soon as it returns.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from feeder.workers.errors import ClosedError, FeedError, FetchTimeout, in_words
from feeder.workers.fetch.bound import Bound, Held
from feeder.workers.fetch.threads import Wakes, stack, under_lock
from feeder.workers.fetch.tickets import IndexTickets, Ticket, Tickets
from feeder.workers.stats import Stopwatch, StreamStats
from feeder.workers.stream.chunks import count_bytes
from feeder.workers.stream.merge import Came, End
from feeder.workers.stream.spec import CallNames

_T = TypeVar("_T")

_GRACE_S = 0.0005
"""So long the enqueuer waits for a call and for what comes beside it, while calls are under way."""
# Told of each chunk at once, chunks of one row are merged one by one: thirty times slower
# (2026-11-24). 8 KB batches from eight threads, whose calls sleep for a millisecond, take 97 us of
# CPU if each ticket is told of, and 58 us so (2026-11-28).

_SLOW_LOOK_S = 10.0
"""So often a wait for chunks looks at what it waits for, if nothing wakes it."""
# Every chunk and every close wakes it, and the timeout has a deadline of its own. So this only
# bounds what a lost wake-up would cost.

_MOST_CALLS = 4096
"""So many calls may have come and not be merged. Chunks without rows count in no other bound."""

_AHEAD_BYTES = 8 * 1024 * 1024
"""While the enqueuer is busy, no call is made once so many bytes have come."""
# Above it rows have left every cache before they are copied: 4.3 MB chunks came two to three times
# slower (2026-11-21).

_QUICK_CALLS = 8
"""Of calls of which so many are on a ticket one thread makes all."""
# Beside each other, threads would wait for the interpreter and for the queue.

_NUM_AHEAD = 16
"""For so many batches more than calls under way fill slots are taken ahead, if these are small."""
# With 4 a fetcher was woken for each 8 KB or 1 MB batch: 41 us of CPU in process and 74 served, in
# place of 26 and 47 (2026-11-29).

_AHEAD_SLOT_BYTES = 16 * 1024 * 1024


class User(Protocol):
    """Somebody who may be waiting for a batch."""

    @property
    def waited_since(self) -> float | None:
        """Since when (monotonic clock); None while not."""


class Queue:
    """The calls of a stream between those who make them, the enqueuer, and the user.

    Any thread may call any method; one thread at a time collects. Nobody calls user code while
    holding the lock.
    """

    def __init__(
        self,
        tickets: Tickets,
        bound: Bound,
        stats: StreamStats,
        names: CallNames,
        users: Sequence[User],
        *,
        num_threads: int,
        timeout_s: float,
        epochs: int | None,
        waits: bool = False,
        stack_of: Callable[[int | None], str] = stack,
    ) -> None:
        """`waits`: calls are made in processes, and threads wait for them. `stack_of` tells the
        stack of the call that a thread is in."""
        # Who waits for a process takes no core, and no cache, from anybody.
        self._waits = waits
        self._tickets, self._bound, self._stats, self._names = tickets, bound, stats, names
        self._users, self._epochs = users, epochs
        self._num_threads = max(1, num_threads)  # without threads the user's makes the calls
        self._timeout_s, self._stack_of = timeout_s, stack_of
        self._lock = threading.RLock()
        # What came and was not collected; and how many calls the merge has that it cannot use yet.
        self._came: list[Came] = []
        self._num_came = self._came_bytes = self._num_held = 0
        self._is_marked, self._axis = names.spec.seekable, names.spec.axes[0]
        # The threads that have tickets, those of each that it has not begun, and whether the calls
        # are quick.
        self._calling: dict[int, deque[Ticket]] = {}
        self._is_quick = False
        # Fetchers wait here for a call that may be made; the first goes on by itself at some time,
        # to make one that was put off. One at a time is woken, and wakes the next if it finds one.
        self._wakes = Wakes()
        self._num_idle, self._wakes_at, self._is_coming = 0, math.inf, False
        # The enqueuer waits here for the call that it wants, by partition and number, None for any,
        # and whether it came.
        self._arrived = threading.Condition(self._lock)
        self._is_awaited = self._is_there = False
        self._wanted: tuple[int, int] | None = None
        # Since when it has waited without a row having come.
        self._hungry_since: float | None = None
        # It waits here for room to copy a batch.
        self._room = threading.Condition(self._lock)
        # Threads that let time pass, or wait for a call that is made apart, wait here, so that the
        # end of the stream wakes them.
        self._closing = threading.Condition(self._lock)
        self.closed = False
        """Whether the stream is over."""
        self.cuts_short = False
        """Whether tickets end with the call that is being made: the stream is over, or somebody
        waits for it. Fetchers read it without the lock between two calls."""

    # ---- the fetchers' side

    def draw(self, most: int) -> deque[Ticket] | None:
        """Wait for calls that may be made, at most so many; None when no call is left. Whoever has
        drawn tickets takes them from the left one by one: those that it has not begun may be taken
        from it at any moment, all of them."""
        ident, waits, until = threading.get_ident(), False, math.inf
        while True:
            with self._lock:
                now = time.monotonic()
                self._calling.pop(ident, None)
                if waits:
                    self._num_idle -= 1
                    self._is_coming = False
                    # Whoever else waits with an end wakes by itself; to wake one more does no harm.
                    if until == self._wakes_at:
                        self._wakes_at = math.inf
                    self._stats.idle.change(-1, now)
                self._tickets.end_pauses(now)
                self._begin_epoch()
                if self.closed or self._is_over:
                    self._wake_all_fetchers()
                    return None
                # If somebody waits, what lay behind a call that lasts would wait for the next look,
                # which comes late.
                num_calls = 1 if self.cuts_short and not self._waits else most
                is_quick = num_calls >= _QUICK_CALLS and not self._waits
                # One thread that makes all calls has all room; others share what is left. With a
                # share for each, 8 KB batches had 7 calls a ticket, of 8 threads 4 (2026-11-28).
                num_calling = len(self._calling)
                num = 1 if is_quick and not num_calling else self._num_threads - num_calling
                left_rows, left_bytes = self._bound.left(num_calling, self._num_calls)
                most_rows, most_bytes = left_rows // num, left_bytes // num
                num_calls = max(1, min(num_calls, self._bound.calls_in(most_rows, most_bytes)))
                if tickets := deque(self._draw(num_calls)):
                    most_rows, most_bytes = most_rows // len(tickets), most_bytes // len(tickets)
                    most_rows = self._bound.rows_in(most_rows, most_bytes)
                    for ticket in tickets:
                        ticket.ident, ticket.called_at = ident, now
                        ticket.most_rows, ticket.most_bytes = most_rows, most_bytes
                        if ticket.since is None:
                            ticket.since = now
                    self._calling[ident] = tickets
                    self._is_quick = is_quick
                    self._wake_fetcher()
                    return tickets
                until = self._tickets.due
                self._wakes_at = min(self._wakes_at, until)
                self._num_idle += 1
                self._stats.idle.change(1, now)
                waits = True
            self._wakes.wait(until - now)

    @property
    def _is_over(self) -> bool:
        return self._epochs is not None and self._tickets.epoch >= self._epochs

    def _draw(self, most: int) -> list[Ticket]:
        if self._has_room:
            return self._tickets.draw(most)
        if not self._may_go_above:
            return []
        if self._wanted is None:
            return self._tickets.draw(1)
        return self._tickets.draw_call(*self._wanted)

    @property
    def _has_room(self) -> bool:
        """Whether calls may be made for the sake of batches to come."""
        if self._num_came + self._num_held >= _MOST_CALLS:
            return False
        is_busy = not (self._is_awaited or self._waits)
        is_far = self._came_bytes >= _AHEAD_BYTES and is_busy
        return not is_far and self._bound.has_room(len(self._calling), self._num_calls)

    @property
    def _num_calls(self) -> int:
        """Calls that threads have and that were not counted yet."""
        return sum([ticket.num_left for ticket in self._tickets.running])

    @property
    def _may_go_above(self) -> bool:
        """Whether the call that the merge waits for may be made above the bound, since nothing
        would ever move otherwise. Of several that it waits for any will do: one at a time."""
        is_one = self._wanted is not None or not self._calling
        return self._is_awaited and not self._is_there and self._bound.starving and is_one

    def give_back(
        self, ticket: Ticket, rows: int = 0, num_bytes: int = 0, *,
        ending: End | FeedError | None = None, put_off_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A ticket's calls have given so much. The call after them has ended the epoch or failed
        for good; otherwise what is left of the ticket is to be made later, not before so many
        seconds have passed."""
        with self._lock:
            now = time.monotonic()
            # Chunks without rows may come for ever: they end no silence.
            if rows:
                ticket.since = self._hungry_since = None
            counted_rows, counted_bytes = ticket.counted
            ticket.counted = 0, 0
            self._take(ticket, ending, rows - counted_rows, num_bytes - counted_bytes)
            # What came may be larger than all before.
            if (behind := self._calling.get(ticket.ident or 0)) and not self._bound.has_room():
                self._give_back_all(behind)
            if ending is not None:
                self._tickets.close(ticket, ended=isinstance(ending, End))
            else:
                self._tickets.put_back(ticket, now + put_off_s if put_off_s else 0.0)
            self._begin_epoch()
            if self._is_there and not self._may_bring_more:
                self._arrived.notify()

    @property
    def _may_bring_more(self) -> bool:
        """Whether the rest of the grace may bring more calls, which are then taken together: if
        some are under way, and the bound lets others come."""
        return not self.cuts_short and bool(self._tickets.running) and self._has_room

    def _begin_epoch(self) -> None:
        """Begin the next epoch if this one is done with. The last ticket of an epoch may be one
        beyond its end, which goes wherever it comes back."""
        if self._tickets.begin_epoch():
            # All may call now, and at the end of the stream all go home.
            self._is_there = self._is_awaited
            self._wake_all_fetchers()
            self._arrived.notify()

    def _take(
        self, ticket: Ticket, ending: End | FeedError | None, rows: int, num_bytes: int,
        count: int | None = None,
    ) -> int:  # fmt: skip
        """Take what a ticket's calls have given, or so many of it; returns how many did."""
        first, chunks, marks = ticket.take(marked=self._is_marked, count=count)
        if self.closed:
            # Nobody collects any more, and rows that are kept would outlive the feed.
            return 0
        if chunks or ending is not None:
            self._came.append((ticket.partition, ticket.epoch, first, chunks, marks, ending))
            self._num_came += len(chunks) + 1
            self._came_bytes += num_bytes
            if self._is_awaited and not self._is_there:
                wanted, stop = self._wanted, first + len(chunks) + (ending is not None)
                self._is_there = wanted is None or (
                    wanted[0] == ticket.partition and first <= wanted[1] < stop
                )
        self._bound.add_chunks(len(chunks), rows, num_bytes)
        return len(chunks)

    def pause(self, seconds: float) -> bool:
        """Let time pass; returns at once, with False, when the stream is over."""
        if not seconds:
            return not self.closed
        with self._lock:
            return not self._closing.wait_for(lambda: self.closed, seconds)

    def wait_for(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Wait for what another thread gets and tells of; whether it is there. Returns at once when
        the stream is over."""
        with self._lock:
            self._closing.wait_for(lambda: self.closed or is_there(), seconds)
            return is_there()

    def tell(self) -> None:
        """Something is there that another thread may wait for."""
        with self._lock:
            self._closing.notify_all()

    def run_steps(self, steps: Generator[float, None, _T]) -> _T | None:
        """Take steps, each of which says how long to wait after it; returns what they come to, None
        if the stream is over before."""
        try:
            while self.pause(next(steps)):
                pass
        except StopIteration as end:
            value: _T = end.value
            return value
        return None

    def report_progress(self, ticket: Ticket) -> None:
        """A fetcher that gives no chunk yet is busy with the ticket."""
        with self._lock:
            ticket.since = time.monotonic()

    # ---- the enqueuer's side

    def collect(self, wanted: tuple[int, int] | None, num_held: int) -> list[Came]:
        """All that came, once something did; if nothing has, once the wanted call did (None: any).
        `num_held`: calls that came before and cannot be merged yet.

        Raises `FetchTimeout` if that has given nothing for the feed's timeout, and `ClosedError` if
        the stream is over.
        """
        with self._lock:
            self._want(wanted, num_held)
            if self._came:
                # Chunks without rows may come for ever.
                if self._hungry_since is not None:
                    self._check(time.monotonic())
            else:
                self._wait_while_held_back()
                if not self._came:
                    self._wait()
            if self.closed:
                raise ClosedError("the feed is stopped")
            found, self._came, self._num_came, self._came_bytes = self._came, [], 0, 0
            self._wake_fetcher()
            return found

    def _want(self, wanted: tuple[int, int] | None, num_held: int) -> None:
        self._num_held, self._wanted = num_held, wanted
        if wanted is not None:
            share = self._bound.max_rows // len(self._stats.partitions)
            ahead = 1 + max(1, share // max(1, self._bound.call_rows))
            self._tickets.come_to(*wanted, ahead)

    def has_come(self, wanted: tuple[int, int] | None, num_held: int) -> bool:
        """For who makes the calls and collects, in one thread: whether `collect` would not wait.
        Otherwise the next call drawn is for what is wanted. Raises `FetchTimeout`, as `collect`."""
        with self._lock:
            self._is_awaited, self._is_there = not (self._came or self.closed), False
            if self._is_awaited:
                self._want(wanted, num_held)
                now = time.monotonic()
                if self._hungry_since is None:
                    self._hungry_since = now
                self._check(now)
            return not self._is_awaited

    def wait_for_calls(self, epoch: int) -> None:
        """Wait until all calls of an epoch have returned; raises what `collect` raises."""
        with self._lock:
            self._wanted = None
            while self._tickets.epoch <= epoch and not self.closed:
                self._wait()
            if self.closed:
                raise ClosedError("the feed is stopped")

    def _wait_while_held_back(self) -> None:
        """Wait for room if nothing comes because no call may be made, for the bound. As a wait for
        chunks it would be blamed on the calls."""
        if not (self._bound.has_room() or self._bound.starving or self._suspects()):
            self._wait_for_room()

    def _suspects(self) -> list[Ticket]:
        """The tickets of calls that the merge waits for, begun or put off."""
        begun, wanted = self._tickets.begun, self._wanted
        if wanted is None:
            return begun
        return [one for one in begun if (one.partition, one.first) == wanted]

    def _wait(self) -> None:
        """Wait for what is wanted, in the enqueuer's thread."""
        now = time.monotonic()
        if self._hungry_since is None:
            self._hungry_since = now
        clocks = self._clocks()
        for clock in clocks:
            clock.start(now)
        self._is_awaited, seconds = True, _GRACE_S
        self._wake_fetcher()
        try:
            while not (self._is_there or self.closed):
                if not (self._arrived.wait(seconds) or self._is_there or self._look()):
                    seconds = self._check(time.monotonic())
        finally:
            self._is_awaited = self._is_there = False
            self.cuts_short = self.closed
            now = time.monotonic()
            for clock in clocks:
                clock.stop(now)

    def _look(self) -> bool:
        """Look after calls that take long; whether what is wanted came before them."""
        self.cuts_short, self._is_quick = True, False
        # Rows that exist are not held back by the call after them, nor calls by one that does not
        # return.
        for tickets in self._calling.values():
            self._give_back_all(tickets)
        self._tickets.cut_short()
        for ticket in list(self._tickets.running):
            # What comes from here on is not taken: it was not counted.
            count = ticket.count(marked=self._is_marked)
            rows = sum(map(self._count_rows, ticket.chunks[:count]))
            row_bytes = self._bound.row_bytes
            num_bytes = (
                sum(map(count_bytes, ticket.chunks[:count]))
                if row_bytes is None else rows * row_bytes
            )  # fmt: skip
            if count and self._take(ticket, None, rows, num_bytes, count):
                ticket.counted = ticket.counted[0] + rows, ticket.counted[1] + num_bytes
                if rows:
                    ticket.since, self._hungry_since = time.monotonic(), None
        self._begin_epoch()
        self._wake_fetcher()
        return self._is_there

    def _give_back_all(self, tickets: deque[Ticket]) -> None:
        """Give back the tickets that a thread has not begun."""
        while True:
            try:
                ticket = tickets.pop()
            except IndexError:
                return  # Its thread may be faster.
            # It was not called: nobody has waited for it.
            if ticket.since == ticket.called_at:
                ticket.since = None
            self._tickets.put_back(ticket)

    def _count_rows(self, chunk: Any) -> int:
        """The rows of a chunk; 1 of what is none, as the merge will say."""
        try:
            rows: int = chunk[0].shape[self._axis]
        except (AttributeError, IndexError, TypeError, KeyError):
            return 1
        return rows

    def _clocks(self) -> list[Stopwatch]:
        """What counts a wait: as one for a worker's call as well if it is that alone."""
        stats = self._stats
        if self._wanted is None or isinstance(self._tickets, IndexTickets):
            return [stats.chunks]
        return [stats.chunks, stats.partitions[self._wanted[0]]]

    # ---- the timeout: it counts from when a user began to wait, the last row came, or the call was
    # made, whichever was last: a slow call behind a full buffer is no fault

    def _check(self, now: float) -> float:
        """Seconds to wait on for what is wanted; raises `FetchTimeout` if there are none left."""
        waits = [user.waited_since for user in self._users]
        waited_since = min((since for since in waits if since is not None), default=None)
        suspects = self._suspects()
        is_full = not (suspects or self._bound.has_room() or self._bound.starving)
        if waited_since is None or is_full:
            # Nobody waits, or what is missing is the user, who takes no batch. Four looks within
            # the timeout.
            return min(_SLOW_LOOK_S, self._timeout_s / 4)
        suspects = suspects or list(self._tickets.running)
        last = max(suspects, key=lambda ticket: ticket.since or 0.0, default=None)
        silent_since = (last.since or 0.0) if last is not None else 0.0
        since = max(waited_since, self._hungry_since or 0.0, silent_since)
        if now - since >= self._timeout_s:
            raise self._timeout(last, now)
        return min(_SLOW_LOOK_S, since + self._timeout_s - now)

    def _timeout(self, ticket: Ticket | None, now: float) -> FetchTimeout:
        at = self._wanted or (0, 0) if ticket is None else (ticket.partition, ticket.first)
        worker_id, call = self._names.of_call(*at)
        failure = None if ticket is None else ticket.failure
        why = f"; its last call raised {in_words(failure)}" if failure else ""
        cure = "raise timeout, or end the epoch with StopIteration"
        is_running = ticket is not None and ticket.ident is not None
        # Otherwise calls return, and give nothing.
        if ticket is not None and is_running:
            lasted = now - max(ticket.called_at, ticket.since or 0.0)
            if lasted > self._timeout_s / 2:
                why += f"; the call was made {lasted:.1f} s ago and has not returned"
                cure = "see in its stack what it waits for, or raise timeout"
        error = FetchTimeout(
            f"worker {worker_id}, call {call}: no chunk for {self._timeout_s} s{why}; {cure}",
            worker_id=worker_id,
            call=call,
        )
        error.__cause__ = failure
        if ticket is not None and is_running:
            told = self._stack_of(ticket.ident)
            error.add_note(f"the call has not returned:\n{told}")
        return error

    # ---- the bound

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row, once they are known and if all rows have as many; read without the lock,
        since they are learnt once."""
        return self._bound.row_bytes

    def learn(self, row_bytes: int) -> None:
        """All rows of the stream have so many bytes."""
        with self._lock:
            self._bound.row_bytes = row_bytes

    def batches_ahead(self, batch_rows: int, calls_per_batch: int) -> int:
        """For how many batches slots are taken before their calls are made: as many as all fetchers
        together fill at a time, some more if they are small, and no more than there is room for."""
        with self._lock:
            bound = self._bound
            batch_bytes = max(1, batch_rows * (bound.row_bytes or 0))
            most = min(bound.max_rows // batch_rows, bound.max_bytes // batch_bytes)
            more = min(_NUM_AHEAD, _AHEAD_SLOT_BYTES // batch_bytes)
            wanted = 1 + -(-self._num_threads // calls_per_batch) + more
            return max(1, min(wanted, most - sum(bound.waiting.values())))

    def allow(self, allowed: tuple[int, int] | None) -> None:
        """Let fetchers make those calls that have a place to write to: all of an epoch before this
        one; None if any may be made."""
        with self._lock:
            assert isinstance(self._tickets, IndexTickets)
            self._tickets.allowed = allowed
            self._wake_fetcher()

    def count(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes into the buffers (or, if negative, out of them)."""
        if rows or num_bytes or kept_rows:
            with self._lock:
                self._bound.add(rows, num_bytes, kept_rows)
                self._make_use_of_room()

    def queue(self, device: int, batches: int) -> None:
        """Count batches into a device queue."""
        with self._lock:
            self._bound.waiting[device] += batches
            self._stats.queued[device] += batches

    @under_lock
    def hand_out(self, device: int, held: Held) -> None:
        """Batches of a device have been handed out: they are buffered no longer. Harmless when
        said again, as if an interrupt came before all had been woken."""
        self._bound.hand_out(device, held)
        self._make_use_of_room()

    def _make_use_of_room(self) -> None:
        self._wake_fetcher()
        if self._bound.has_room() or self._bound.starving:
            # All: the user's thread may have been interrupted here, and one that it had woken be
            # listed still, who would be woken alone. Nobody waits but the enqueuer.
            self._room.notify_all()

    def wait_for_room(self) -> None:
        """Wait until a batch may be copied: that adds to what is buffered while chunks are kept."""
        # Without the lock: nearly always there is room, and a batch above the bound does no harm.
        if not self._bound.has_room():
            with self._lock:
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        # The starving device's batch goes above the bound: nothing would ever move otherwise.
        room = self._stats.room
        room.start(time.monotonic())
        while not (self.closed or self._bound.has_room() or self._bound.starving):
            self._room.wait()
        room.stop(time.monotonic())

    @under_lock
    def close(self) -> None:
        """End the stream: whoever waits here is woken, and no call is made any more."""
        self.closed = self.cuts_short = True
        # Nobody collects any more, and rows that are kept would outlive the feed.
        self._came.clear()
        for tickets in self._calling.values():
            self._give_back_all(tickets)
        self._wake_all_fetchers()
        for condition in (self._arrived, self._room, self._closing):
            condition.notify_all()

    def _wake_fetcher(self) -> None:
        """Wake a fetcher that waits, if there is a call for it, or will be before one goes on by
        itself: who put it off may be in a call that does not return."""
        if not self._num_idle or self._is_coming or (self._is_quick and self._calling):
            return
        tickets = self._tickets
        is_soon = tickets.due < self._wakes_at
        if is_soon or (tickets.is_ready and (self._has_room or self._may_go_above)):
            # In this order: after an interrupt between the two nobody would be woken again.
            self._wakes.wake()
            self._is_coming = True

    def _wake_all_fetchers(self) -> None:
        # Each wakes the next: if it finds a call, and at the end.
        if self._num_idle:
            self._wakes.wake()
