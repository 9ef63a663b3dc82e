"""Tickets: which calls may be made, in which order they are drawn, and what became of each.

A thread that has nothing to do draws a ticket: some calls of one partition, the earliest that
nobody has. It makes them and comes back with what it could not make: a call that gave nothing or
failed is drawn again, after a pause. So a slow call holds up nothing but what has to come after it,
and to know the order of rows nobody needs to know which thread made a call.

There are two kinds of partitions. The calls of a pure function are numbered through each epoch, and
any number of them may be under way (`IndexTickets`). A worker's calls follow from each other, so
one thread at a time makes them (`WorkerTickets`). In both no call of an epoch is made before all
those of the epoch before have returned: a function that shuffles at an epoch's end would mix rows
of two.

Owner: the queue, which calls every method under its lock. Nothing here waits or looks at a clock.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Any

from feeder.workers.stream.parts import PartCalls
from feeder.workers.stream.position import Position

MOST_CALLS = 512
"""A ticket is for so many calls at most: the first of their chunks is in a cache when it is
read."""


class Ticket:
    """Calls `first`, `first + 1`, ... of a partition, up to and not including `stop`, that one
    thread makes in order.

    Owner: the queue's lock. The thread that has drawn it owns `bundle`, `pause_s` and the failures.
    To `chunks` and `marks` that thread appends without the lock, in an order in which `take` may
    run at any moment. It reads `stop` after each call: `stop` may have been lowered, but not below
    the call that is being made.
    """

    __slots__ = (
        "bundle", "called_at", "chunks", "counted", "epoch", "failure", "failures", "first",
        "ident", "marks", "most_bytes", "most_rows", "partition", "pause_s", "since", "stop",
    )  # fmt: skip

    def __init__(self, partition: int, epoch: int, first: int, stop: int) -> None:
        self.partition = partition
        """0 for a pure function; otherwise the worker, counted from 0."""
        self.epoch = epoch
        self.first = first
        """Number of the first call whose chunk was not taken."""
        self.stop = stop
        self.chunks: list[Any] = []
        """What these have given so far."""
        self.marks: list[bytes] = []
        """The worker's cursors after them, if the feed has cursors."""
        self.counted = (0, 0)
        """Rows and bytes that were taken from under the thread, and are counted already."""
        self.most_rows = self.most_bytes = 0
        """Once its chunks have so much, the other calls go back."""
        self.bundle: Any = None
        """What came from a process with an earlier call and was not taken yet; None before."""
        self.ident: int | None = None
        """The thread that makes them; None while none does."""
        self.called_at = 0.0
        """When that began."""
        self.since: float | None = None
        """Since when the next call has given no rows; None before it was made."""
        self.pause_s = 0.0
        """For how long that was put off last."""
        self.failures = 0
        """How often it has raised."""
        self.failure: BaseException | None = None
        """What it raised last."""

    @property
    def num_left(self) -> int:
        """Calls that were not made."""
        return self.stop - self.first

    def count(self, *, marked: bool) -> int:
        """How many chunks have come and were not taken; of a feed with cursors, with a cursor."""
        # Of a chunk whose cursor is missing still, a position could not be told.
        return min(len(self.chunks), len(self.marks)) if marked else len(self.chunks)

    def take(
        self, *, marked: bool, count: int | None = None
    ) -> tuple[int, list[Any], list[bytes] | None]:
        """The number of the first call whose chunk was not taken, and the chunks from there on, so
        many of those that are there; None for all.

        Safe beside the thread that is appending: it appends the chunk, then the cursor, and to take
        a head off a list is one operation.
        """
        # The length first: what is appended from here on stays.
        if count is None:
            count = self.count(marked=marked)
        first, chunks, marks = self.first, self.chunks[:count], self.marks[:count]
        del self.chunks[:count], self.marks[:count]
        self.first += count
        return first, chunks, marks if marked else None


class Tickets(ABC):
    """The calls of all partitions: those that may be drawn, that threads have, and that are put
    off."""

    def __init__(self, start: Position, num_threads: int) -> None:
        self.epoch = start.epoch
        """The epoch whose calls are made."""
        self.running: set[Ticket] = set()
        """The tickets that threads have."""
        self._num_threads = max(1, num_threads)
        # Those that are put off, the first that is due first.
        self._put_off: list[tuple[float, int, int, Ticket]] = []

    @property
    def due(self) -> float:
        """When the first call that is put off may be made; infinite if there is none."""
        return self._put_off[0][0] if self._put_off else math.inf

    @property
    def begun(self) -> list[Ticket]:
        """The tickets of calls that are being made, or are put off."""
        return [*self.running, *(ticket for *_, ticket in self._put_off)]

    def end_pauses(self, now: float) -> None:
        """Calls that were put off until now may be made."""
        while self._put_off and self._put_off[0][0] <= now:
            self._offer(heappop(self._put_off)[-1])

    def put_back(self, ticket: Ticket, due: float = 0.0) -> None:
        """The calls that are left are drawn again, not before the time `due`."""
        self._let_go(ticket)
        if due:
            heappush(self._put_off, (due, ticket.partition, ticket.first, ticket))
        else:
            self._offer(ticket)

    def _let_go(self, ticket: Ticket) -> None:
        self.running.discard(ticket)
        ticket.ident = None

    @abstractmethod
    def _offer(self, ticket: Ticket) -> None:
        """What is left of a ticket may be drawn."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is a call that may be made now."""

    @abstractmethod
    def draw(self, most: int) -> list[Ticket]:
        """Tickets for so many calls at most, for one of the threads."""

    @abstractmethod
    def draw_call(self, partition: int, number: int) -> list[Ticket]:
        """A ticket for this call alone; none if it may not be made, or is being made."""

    def come_to(self, partition: int, number: int, most_ahead: int) -> None:
        """All calls have been merged that come before this one in the order of tickets. No worker
        is to be called more than `most_ahead` calls ahead of that."""
        return  # Of one partition, what is ahead has to come before what is more ahead.

    @abstractmethod
    def cut_short(self) -> None:
        """The calls that are being made take long: those behind them are no longer theirs."""

    @abstractmethod
    def close(self, ticket: Ticket, *, ended: bool) -> None:
        """The next call of the ticket is the partition's last in this epoch: it has ended the
        epoch, or its error has taken the place of all that could come."""

    @abstractmethod
    def begin_epoch(self) -> bool:
        """Begin the next epoch if all calls of this one are done; whether it did."""


class IndexTickets(Tickets):
    """The calls of a pure function. As many as there are threads are under way or put off: beyond
    an index that has nothing yet the next ones have nothing either."""

    def __init__(self, start: Position, num_threads: int, part: PartCalls | None = None) -> None:
        """`part`: the calls that are made, where others are made elsewhere."""
        super().__init__(start, num_threads)
        self._part = part
        self.allowed: tuple[int, int] | None = None
        """Of an epoch, only calls before this one may be made: the others have no place to write
        to yet. None if all may."""
        self._next = start.calls[0]
        # Calls above the next one that were made in an earlier run (order of arrival).
        self._done = frozenset(start.done)
        # Tickets that came back, by their first calls.
        self._back: list[tuple[int, Ticket]] = []
        # The smallest calls that have ended the epoch, and failed for good: none above is drawn.
        self._ended_at = self._failed_at = math.inf

    def _offer(self, ticket: Ticket) -> None:
        if ticket.first < min(ticket.stop, self._ended_at, self._failed_at):
            heappush(self._back, (ticket.first, ticket))

    def put_back(self, ticket: Ticket, due: float = 0.0) -> None:
        # A call beyond the end is not made again: the next epoch would wait until it is due.
        is_beyond = ticket.first >= min(self._ended_at, self._failed_at)
        super().put_back(ticket, 0.0 if is_beyond else due)

    @property
    def is_ready(self) -> bool:
        return self._may_draw_back or self._run(1)[1] > 0

    @property
    def _may_draw_back(self) -> bool:
        """Whether the first ticket that came back may be drawn: what lies behind one that is put
        off waits with it, also if a look has made two tickets of one."""
        if not self._back:
            return False
        is_free = len(self.running) + len(self._put_off) < self._num_threads
        return is_free or self._back[0][0] < min((one[2] for one in self._put_off), default=0)

    def _run(self, most: int) -> tuple[int, int]:
        """The next call that was not drawn, and how many from there on may be."""
        first, stop = self._next, min(self._ended_at, self._failed_at)
        while first in self._done:
            first += 1
        if self._part is not None:
            first, end = self._part.block(first)
            stop = min(stop, end)
        if len(self.running) + len(self._back) + len(self._put_off) >= self._num_threads:
            return first, 0
        if self.allowed is not None and self.allowed[0] == self.epoch:
            stop = min(stop, self.allowed[1])
        num = int(min(most, stop - first))
        if self._done:
            num = next((i for i in range(1, num) if first + i in self._done), num)
        return first, num

    def draw(self, most: int) -> list[Ticket]:
        if self._may_draw_back:
            ticket = heappop(self._back)[1]
        else:
            first, num = self._run(most)
            if num <= 0:
                return []
            self._next = first + num
            ticket = Ticket(0, self.epoch, first, first + num)
        self._split(ticket, most)
        self.running.add(ticket)
        return [ticket]

    def draw_call(self, partition: int, number: int) -> list[Ticket]:
        first = self._back[0][0] if self._back else self._run(1)[0]
        return self.draw(1) if first == number else []

    def cut_short(self) -> None:
        for ticket in list(self.running):
            self._split(ticket, 1)

    def _split(self, ticket: Ticket, num: int) -> None:
        """Leave so many calls on a ticket that were not made; the others go back."""
        first, stop = ticket.first + len(ticket.chunks) + num, ticket.stop
        # What came along is of all of them.
        if first < stop and ticket.bundle is None:
            ticket.stop = first
            self._offer(Ticket(0, self.epoch, first, stop))

    def close(self, ticket: Ticket, *, ended: bool) -> None:
        self._let_go(ticket)
        if ended:
            self._ended_at = min(self._ended_at, ticket.first)
        else:
            self._failed_at = min(self._failed_at, ticket.first)
        # What comes from beyond it means nothing.
        stop = int(min(self._ended_at, self._failed_at))
        self._put_off = [one for one in self._put_off if one[-1].first < stop]
        self._back = [one for one in self._back if one[0] < stop]
        heapify(self._put_off)
        heapify(self._back)
        for one in self.running:
            # One is being made.
            one.stop = min(one.stop, max(one.first + len(one.chunks) + 1, stop))

    def begin_epoch(self) -> bool:
        end = self._ended_at
        if self.begun or self._back or end == math.inf or self._failed_at < end:
            return False
        if self._run(1)[0] < end:
            return False
        self.epoch += 1
        self._next, self._done = 0, frozenset()
        if self._part is not None:
            self._part.go_to(self.epoch)
        self._ended_at = self._failed_at = math.inf
        return True


class WorkerTickets(Tickets):
    """The calls of workers, of each one ticket at a time: the same one through the whole stream."""

    def __init__(
        self, start: Position, num_threads: int, *, arrival: bool, remote: bool = False
    ) -> None:
        """`remote`: a ticket's calls are a round trip."""
        super().__init__(start, num_threads)
        self._arrival, self._is_single = arrival, arrival or remote
        self._all = [Ticket(i, start.epoch, first, first) for i, first in enumerate(start.calls)]
        self._firsts = list(start.calls)
        # So many calls of each worker may be made in this epoch, as far as is known.
        self._stop = sys.maxsize
        # Those that may be called, the one that was called least first, and then in the ring's
        # order: in the order of tickets what is called is what is merged next.
        self._ready: list[tuple[int, int, Ticket]] = []
        self._ended = {i for i, live in enumerate(start.live) if not live}
        self._turn = start.turn
        for ticket in self._all:
            if ticket.partition not in self._ended:
                self._offer(ticket)
        # After a resume all may have ended the epoch already.
        self.begin_epoch()

    def _offer(self, ticket: Ticket) -> None:
        rank = (ticket.partition - self._turn) % len(self._all)
        heappush(self._ready, (self._num_made(ticket), rank, ticket))

    def _num_made(self, ticket: Ticket) -> int:
        return ticket.first - self._firsts[ticket.partition]

    @property
    def is_ready(self) -> bool:
        return bool(self._ready) and self._ready[0][0] < self._stop

    def draw(self, most: int) -> list[Ticket]:
        # Of several workers at once, since to ask for each takes longer than a quick call. One that
        # does not return would hold up the others behind it, which in the order of tickets come
        # after it anyway.
        num = 1 if self._is_single else min(most, len(self._ready))
        drawn: list[Ticket] = []
        while len(drawn) < num and self.is_ready:
            made, _, ticket = heappop(self._ready)
            ticket.stop = ticket.first + min(max(1, most // num), self._stop - made)
            drawn.append(ticket)
        self.running.update(drawn)
        return drawn

    def draw_call(self, partition: int, number: int) -> list[Ticket]:
        ticket = self._all[partition]
        ready = [one for one in self._ready if one[-1] is not ticket]
        if len(ready) == len(self._ready):
            return []
        self._ready = ready
        heapify(ready)
        ticket.stop = ticket.first + 1
        self.running.add(ticket)
        return [ticket]

    def come_to(self, partition: int, number: int, most_ahead: int) -> None:
        # Otherwise a few would take all room, and those that come before could give one call at a
        # time. A call of the epoch before says nothing of this one.
        if not self._arrival:
            self._stop = most_ahead + max(0, number - self._firsts[partition])

    def cut_short(self) -> None:
        for ticket in self.running:
            ticket.stop = min(ticket.stop, ticket.first + len(ticket.chunks) + 1)

    def close(self, ticket: Ticket, *, ended: bool) -> None:
        self._let_go(ticket)
        if ended:
            ticket.since = None
            self._ended.add(ticket.partition)

    def begin_epoch(self) -> bool:
        if self.running or len(self._ended) < len(self._all):
            return False
        self.epoch += 1
        self._ended.clear()
        self._ready.clear()
        self._firsts = [one.first for one in self._all]
        self._stop, self._turn = sys.maxsize, 0
        for ticket in self._all:
            ticket.epoch = self.epoch
            self._offer(ticket)
        return True
