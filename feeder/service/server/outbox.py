"""The batches between the enqueuer and the I/O thread: one stream, fanned out to those who read it.

To the enqueuer a queue is one reader, however many replicas have it: `FanOut` takes each batch
once, puts it into the outbox of each replica that wants it, and counts it out once, when the last
of them is past it. So nothing that makes batches knows of replicas, and a consumer that is slow or
begins later changes nothing for the others. An `Outbox` is what one consumer has still to be sent.
The batches in all of them are the same objects, so their memory is there once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from feeder.errors import FeedError
from feeder.service.faults import point
from feeder.workers.errors import ClosedError
from feeder.workers.fetch.bound import Held
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

CheckBatches = Callable[[list[Batch]], None]
"""Checks batches before they are queued (`PositionCheck.check`); what it raises ends the run."""


class Outbox:
    """Batches for one seat that are not sent yet. It never waits, since slots bound their number.

    `put` and `finish` are the enqueuer's; `pop_batches`, `ending` and `starve` the I/O thread's;
    `close` may be anybody's. The lock guards `_batches`, `_ending`, `_closed` and the stopwatch,
    for moments only. `is_urgent` is written by the I/O thread and read without the lock.
    """

    def __init__(self, starved: Stopwatch, wake: Callable[[], None] = lambda: None) -> None:
        self._batches: deque[Batch] = deque()
        self._ending: LazyPosition | FeedError | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Wakes the I/O thread: there is something to send.
        self._wake = wake
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
        """Add batches in order. Raises `ClosedError` if the outbox is closed."""
        with self._lock:
            if self._closed:
                raise ClosedError("the feed is stopped")
            point("server.put")
            self._batches.extend(batches)
            if batches:
                self._starved.stop(time.monotonic())
        # Read after the batches are in: the I/O thread sets it and then looks for batches once
        # more, so that one of the two threads sees what the other has done.
        if self.is_urgent:
            self._wake()

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        with self._lock:
            # The first one counts, whatever the enqueuer says of other queues afterwards.
            if self._ending is None:
                self._ending = ending
            if not self._closed:
                self._starved.stop(time.monotonic())
        self._wake()

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
        """What will come after all batches; None if that is not known yet."""
        return self._ending

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes next if no batches are left; None if there are batches or more may come.

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


class FanOut:
    """One queue of a run: a device queue to the enqueuer, and an outbox for each replica.

    `first_steps` has the number of the first batch that each replica wants. `check` is called with
    all batches, `free` with each that a replica is not sent, and `count_out` with what the last
    replica is past. `put` and `finish` are the enqueuer's, `note_sent` and `note_used` the I/O
    thread's, and the enqueuer's for batches that nobody is sent. The lock guards the counts.
    """

    def __init__(
        self, outboxes: Sequence[Outbox], first_steps: Sequence[float], *,
        number: Callable[[Batch], int], check: CheckBatches, free: Callable[[Batch], None],
    ) -> None:  # fmt: skip
        self.outboxes = outboxes
        self._first_steps = first_steps
        self._number = number
        self._check = check
        self._free = free
        self.count_out: Callable[[Held], None] = lambda held: None
        """Takes what is buffered no longer."""
        # How many batches each replica was sent, and has used.
        self._sent, self._used = [0] * len(outboxes), [0] * len(outboxes)
        self._lock = threading.Lock()

    @property
    def waited_since(self) -> float | None:
        """Since when a replica has had nothing left to use; None while all have something."""
        waits = [outbox.waited_since for outbox in self.outboxes]
        return min([since for since in waits if since is not None], default=None)

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order; those that a replica has had before it is not sent. Raises
        `ClosedError` if the queue is closed, and what the check of all batches raises."""
        # All of them: positions of others may lie among batches that nobody is sent.
        self._check(batches)
        for replica, outbox in enumerate(self.outboxes):
            outbox.put(self._wanted(replica, batches))

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        for outbox in self.outboxes:
            outbox.finish(ending)

    def _wanted(self, replica: int, batches: list[Batch]) -> list[Batch]:
        """Those that a replica wants. Those before them count as sent and used: it has had them."""
        first = self._first_steps[replica]
        if self._number(batches[0]) >= first:
            return batches
        wanted = [batch for batch in batches if self._number(batch) >= first]
        had = batches[: len(batches) - len(wanted)]
        for batch in had:
            self._free(batch)
        self.note_sent(replica, had)
        self.note_used(replica, had)
        return wanted

    def note_sent(self, replica: int, batches: list[Batch]) -> None:
        """A replica was sent these batches: from here on credit bounds them."""
        batches = self._past_all(self._sent, replica, batches)
        rows = sum([batch.rows for batch in batches])
        num_bytes = sum([batch.held_bytes for batch in batches])
        self.count_out(Held(len(batches), rows, num_bytes, 0))

    def note_used(self, replica: int, batches: list[Batch]) -> None:
        """A replica's user was handed these batches: their chunks are kept no longer for it."""
        kept_rows = sum([one.kept_rows for one in self._past_all(self._used, replica, batches)])
        if kept_rows:
            self.count_out(Held(0, 0, 0, kept_rows))

    def _past_all(self, past: list[int], replica: int, batches: list[Batch]) -> list[Batch]:
        """A replica is past these batches; returns those, the first ones, that all are past now."""
        if len(past) == 1:
            return batches
        with self._lock:
            mine, past[replica] = past[replica], past[replica] + len(batches)
            # None of these was counted before, since this replica was not past it.
            return batches[: max(0, min(past) - mine)]
