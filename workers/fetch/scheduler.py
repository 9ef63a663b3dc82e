"""Which call may be started next: the rules of the fetching side, without threads.

Nothing here decides an order that a user could see; the merge does that. These rules keep every
worker's calls in order and one at a time, start no epoch before all workers have ended the one
before it, and start no call above the bound but the one that a batch is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feeder.workers.errors import FeedError
from feeder.workers.stream.position import Partitions, Position

# Bundles without rows count in no bound.
_MOST_BUNDLES = 256


class End:
    """What a partition's last bundle of an epoch ends with."""

    __slots__ = ("mark",)

    def __init__(self, mark: bytes | None) -> None:
        self.mark = mark
        """The cursor after `StopIteration`, which the next epoch begins at."""


class ChunkList:
    """Consecutive chunks of one partition, as they are handed from a fetcher to the merge."""

    __slots__ = ("chunks", "ending", "epoch", "first", "marks", "partition")

    def __init__(
        self,
        partition: int,
        epoch: int,
        first: int,
        chunks: list[Any],
        marks: list[bytes] | None,
        ending: End | FeedError | None,
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self.first = first
        self.chunks = chunks
        self.marks = marks
        self.ending = ending


class Partition:
    """One ordered sequence of calls and what is known of it. The channel's lock guards it, but
    for the open lists, which the fetcher that holds the partition appends to."""

    __slots__ = (
        "backoff_s", "bundles", "called_at", "chunks", "ended", "epoch", "failure", "floods",
        "halted", "ident", "is_quick", "leads", "made", "marks", "next", "number", "ready_at",
        "running", "silent_since", "waits", "wanted_since",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, next_call: int, live: bool) -> None:
        self.number = number
        self.epoch = epoch
        self.next = next_call
        """Number of its next call."""
        self.made = 0
        """Calls made in this epoch."""
        self.ended = not live
        """Whether it has ended its epoch."""
        self.halted = False
        """Whether its last call failed."""
        self.running = False
        """Whether a fetcher holds it."""
        self.waits = False
        """Whether its last calls waited for something, of which many can go on at once."""
        self.is_quick = False
        """Whether its calls take so little time that they are not worth a thread of their own."""
        self.floods = False
        """Whether each call fills a bundle with new memory, about as fast as it can be merged."""
        self.leads = False
        """Whether who calls it leads, though its calls are not quick: what came is passed on."""
        self.ident: int | None = None
        """The thread that holds it."""
        self.called_at = 0.0
        """When that began to call it."""
        self.ready_at = 0.0
        """Before this time it is not called (it gave None, or waits for a retry)."""
        self.backoff_s = 0.0
        """How long it was last put off."""
        self.failure: BaseException | None = None
        """What its last call raised, where that is being retried."""
        self.silent_since: float | None = None
        """Since when it has been asked for a chunk and has given none."""
        self.wanted_since: float | None = None
        """Since when the merge has been waiting for it."""
        self.bundles: deque[ChunkList] = deque()
        """Handed over, not yet collected."""
        self.chunks: list[Any] = []
        """What the fetcher that holds it has got so far."""
        self.marks: list[bytes] = []
        """The marks after those calls, where the feed has cursors."""

    def take_open(self, ending: End | FeedError | None, *, marked: bool) -> ChunkList | None:
        """What has been got so far, as a bundle; None where that is nothing.

        Safe beside the fetcher that is appending: it appends the mark last, and taking a head off
        a list is one operation.
        """
        count = min(len(self.chunks), len(self.marks)) if marked else len(self.chunks)
        if count == 0 and ending is None:
            return None
        chunks, marks = self.chunks[:count], self.marks[:count]
        del self.chunks[:count], self.marks[:count]
        first = self.next
        self.next += count
        self.made += count
        return ChunkList(self.number, self.epoch, first, chunks, marks if marked else None, ending)


class Scheduler:
    """All partitions of a stream, and which of them may be called."""

    def __init__(self, partitions: Partitions, start: Position, epochs: int | None) -> None:
        self.partitions = tuple(
            Partition(i, start.epoch, calls, live)
            for i, (calls, live) in enumerate(zip(start.calls, start.live, strict=True))
        )
        self._layout = partitions
        self._epochs = epochs
        self._ends_at: int | None = None
        """The smallest index of the epoch that raised StopIteration (pure form)."""
        self._roll()

    def partitions_of(self, wanted: int | None) -> Sequence[Partition]:
        """The partition of a number, or all of them for None."""
        return self.partitions if wanted is None else (self.partitions[wanted],)

    @property
    def num_computing(self) -> int:
        """Partitions that are held by a fetcher and keep a core busy."""
        return sum([partition.running and not partition.waits for partition in self.partitions])

    @property
    def is_quick_running(self) -> bool:
        """Whether a fetcher holds a partition whose calls are quick."""
        return any(partition.running and partition.is_quick for partition in self.partitions)

    @property
    def finished(self) -> bool:
        """Whether no call is left to start."""
        return self._epochs is not None and self.partitions[0].epoch >= self._epochs

    def pick(
        self, now: float, *, ahead: bool, compute: bool, quick: bool, spare: bool = False
    ) -> Partition | None:
        """Of the partitions that may be called the one that has been called least; only one with
        nothing to collect, unless partitions may run `ahead`; of those that flood the caches only
        if `spare`, of those whose calls are quick only if `quick`, of those that compute only if
        `compute`. None where there is none."""
        if self.finished:
            return None
        ready = [
            partition for partition in self.partitions
            if (spare if partition.floods else ahead or not partition.bundles)
            and (quick if partition.is_quick else compute or partition.waits)
            and self._callable(partition, now)
        ]  # fmt: skip
        return min(ready, key=lambda partition: partition.made, default=None)

    def least_called(self, now: float, partitions: Sequence[Partition]) -> Partition | None:
        """Of some partitions that may be called the one that has been called least; None where
        there is none."""
        if self.finished:
            return None
        ready = [partition for partition in partitions if self._callable(partition, now)]
        return min(ready, key=lambda partition: partition.made, default=None)

    def next_ready(self, now: float) -> float | None:
        """Seconds until a partition that is put off may be called; None where there is none."""
        waits = [
            partition.ready_at - now
            for partition in self.partitions
            if partition.ready_at > now and not partition.running and not self._over(partition)
        ]
        return min(waits, default=None)

    def end(self, partition: Partition, call: int) -> None:
        """Call number `call` of a partition raised StopIteration."""
        partition.ended = True
        if self._layout.pure:
            index = self._layout.number(partition.number, call)
            self._ends_at = index if self._ends_at is None else min(index, self._ends_at)

    def settle(self) -> None:
        """Begin the next epoch where every partition has ended this one."""
        if not self.finished:
            self._roll()

    def _roll(self) -> None:
        if not all(self._over(one) and not one.running for one in self.partitions):
            return
        self._ends_at = None
        for partition in self.partitions:
            partition.epoch += 1
            partition.made = 0
            partition.ended = partition.halted = False
            if self._layout.pure:
                partition.next = 0

    def _callable(self, partition: Partition, now: float) -> bool:
        if len(partition.bundles) >= _MOST_BUNDLES:
            return False
        is_held_up = partition.halted or partition.ready_at > now
        return not (partition.running or is_held_up or self._over(partition))

    def _over(self, partition: Partition) -> bool:
        if partition.ended or self._ends_at is None:
            return partition.ended
        return self._layout.number(partition.number, partition.next) > self._ends_at


# ---- How much is buffered between the fetch function and the user, and how much may be.


@dataclass(slots=True)
class Held:
    """What is buffered until a device's user has it."""

    batches: int
    rows: int
    num_bytes: int
    kept_rows: int
    is_out: bool = False
    """Whether it is counted as handed out."""


class BufferBudget:
    """Counts rows and bytes from a call's return until they are handed to the user.

    A row that has been copied into a batch is kept a second time for as long as its chunk is,
    which may have to give a snapshot its rest. Such rows are counted apart, and count in the bound
    as well: what is bounded is memory. Not thread-safe; the channel's lock guards it.
    """

    def __init__(
        self, max_rows: int, max_bytes: int, num_devices: int, bundle_bytes: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.bundle_bytes = bundle_bytes
        """What each fetcher that is calling is taken to add."""
        self._seen_bytes = 0
        self.num_calling = 0
        """Fetchers that are calling."""
        self.rows = 0
        """Rows buffered now, each counted once."""
        self.bytes = 0
        """Their bytes."""
        self.kept_rows = 0
        """Rows that have been copied and whose chunk is kept all the same."""
        self.row_bytes = 0
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
        return self._has_rows() and self.has_bytes_for(0)

    def may_call(self, coming: int) -> bool:
        """Whether a fetcher may begin to call for the sake of batches to come, beside those that do
        and `coming` more, each of which is going to add a bundle. Where nothing is buffered and
        nobody calls one may, however large its chunk."""
        return self._has_rows() and self.has_bytes_for(self.num_calling + coming)

    def has_bytes_for(self, num_calling: int) -> bool:
        """Whether the bound on bytes is not reached with what so many fetchers are going to add."""
        held = self.bytes + self.kept_rows * self.row_bytes
        return held + num_calling * self.bundle_bytes < self.max_bytes

    def note_bundle(self, num_bytes: int) -> None:
        """A fetcher has given a bundle. The next ones are taken for as large, and for larger while
        larger ones have come lately: chunks of one feed may differ much, and some large ones may be
        under way when a small one comes."""
        self._seen_bytes = max(num_bytes, self._seen_bytes * 15 // 16)
        self.bundle_bytes = self._seen_bytes

    def _has_rows(self) -> bool:
        return self.rows + self.kept_rows < self.max_rows

    @property
    def starving(self) -> bool:
        """Whether a device has no batch: then the call whose turn it is may be started above the
        bound, or nothing would ever move. Any device, since the user may be waiting at that one
        and not at the one whose batch is next."""
        return 0 in self.waiting

    def add(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes in (or, if negative, out)."""
        self.rows += rows
        self.bytes += num_bytes
        self.kept_rows += kept_rows
        self.peak_rows = max(self.peak_rows, self.rows)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def hand_out(self, device: int, held: Held) -> None:
        """Count out what a device's user has, once however often it is said. There is no call in
        between, where an interrupt could come."""
        if not held.is_out:
            self.rows -= held.rows
            self.bytes -= held.num_bytes
            self.kept_rows -= held.kept_rows
            self.waiting[device] -= held.batches
            held.is_out = True
