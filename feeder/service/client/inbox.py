"""What a consumer's I/O thread and its user's thread have in common."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.queue import CudaQueue
from feeder.devices.host import HostQueue
from feeder.devices.one_shot_event import OneShotEvent
from feeder.errors import ClosedError, FeedError
from feeder.service.client.lease import ClientLease, ConsumerStats
from feeder.service.protocol.messages import Report
from feeder.workers.stream.batch import Batch


class Loading(deque[Batch]):
    """No batches: what the user's thread has in their place until the consumer stands at the
    position of a state dict. One assignment drops those before and says where to go on, so an
    interrupt finds both or nothing."""

    def __init__(self, number: int, position: bytes) -> None:
        super().__init__()
        self.number = number
        """How often a state was loaded, this one counted."""
        self.position = position
        """Where to go on."""


class Inbox:
    """Batches that have come and were not taken yet, and what the user's thread waits for else.

    The I/O thread writes; the user's thread waits and reads, and counts `handed`.
    """

    def __init__(self, describe_wait: Callable[[], str], landing: Landing | None = None) -> None:
        self._describe_wait = describe_wait
        self._began = time.monotonic()
        self.landing = landing
        """The GPU that batches go to; None where they stay on the host."""
        self._lock = threading.Lock()
        self._bells: list[OneShotEvent] = []
        self.batches = self._make_queue()
        """The batches; credit bounds their number."""
        self.tally = ConsumerStats()
        """What this consumer counts of itself."""
        self.start = b""
        """Where the consumer stood when it was first given the queue, as a state dict has it."""
        self.received = 0
        """Batches received since the start."""
        self.handed = 0
        """Batches handed to the user since the start."""
        self.begun = False
        """Whether the user has asked for a batch."""
        self.reading: ClientLease | None = None
        """The lease, or the last one."""
        self.num_opened = 0
        """How often a server has given the queue."""
        self.num_restarts = 0
        """The number of the state that was loaded last."""
        self._opened_before = 0
        self.failure: FeedError | None = None
        """Why nothing more will come."""

    def _make_queue(self) -> HostQueue | CudaQueue:
        if self.landing is None:
            return HostQueue(2**62, self._describe_wait)
        return self.landing.make_queue(self._describe_wait)

    @property
    def has_opened(self) -> bool:
        """Whether a server has given the queue since a state was loaded last."""
        return self.num_opened > self._opened_before

    def drop(self) -> None:
        """In a forked child: the batches are its parent's to hand out."""
        starved = self.batches.starved
        self.batches = self._make_queue()
        self.batches.starved = starved

    # ---- the I/O thread's

    def clear(self, number: int) -> None:
        """Nothing has come: the consumer starts where state `number` says."""
        with self._lock:
            starved = self.batches.starved
            # One thread reads at a time; another one that waits has nothing to wait for any more.
            self.batches.finish(ClosedError("another thread has loaded a state"))
            self.batches = self._make_queue()
            self.batches.starved = starved
            self.received, self.begun = 0, False
            self.failure = None
            self.num_restarts = number
            self._opened_before = self.num_opened

    def open(self, reading: ClientLease, start: bytes) -> None:
        """A server has given the queue."""
        with self._lock:
            self.reading, self.start = reading, start
            self.num_opened += 1
            self._ring()

    def fail(self, error: FeedError) -> None:
        """Nothing more will come, for the first reason that was given."""
        self.batches.finish(error)
        with self._lock:
            self.failure = self.failure or error
            self._ring()

    def stats(self, rows: int, num_bytes: int) -> dict[str, Any]:
        """What has come and been done; `rows` and `num_bytes` of it have been handed out. Any
        thread may ask."""
        tally, now = self.tally, time.monotonic()
        starved_s, age_s = self.batches.starved.seconds(now), now - self._began
        asked_at = tally.asked_at
        return {
            "batches": self.handed,
            "rows": rows,
            "bytes": num_bytes,
            "prefetched_batches": self.received - self.handed,
            "reconnects": max(0, self.num_opened - 1),
            "starved_s": starved_s,
            "starved_share": starved_s / max(age_s, 1e-9),
            "checked_s": tally.checked_s,
            "checksum_failures": tally.corrupt,
            "position_age_s": age_s if asked_at is None else now - asked_at,
            "age_s": age_s,
        }

    def _ring(self) -> None:
        for bell in self._bells:
            bell.ring()
        self._bells = []

    def report(self) -> Report:
        """What has come to be since the server was last told."""
        return self.tally.news(self.batches.starved.seconds(time.monotonic()))

    # ---- the user's thread's

    def wait_for_opened(self, number: int) -> None:
        """Wait until a server has given the queue at state `number`, 0 where none was loaded;
        raises what came instead."""
        while True:
            with self._lock:
                if self.num_restarts >= number:
                    if self.has_opened:
                        return
                    if self.failure is not None:
                        raise self.failure
                self._bells.append(bell := OneShotEvent())
            bell.wait()
