"""The queue between the thread that merges and the I/O thread: a device queue to the former.

A queue that replicas share puts each batch into the outbox of each, and its rows are counted out
when the last of them is past it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from feeder.errors import FeedError
from feeder.service.faults import point
from feeder.workers.errors import ClosedError
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

CheckBatches = Callable[[list[Batch]], None]
"""Checks batches before they are queued (`PositionCheck.check`); what it raises ends the run."""


def check_nothing(batches: list[Batch]) -> None:
    """Another outbox has checked these batches."""


class Outbox:
    """Batches for one seat that are not sent yet. It never waits, since slots bound their number.

    `put` and `finish` are the enqueuer's; `pop_batches`, `ending` and `starve` the I/O thread's;
    `close` may be anybody's. The lock guards `_batches`, `_ending`, `_closed` and the stopwatch,
    for moments only. `is_urgent` is written by the I/O thread and read without the lock.
    """

    def __init__(
        self,
        first_step: float,
        check: CheckBatches,
        discard: Callable[[Batch], None],
        starved: Stopwatch,
        number: Callable[[Batch], int] = attrgetter("step"),
    ) -> None:
        self._first_step = first_step
        self._number = number
        self._check = check
        self._discard = discard
        self._batches: deque[Batch] = deque()
        self._ending: LazyPosition | FeedError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.wake: Callable[[], None] = lambda: None
        """Wakes the I/O thread: there is something to send."""
        self._starved = starved
        self.is_urgent = True
        """Whether a batch is worth a wake-up of the I/O thread, which costs more than to send one.

        Not while the consumer has more than half of its credit under way: its next `Used` comes
        before that runs out, and wakes the I/O thread anyway.
        """

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def waited_since(self) -> float | None:
        """Since when the consumer has had nothing left to use; None while it has something."""
        return self._starved.since

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order, and discard those that the consumer has had before. Raises
        `ClosedError` where the queue is closed, and what the check of all batches raises."""
        # Discarded batches are checked too: positions of others may lie among them.
        self._check(batches)
        wanted = batches
        if self._number(batches[0]) < self._first_step:
            wanted = [batch for batch in batches if self._number(batch) >= self._first_step]
            for batch in batches[: len(batches) - len(wanted)]:
                self._discard(batch)
        with self._lock:
            if self._closed:
                raise ClosedError("the feed is stopped")
            point("server.put")
            self._batches.extend(wanted)
            if wanted:
                self._starved.stop(time.monotonic())
        # Read after the batches are in: the I/O thread sets it and then looks for batches once
        # more, so that one of the two threads sees what the other has done.
        if self.is_urgent:
            self.wake()

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        with self._lock:
            # The first one counts, whatever the enqueuer says of other queues afterwards.
            if self._ending is None:
                self._ending = ending
            if not self._closed:
                self._starved.stop(time.monotonic())
        self.wake()

    def pop_batches(self, most: int) -> list[Batch]:
        """Take out the next batches, `most` of them or fewer, perhaps none."""
        with self._lock:
            batches = self._batches
            return [batches.popleft() for _ in range(min(most, len(batches)))]

    @property
    def first_bytes(self) -> int:
        """Bytes of the first batch; there must be one. Only the I/O thread takes batches out."""
        return self._batches[0].held_bytes

    @property
    def result(self) -> LazyPosition | FeedError | None:
        """What will come after all batches; None where that is not known yet."""
        return self._ending

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes next where no batches are left; None where there are batches or more may come.

        A closed outbox has none: the batches that it dropped come again, from another run.
        """
        with self._lock:
            return None if self._batches or self._closed else self._ending

    def starve(self) -> None:
        """Note that the consumer has used all that it was sent."""
        with self._lock:
            if not self._batches and self._ending is None and self.waited_since is None:
                self._starved.start(time.monotonic())

    def close(self) -> None:
        """Take no more batches, and drop the ones that are here."""
        with self._lock:
            self._closed = True
            self._batches.clear()


class SharedQueue:
    """The outboxes of one shared queue, as one device queue: each replica gets every batch.

    The batches are the same objects, so their memory is there once. The enqueuer's thread puts
    batches in. The object never changes, and each outbox has a lock of its own.
    """

    def __init__(self, outboxes: Sequence[Outbox]) -> None:
        self._outboxes = outboxes

    @property
    def waited_since(self) -> float | None:
        """Since when a replica has had nothing left to use; None while all have something."""
        waits = [outbox.waited_since for outbox in self._outboxes]
        return min((since for since in waits if since is not None), default=None)

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order, as `Outbox.put` does."""
        for outbox in self._outboxes:
            outbox.put(batches)

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        for outbox in self._outboxes:
            outbox.finish(ending)


class Laggard:
    """How many batches of a run the last replica of a queue is past: what all are past is counted
    out once. Any thread; the lock guards the counts."""

    def __init__(self, replicas: int) -> None:
        self._past = [0] * replicas
        self._lock = threading.Lock()

    def advance(self, replica: int, num: int) -> int:
        """A replica is past `num` more batches; returns how many of these, the first ones, all are
        past now."""
        past = self._past
        if len(past) == 1:
            return num
        with self._lock:
            mine, past[replica] = past[replica], past[replica] + num
            # None of these was counted before, since this replica was not past it.
            return max(0, min(past) - mine)
