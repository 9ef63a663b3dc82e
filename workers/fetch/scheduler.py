"""Which calls may be made, and how much is buffered: facts, without threads or heuristics.

Nothing here decides an order that a user could see; the merge does that. These rules keep the calls
of each worker in order and one at a time, and begin no epoch before all workers have ended the one
before it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

from feeder.workers.errors import FeedError
from feeder.workers.stream.chunks import ChunkList, End
from feeder.workers.stream.position import Partitions, Position
from feeder.workers.tuning import TUNING, Tuning


class ListLimits(NamedTuple):
    """A fetcher hands its chunk list over when it reaches one of these."""

    rows: int
    calls: int
    num_bytes: int
    grace_s: float
    """Seconds for which the merge has been waiting."""


_NO_LIMITS = ListLimits(0, 0, 0, 0.0)


class Partition:
    """One ordered sequence of calls and what is known of it.

    Owner: the channel's lock, for every field but the open lists. To `chunks` and
    `marks` the fetcher that holds the partition appends without the lock, in an order in which
    `take_open` may run at any moment. All other fields are written in this module alone.
    """

    __slots__ = (
        "backoff_s",
        "bit",
        "called_at",
        "chunk_lists",
        "chunks",
        "counted",
        "ended",
        "epoch",
        "failure",
        "ident",
        "limits",
        "made",
        "marks",
        "next",
        "number",
        "running",
        "silent_since",
        "wanted_since",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, next_call: int, live: bool) -> None:
        self.number = number
        self.bit = 1 << number
        """The set of this partition alone."""
        self.epoch = epoch
        self.next = next_call
        """Number of its next call."""
        self.made = 0
        """Calls made in this epoch."""
        self.ended = not live
        """Whether it has ended its epoch."""
        self.running = False
        """Whether a fetcher holds it."""
        self.limits = _NO_LIMITS
        """How large the chunk list gets that is being filled."""
        self.ident: int | None = None
        """The thread that holds it."""
        self.called_at = 0.0
        """When that began to call it."""
        self.backoff_s = 0.0
        """How long it was last put off."""
        self.failure: BaseException | None = None
        """What its last call raised, where that is being retried."""
        self.silent_since: float | None = None
        """Since when it has been asked for a chunk and has given none."""
        self.wanted_since: float | None = None
        """Since when the merge has been waiting for it, so that the chunk list under way is cut
        short; 0.0 where the end of the epoch cuts it short."""
        self.chunk_lists: deque[ChunkList] = deque()
        """Handed over, not yet collected."""
        self.chunks: list[Any] = []
        """What the fetcher that holds it has got so far."""
        self.marks: list[bytes] = []
        """The cursors after those calls, where the feed has cursors."""
        self.counted = (0, 0)
        """Rows and bytes that were taken from under the fetcher that holds it, and are counted as
        buffered though its calls have not returned."""

    def num_collected(self) -> int:
        """The calls of this epoch whose chunks have been collected."""
        lists = self.chunk_lists
        return self.made - (self.next - lists[0].first) if lists else self.made

    def pass_over(self, num_calls: int) -> None:
        """Its next calls were made in an earlier run; in the fetcher that holds it."""
        self.next += num_calls

    def begin_calls(self, now: float) -> None:
        """The fetcher that holds it begins to call."""
        self.called_at = now

    def report_progress(self, now: float) -> None:
        """The fetcher that holds it is busy, and gives no chunk yet: it replays calls."""
        self.silent_since = now

    def note_failure(self, error: BaseException) -> None:
        """A call raised and will be made again; in the fetcher that holds it."""
        self.failure = error

    def note_chunks(self) -> None:
        """Calls gave chunks; in the fetcher that holds it."""
        self.backoff_s, self.failure = 0.0, None

    def back_off(self, first_s: float, last_s: float) -> float:
        """A call gave None; returns for how long it is put off, twice as long each time. In the
        fetcher that holds it."""
        self.backoff_s = min(2 * self.backoff_s or first_s, last_s)
        return self.backoff_s

    def take_open(self, ending: End | FeedError | None, *, marked: bool) -> ChunkList | None:
        """What has been got so far, as a chunk list; None where that is nothing.

        Safe beside the fetcher that is appending: it appends the chunk, then the cursor, and
        taking a head off a list is one operation.
        """
        # The length first: what the fetcher appends from here on stays for the next chunk list. Of
        # a chunk whose cursor is missing still, a position could not be told.
        count = min(len(self.chunks), len(self.marks)) if marked else len(self.chunks)
        if count == 0 and ending is None:
            return None
        chunks, marks = self.chunks[:count], self.marks[:count]
        # The lists stay the same objects: the fetcher appends to them, and sees by their length
        # that something was taken.
        del self.chunks[:count], self.marks[:count]
        # Calls are numbered where they are handed over, so that a position names exactly those.
        first = self.next
        self.next += count
        self.made += count
        return ChunkList(self.number, self.epoch, first, chunks, marks if marked else None, ending)


_WORD_BITS = 30  # A number of so many bits is one digit of Python's.
_WORD = (1 << _WORD_BITS) - 1


def bits_of(partitions: Iterable[Partition]) -> int:
    """A set of partitions as the bits of a number: partition n is bit n."""
    bits = 0
    for partition in partitions:
        bits |= partition.bit
    return bits


class CallsReport(NamedTuple):
    """What the calls of one chunk list came to."""

    calls: int = 0
    """Calls that gave a chunk."""
    rows: int = 0
    """Rows of these chunks."""
    num_bytes: int = 0
    """Their bytes."""
    took: float = 0.0
    """Seconds from the first call to the last one's return."""
    waited: float = 0.0
    """Those of them in which the thread did not compute."""


class Called(NamedTuple):
    """What came of a partition that a fetcher has called."""

    partition: Partition
    report: CallsReport
    ending: End | FeedError | None = None
    """What its calls ended with."""
    put_off_s: float = 0.0
    """How many seconds pass before its next call."""


class Turn:
    """Partitions that a fetcher has acquired: it calls one after the other, and gives all back.

    The fetcher takes partitions from the left of `todo` and appends to `done`. The holder of the
    channel's lock may empty both at any moment, for each of these is one operation: then a call
    that does not return holds up no partition but its own.
    """

    __slots__ = ("done", "todo")

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.todo = deque(partitions)
        """Not begun."""
        self.done: deque[Called] = deque()
        """Called, and not given back yet."""

    def take_next(self) -> Partition | None:
        """The next partition that is not begun; None where there is none."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None

    def take_done(self) -> list[Called]:
        """What has been called since it was taken last; for the holder of the channel's lock."""
        # The fetcher may append meanwhile: what it appends after the count is taken next time.
        return [self.done.popleft() for _ in range(len(self.done))]


class Scheduler:
    """All partitions of a stream, and which of them may be called.

    Sets of partitions are the bits of a number. To find, to add or to remove one costs the same
    however many partitions there are, and several rules together are an operation of C.

    Owner: the channel, which calls every method under its lock.
    """

    def __init__(
        self, partitions: Partitions, start: Position, epochs: int | None, tuning: Tuning = TUNING
    ) -> None:
        self.partitions = tuple(
            Partition(i, start.epoch, calls, live)
            for i, (calls, live) in enumerate(zip(start.calls, start.live, strict=True))
        )
        self.wanted: Sequence[Partition] = ()
        """The partitions of which the merge is told when something comes."""
        self.wanted_bits = 0
        """The same, as bits."""
        self.running = 0
        """The partitions that fetchers hold."""
        self.handed = 0
        """The partitions of which something was handed over and not collected yet."""
        self.begun_rows = 0
        """Rows that may come of the chunk lists that fetchers have begun."""
        self._layout = partitions
        self._epochs = epochs
        self._max_lists = tuning.max_lists
        # The partitions that may be called, and perhaps some that are over.
        self._ready = bits_of(self.partitions)
        # Those that have as many chunk lists as they may, and nothing else against a call.
        self._full = 0
        # When those that are put off may be called, the earliest first.
        self._put_off: list[tuple[float, int]] = []
        # The one after the partition that was called last.
        self._next = 0
        # The smallest index of the epoch that raised StopIteration (pure form).
        self._ends_at: int | None = None
        # An epoch, and the first call of it that has no place to write to yet.
        self._allowed: tuple[int, int] | None = None
        # After a resume all partitions may have ended the epoch already.
        self._begin_epoch()

    def partitions_of(self, wanted: int | None) -> Sequence[Partition]:
        """The partition of a number, or all of them for None."""
        return self.partitions if wanted is None else (self.partitions[wanted],)

    def allow(self, allowed: tuple[int, int] | None) -> None:
        """Of an epoch, only the calls before this one may be made (pure form): the others have no
        place to write to yet. None where all may."""
        self._allowed = allowed

    @property
    def has_places(self) -> bool:
        """Whether calls have places to write to."""
        return self._allowed is not None

    def num_allowed(self, partition: Partition) -> int:
        """How many calls of a partition may be made one after the other."""
        if self._allowed is None or self._allowed[0] != partition.epoch:
            return sys.maxsize
        left = self._allowed[1] - self._layout.number(partition.number, partition.next)
        return max(0, -(-left // self._layout.num_partitions))

    @property
    def finished(self) -> bool:
        """Whether no call is left to start."""
        return self._epochs is not None and self.partitions[0].epoch >= self._epochs

    def want(self, partitions: Sequence[Partition], since: float | None = None) -> None:
        """The merge is to be told when something comes of these partitions, and of no others."""
        for partition in self.wanted:
            partition.wanted_since = None
        for partition in partitions:
            partition.wanted_since = since
        self.wanted, self.wanted_bits = partitions, bits_of(partitions)

    @property
    def ready(self) -> int:
        """The partitions that may be called, and perhaps some that are over."""
        return 0 if self.finished else self._ready

    def end_pauses(self, now: float) -> None:
        """Those that were put off until now may be called. For fetchers alone: an interrupt of the
        user's thread in between would lose one."""
        while self._put_off and self._put_off[0][0] <= now:
            self._offer(self.partitions[heappop(self._put_off)[1]])

    def in_turn(self, partitions: int, first: int | None = None) -> Iterator[Partition]:
        """Partitions that may be called, in the order of their turns, from number `first` on: by
        default the one after the last that was called."""
        first = self._next if first is None else first
        later = partitions >> first << first
        for partition in chain(self.among(later), self.among(partitions & ~later)):
            if self._is_over(partition):
                self._ready &= ~partition.bit
            elif self._allowed is None or self.num_allowed(partition):
                yield partition

    @property
    def pause_ends(self) -> float:
        """When a partition that is put off may be called; infinite where there is none."""
        return self._put_off[0][0] if self._put_off else math.inf

    def hold(self, partition: Partition, ident: int, limits: ListLimits, now: float) -> None:
        """A fetcher holds the partition from now on."""
        partition.running, partition.ident, partition.limits = True, ident, limits
        if self._allowed is not None:
            most = min(limits.calls, self.num_allowed(partition))
            partition.limits = limits._replace(calls=most)
        # It counts from the first of several calls that give nothing: each begins anew only where
        # rows came.
        if partition.silent_since is None:
            partition.silent_since = now
        self.running |= partition.bit
        self._ready &= ~partition.bit
        self.begun_rows += limits.rows
        self._next = (partition.number + 1) % len(self.partitions)

    def give_back(self, called: Called, now: float, marked: bool) -> bool:
        """A fetcher gives a partition back with what it has got; returns whether that ended the
        epoch for all."""
        partition, ending = called.partition, called.ending
        # Chunks without rows may come for ever: they do not end a silence.
        if called.report.rows:
            partition.silent_since = None
        chunk_list = partition.take_open(ending, marked=marked)
        if chunk_list is not None:
            self._hand_over(partition, chunk_list)
        self._release(partition)
        if ending is None and not called.put_off_s:
            self._offer(partition)
        elif isinstance(ending, End):
            partition.silent_since = None
            self._end(partition, partition.next)
        # The error has a place in the stream: nothing that the partition could give comes after it.
        elif ending is None:
            heappush(self._put_off, (now + called.put_off_s, partition.number))
        return not self.running and self._begin_epoch()

    def _offer(self, partition: Partition) -> None:
        # Chunk lists without rows count in no other bound.
        if len(partition.chunk_lists) >= self._max_lists:
            self._full |= partition.bit
        else:
            self._ready |= partition.bit

    def let_go(self, partition: Partition) -> bool:
        """A fetcher gives a partition back that it has not called; returns whether the epoch has
        ended for all: others may have ended it meanwhile."""
        self._release(partition)
        self._ready |= partition.bit
        return not self.running and self._begin_epoch()

    def _release(self, partition: Partition) -> None:
        partition.running, partition.ident = False, None
        if not partition.bit & self.wanted_bits:
            partition.wanted_since = None
        self.running ^= partition.bit
        self.begun_rows -= partition.limits.rows

    def _hand_over(self, partition: Partition, chunk_list: ChunkList) -> None:
        partition.chunk_lists.append(chunk_list)
        self.handed |= partition.bit

    def take_open(self, partitions: Sequence[Partition], *, marked: bool) -> list[Partition]:
        """Take what fetchers have got so far of partitions that they hold; returns those that had
        something."""
        found = []
        for partition in partitions:
            chunk_list = partition.take_open(None, marked=marked) if partition.running else None
            if chunk_list is not None:
                self._hand_over(partition, chunk_list)
                found.append(partition)
        return found

    def note_rows(self, partition: Partition, rows: int, num_bytes: int, now: float) -> None:
        """A call that has not returned yet has given rows before, which are counted."""
        counted_rows, counted_bytes = partition.counted
        partition.counted = (counted_rows + rows, counted_bytes + num_bytes)
        partition.silent_since = now

    def take_counted(self, partition: Partition) -> tuple[int, int]:
        """The rows and bytes of a partition that is given back that are counted already."""
        counted, partition.counted = partition.counted, (0, 0)
        return counted

    def take_all(self) -> list[ChunkList]:
        """Everything that was handed over, partition by partition."""
        found: list[ChunkList] = []
        for partition in self.among(self.handed):
            found.extend(partition.chunk_lists)
            partition.chunk_lists.clear()
        self._ready |= self._full
        self.handed = self._full = 0
        return found

    def drop_all(self) -> None:
        """The stream is over: what was handed over is dropped."""
        self.take_all()

    def among(self, bits: int) -> Iterator[Partition]:
        """The partitions of a set, in the order of their numbers."""
        partitions, first = self.partitions, 0
        # Word by word: each operation on a number of many words makes another one.
        while bits:
            word = bits & _WORD
            while word:
                bit = word & -word
                word ^= bit
                yield partitions[first + bit.bit_length() - 1]
            bits >>= _WORD_BITS
            first += _WORD_BITS

    def _end(self, partition: Partition, call: int) -> None:
        """Call number `call` of a partition raised StopIteration."""
        partition.ended = True
        if self._layout.pure:
            index = self._layout.number(partition.number, call)
            self._ends_at = index if self._ends_at is None else min(index, self._ends_at)
            # Where calls beyond the end give rows, a list of many would hold the next epoch up.
            for other in self.among(self.running & ~self.wanted_bits):
                other.wanted_since = 0.0

    def _begin_epoch(self) -> bool:
        """Begin the next epoch where every partition has ended this one; returns whether it did."""
        if self.finished:
            return False
        # All: a fetch function that shuffles at an epoch's end would else mix rows of two epochs.
        if not all(self._is_over(one) for one in self.partitions):
            return False
        self._ends_at = None
        for partition in self.partitions:
            partition.epoch += 1
            partition.made = 0
            partition.ended = False
            # Indices begin anew in each epoch; the calls of a worker are counted through.
            if self._layout.pure:
                partition.next = 0
        self._put_off.clear()
        self._full = 0
        self._ready = bits_of(self.partitions)
        self._next = 0
        return True

    def _is_over(self, partition: Partition) -> bool:
        if partition.ended or self._ends_at is None:
            return partition.ended
        # The smallest index that raised StopIteration ends the epoch for all: whatever comes from
        # beyond it, the merge drops.
        return self._layout.number(partition.number, partition.next) > self._ends_at


# ---- The bound on what is buffered between the fetch function and the user


class Held:
    """What is buffered until a device's user has it. The channel's lock guards it."""

    __slots__ = ("batches", "is_out", "kept_rows", "num_bytes", "rows")

    def __init__(self, batches: int, rows: int, num_bytes: int, kept_rows: int) -> None:
        self.batches = batches
        self.rows = rows
        self.num_bytes = num_bytes
        self.kept_rows = kept_rows
        self.is_out = False
        """Whether it is counted as handed out."""


class BufferBudget:
    """Counts rows and bytes from a call's return until they are handed to the user.

    A row that was copied into a batch is kept a second time for as long as its chunk is: a snapshot
    may need the rest of the chunk. Such rows are counted apart, and count in the bound as well,
    since what is bounded is memory. Without them 33-row chunks and 32-row batches took twice the
    bound.

    Owner: the channel's lock. Statistics read single numbers without it.
    """

    def __init__(
        self,
        max_rows: int,
        max_bytes: int,
        num_devices: int,
        list_bytes: int = 0,
        num_partitions: int = 1,
    ) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.list_bytes = list_bytes
        """What each of these is taken to add."""
        self._seen_bytes = 0
        self._kept_share = 1 - 1 / (TUNING.lists_remembered * num_partitions)
        self.num_calling = 0
        """Partitions that fetchers hold, each of which is going to add a chunk list."""
        self.is_outgrown = False
        """Whether chunk lists have become much larger than those that are under way were taken for,
        so that there is no room for them."""
        self.rows = 0
        """Rows buffered now, each counted once."""
        self.bytes = 0
        """Their bytes."""
        self.kept_rows = 0
        """Rows that have been copied and whose chunk is kept all the same."""
        self.row_bytes: int | None = None
        """Bytes of a row, once they are known and where all rows have as many."""
        self.ahead_bytes = 0
        """Bytes handed over since the merge last collected."""
        self.peak_rows = 0
        """The most rows that were ever buffered."""
        self.peak_bytes = 0
        """The most bytes that were ever buffered."""
        self.waiting = [0] * num_devices
        """Batches in each device queue."""

    @property
    def below_bound(self) -> bool:
        """Whether batches may be assembled for the sake of batches to come."""
        return self.room_rows() > 0 and self.has_bytes_for(0)

    def may_call(self) -> bool:
        """Whether a fetcher may begin to call for the sake of batches to come, beside those that
        do, each of which is going to add a chunk list. Where nothing is buffered and nobody calls
        one may, however large its chunk."""
        return self.room_rows() > 0 and self.has_bytes_for(self.num_calling)

    def has_bytes_for(self, num_calling: int) -> bool:
        """Whether the bound on bytes is not reached with what so many chunk lists add."""
        return self.room_bytes(num_calling) > 0

    def num_lists(self) -> int:
        """How many more chunk lists there is room for."""
        return self.room_bytes(self.num_calling) // max(1, self.list_bytes)

    def room_bytes(self, num_calling: int) -> int:
        """Bytes that there is room for beside what so many chunk lists add; negative above the
        bound."""
        # Before the first chunk list its size is a guess; a wrong one is corrected by the first.
        held = self.bytes + self.kept_rows * (self.row_bytes or 0)
        return self.max_bytes - held - num_calling * self.list_bytes

    def room_rows(self) -> int:
        """Rows that there is room for; negative above the bound."""
        return self.max_rows - self.rows - self.kept_rows

    @property
    def starving(self) -> bool:
        """Whether a device has no batch: then the call whose turn it is may be started above the
        bound, or nothing would ever move. Any device, since the user may be waiting at that one
        and not at the one whose batch is next."""
        return 0 in self.waiting

    def begin_calls(self, num: int) -> None:
        """A fetcher holds so many more partitions."""
        self.num_calling += num

    def end_calls(self, report: CallsReport, counted_rows: int = 0, counted_bytes: int = 0) -> None:
        """It has given one of them back; its calls came to this, some of which was counted before
        they returned."""
        self.num_calling -= 1
        num_bytes = report.num_bytes
        has_grown = num_bytes > TUNING.outgrown_times * self.list_bytes
        # A chunk list without a chunk says nothing of how large the next one will be.
        if report.calls:
            # Chunks of one feed may differ much, and some large ones may be under way when a small
            # one comes: a large list is forgotten slowly. Of 64 workers whose chunks had 10 MB and
            # 8 kB in turns, 140 to 270 MB were held under a bound of 20 MB where the last list
            # alone counted, and 41 to 51 so (2026-11-24). By the lists of each partition, and not
            # by those of all: else the small ones of partitions that are behind make the large one
            # forgotten before these come to theirs. What no count foresees is a first large chunk
            # of each call that is under way.
            self._seen_bytes = max(num_bytes, int(self._seen_bytes * self._kept_share))
            self.list_bytes = self._seen_bytes
        self.ahead_bytes += num_bytes
        self.add(report.rows - counted_rows, num_bytes - counted_bytes)
        self.is_outgrown = (has_grown or self.is_outgrown) and not self.has_bytes_for(
            self.num_calling
        )

    def collect(self) -> None:
        """The merge has collected all that was handed over."""
        self.ahead_bytes = 0

    def learn(self, row_bytes: int) -> None:
        """All rows of the stream have so many bytes."""
        self.row_bytes = row_bytes

    def queue(self, device: int, batches: int) -> None:
        """Batches were put on a device queue."""
        self.waiting[device] += batches

    def add(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes in (or, if negative, out)."""
        self.rows += rows
        self.bytes += num_bytes
        self.kept_rows += kept_rows
        self.peak_rows = max(self.peak_rows, self.rows)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def hand_out(self, device: int, held: Held) -> None:
        """Count out what a device's user has, once however often it is said."""
        # The user's thread runs this, and Python raises an interrupt after a call: there is none
        # in between, so all of it is done or nothing.
        if not held.is_out:
            self.rows -= held.rows
            self.bytes -= held.num_bytes
            self.kept_rows -= held.kept_rows
            self.waiting[device] -= held.batches
            held.is_out = True
