"""A device queue in host memory: a closable queue of batches.

It is no `queue.Queue`, since one of its two sides may be interrupted at any instruction, as by
Ctrl-C, and must neither lose a batch nor give one twice. So the user's thread takes all batches
that are there by one assignment, and what it took stays here (`given`) until it is found elsewhere.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from feeder.waking import OneShotEvent
from feeder.workers.errors import ClosedError, FeedError
from feeder.workers.fetch.threads import under_lock
from feeder.workers.stats import Stopwatch, Waits
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

logger = logging.getLogger("feeder")

_SLOW_S = 10.0

_YIELD_S = 0.001
_YIELD_BYTES = 8 * 1024 * 1024
"""If more than this goes round and is copied, who puts batches waits a moment for a waiting
user."""
# The user's thread was woken, and gets the interpreter milliseconds later otherwise. Meanwhile more
# is written than caches hold: 1 MB batches of 17-row chunks took a sixth more CPU. Of chunks that
# are passed on, a fifth more was taken with the wait (2026-11-28).


class HostQueue:
    """Batches on their way from the enqueuer to the user of one device, at most `capacity`.

    The thread that merges calls `put` and `finish`, the user's thread `get`, any thread `close`;
    the state is guarded by one lock. The user's thread may be interrupted, as by Ctrl-C: Python
    looks for signals after each call and where a function begins. So what that thread changes, it
    changes by assignments without a call in between.

    During a wait the user's thread calls `describe_wait` every 10 seconds, or every `look_s` where
    that is less: it returns what is waited for, or raises where that will not come.
    """

    def __init__(
        self, capacity: int, describe_wait: Callable[[], str], look_s: float = math.inf,
        advance: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`advance` makes the next batch in the user's thread, if no other thread does."""
        self.capacity = capacity
        self._describe_wait = describe_wait
        self._look_s = look_s
        self._advance = advance
        # Guarded by the lock, like all below it; the user's thread also reads `given` without it.
        self._batches: deque[Batch] = deque()
        self.given: deque[Batch] | None = None
        """What `get` gave last, until the user has put it where it will be found, and says None."""
        self._ending: LazyPosition | FeedError | None = None
        self._lock = threading.RLock()
        # The user waits for these while there is no batch.
        self._events: list[OneShotEvent] = []
        self._user_waits = False
        # The enqueuer waits here while there is no room.
        self._drained = threading.Condition(self._lock)
        self._enqueuer_waits = False
        self.starved = Waits()
        """The user's waits for batches."""
        self.blocked = Stopwatch()
        """The enqueuer's waits for room."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def waited_since(self) -> float | None:
        """Since when the user has been waiting for a batch; None while not."""
        return self.starved.since

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes after the batches that are here; None where more batches do."""
        return self._ending

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a batch."""
        return len(self._batches) >= self.capacity

    def go_on(self, before: HostQueue) -> None:
        """Be the queue of the same user after another one."""
        self.starved = before.starved

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order, waiting for room; raises `ClosedError` where it is closed."""
        with self._lock:
            for batch in batches:
                # Looked at for each batch: a group may be larger than the room.
                while len(self._batches) >= self.capacity:
                    self._raise_closed()
                    self._wake_user()
                    self._enqueuer_waits = True
                    self.blocked.start(time.monotonic())
                    # Without a timeout: the user, or `close`, ends the wait.
                    self._drained.wait()
                    self.blocked.stop(time.monotonic())
                self._batches.append(batch)
            self._raise_closed()
            is_awaited, num_bytes = self._user_waits, batches[-1].held_bytes * self.capacity
            self._wake_user()
            if is_awaited and batches[-1]._is_copied and num_bytes > _YIELD_BYTES:
                self._enqueuer_waits = True
                self._drained.wait(_YIELD_S)

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
            self._wake_all()

    def get(self) -> deque[Batch] | LazyPosition:
        """All batches that are there, waiting for the first; after them the end of the stream.
        They are `given`, and given again while that is not None.

        Raises the error that took the place of the next batch; `ClosedError` after `close`.
        """
        got = self._take(None)
        if got is None:
            got = self._wait_for_batch()
        if isinstance(got, FeedError):
            # The same error may be raised again; its traceback would grow, and hold the frames of
            # the loop.
            raise got.with_traceback(None)
        return got

    @under_lock
    def close(self) -> None:
        """End the queue at once: what is in it is dropped, and whoever waits is woken."""
        # An error that the user has not seen yet is told after the close too.
        if not isinstance(self._ending, FeedError):
            self._ending = ClosedError("the feed is stopped")
        self.given = None
        self._batches.clear()
        self._wake_all()
        self._drained.notify_all()

    @under_lock
    def _take(self, event: OneShotEvent | None) -> deque[Batch] | LazyPosition | FeedError | None:
        """What is there; else the event is left for who puts the next batch, where one is given."""
        rest: deque[Batch] = deque()
        if self.given is None and self._batches and not isinstance(self._ending, ClosedError):
            # One assignment, without a call: an interrupt comes before it or after it.
            self.given, self._batches = self._batches, rest
        if self.given is not None:
            if self._enqueuer_waits:
                self._drained.notify_all()  # as in `_wake_user`
                self._enqueuer_waits = False
            return self.given
        if self._ending is None and event is not None:
            self._events.append(event)
            self._user_waits = True
        return self._ending

    def _wait_for_batch(self) -> deque[Batch] | LazyPosition | FeedError:
        started = time.monotonic()
        try:
            self.starved.start(started)
            return self._wait_until_taken(started)
        finally:
            self.starved.stop(time.monotonic())

    def _wait_until_taken(self, started: float) -> deque[Batch] | LazyPosition | FeedError:
        # A function of its own: CPython 3.13 and 3.14 do not run `finally` where a signal's handler
        # raises as a loop goes round that stands in its `try` itself (python/cpython#130279).
        if self._advance is not None:
            while (got := self._take(None)) is None:
                self._advance()
            return got
        # A new event for each wait: one whose wait was interrupted may have been set for a wait
        # that is over.
        while (got := self._take(event := OneShotEvent())) is None:
            if not event.wait(min(_SLOW_S, self._look_s)):
                waited = time.monotonic() - started
                logger.warning("no batch for %.0f s: %s", waited, self._describe_wait())
        return got

    def _wake_user(self) -> None:
        if self._user_waits:
            self._user_waits = False
            # All: a wait that was interrupted may have left its mark, and would be woken alone.
            self._wake_all()

    def _wake_all(self) -> None:
        # Woken first, taken off the list after: an interrupt in between wakes somebody twice, not
        # never.
        for event in self._events:
            event.ring()
        self._events = []

    def _raise_closed(self) -> None:
        if isinstance(self._ending, FeedError):
            raise ClosedError("the feed is stopped")
