"""The device queue of a served feed: batches on their way from the enqueuer to the I/O thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from feeder.service.faults import point
from feeder.workers.stream.batch import Batch
from feeder.workers.errors import ClosedError, FeedError
from feeder.workers.stream.position import Place
from feeder.workers.stats import Stopwatch

Look = Callable[[list[Batch]], None]
"""Sees batches before they are queued; what it raises ends the run."""


class Outbox:
    """Batches of one queue that are not sent yet. Slots bound their number: it never waits.

    `put` and `finish` are the enqueuer's; `take`, `ending` and `starve` the I/O thread's; `close`
    anybody's.
    """

    def __init__(
        self,
        first_step: float,
        look: Look,
        discard: Callable[[Batch], None],
        starved: Stopwatch,
    ) -> None:
        self._first_step = first_step
        self._look = look
        self._discard = discard
        self._batches: deque[Batch] = deque()
        self._ending: Place | FeedError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send."""
        self._starved = starved
        self.is_urgent = True
        """Whether to wake the I/O thread for a batch: not while the consumer has enough, since it
        says what it has used before that runs out."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def waited_since(self) -> float | None:
        """Since when the consumer has used all that it was sent; None while it has not."""
        return self._starved.since

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order; those that the consumer has had before are discarded. Raises
        `ClosedError` where the queue is closed, and what `look` raises, which sees all."""
        self._look(batches)
        wanted = batches
        if batches[0].step < self._first_step:
            wanted = [batch for batch in batches if batch.step >= self._first_step]
            for batch in batches[: len(batches) - len(wanted)]:
                self._discard(batch)
        with self._lock:
            if self._closed:
                raise ClosedError("the feed is stopped")
            point("server.put")
            self._batches.extend(wanted)
            if wanted:
                self._starved.stop(time.monotonic())
        if self.is_urgent:
            self.wake()

    def yield_to_user(self) -> None:
        """Nothing: the user is another process."""

    def finish(self, ending: Place | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
            if not self._closed:
                self._starved.stop(time.monotonic())
        self.wake()

    def take(self, most: int) -> list[Batch]:
        """The next batches, at most so many; perhaps none."""
        with self._lock:
            batches = self._batches
            return [batches.popleft() for _ in range(min(most, len(batches)))]

    @property
    def first_bytes(self) -> int:
        """Bytes of the first batch that is here."""
        return self._batches[0].held_bytes

    @property
    def result(self) -> Place | FeedError | None:
        """What will come after all batches; None while that is not known."""
        return self._ending

    @property
    def ending(self) -> Place | FeedError | None:
        """What comes after all batches; None while there are batches, or more may come, and where
        it is closed: batches that were dropped are still to come, from another run."""
        with self._lock:
            return None if self._batches or self._closed else self._ending

    def starve(self) -> None:
        """The consumer has used all that it was sent."""
        with self._lock:
            if not self._batches and self._ending is None and self.waited_since is None:
                self._starved.start(time.monotonic())

    def close(self) -> None:
        """Take no more batches, and drop those that are here."""
        with self._lock:
            self._closed = True
            self._batches.clear()
