"""What a consumer's I/O thread and its user's thread have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.queue import CudaQueue
from feeder.devices.host import HostQueue
from feeder.errors import FeedError
from feeder.protocol.messages import Report
from feeder.transport.accounts import Tally
from feeder.transport.reading import Reading


class Inbox:
    """Batches that have come and were not taken yet, and what the user's thread waits for else.

    The I/O thread writes; the user's thread waits and reads, and counts `handed`.
    """

    def __init__(self, describe_wait: Callable[[], str], landing: Landing | None = None) -> None:
        self._describe_wait = describe_wait
        self.landing = landing
        """The GPU that batches go to; None where they stay on the host."""
        self._changed = threading.Condition()
        self.batches = self._make_queue()
        """The batches; credit bounds their number."""
        self.tally = Tally()
        """What this consumer counts of itself."""
        self.received = 0
        """Batches received since the start."""
        self.handed = 0
        """Batches handed to the user since the start."""
        self.reading: Reading | None = None
        """The lease, or the last one."""
        self.num_opened = 0
        """How often a server has given the queue."""
        self.num_restarts = 0
        """How often the consumer has started elsewhere."""
        self._opened_before = 0
        self.failure: FeedError | None = None
        """Why nothing more will come."""

    def _make_queue(self) -> HostQueue | CudaQueue:
        if self.landing is None:
            return HostQueue(2**62, self._describe_wait)
        return self.landing.make_queue(self._describe_wait)

    def drop(self) -> None:
        """In a forked child: the batches are its parent's to hand out."""
        starved = self.batches.starved
        self.batches = self._make_queue()
        self.batches.starved = starved

    # ---- the I/O thread's

    def clear(self) -> None:
        """Nothing has come: the consumer starts elsewhere."""
        with self._changed:
            starved = self.batches.starved
            self.batches = self._make_queue()
            self.batches.starved = starved
            self.received = 0
            self.failure = None
            self.num_restarts += 1
            self._opened_before = self.num_opened

    def open(self, reading: Reading) -> None:
        """A server has given the queue."""
        with self._changed:
            self.reading = reading
            self.num_opened += 1
            self._changed.notify_all()

    def fail(self, error: FeedError) -> None:
        """Nothing more will come, for the first reason that was given."""
        self.batches.finish(error)
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def report(self) -> Report:
        """What has come to be since the server was last told."""
        return self.tally.news(self.batches.starved.read(time.monotonic()))

    # ---- the user's thread's

    def wait_for_opened(self, num_restarts: int) -> None:
        """Wait until a server has given the queue after so many restarts; raises what came
        instead."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.num_restarts >= num_restarts
                    and (self.num_opened > self._opened_before or self.failure)
                )
            )
            if self.num_opened <= self._opened_before and self.failure is not None:
                raise self.failure
