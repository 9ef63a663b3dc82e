"""What a consumer's I/O thread and its user's thread share: batches, the lease, the failure."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.queue import CudaQueue
from feeder.devices.host import HostQueue
from feeder.errors import ClosedError, FeedError, RemoteError
from feeder.service.client.lease import ClientLease, ConsumerStats
from feeder.service.protocol.messages import Report
from feeder.waking import OneShotEvent
from feeder.workers.stream.batch import Batch


class Loading(deque[Batch]):
    """Stands in the place of the batches at hand while a state dict is being loaded.

    It is empty. One assignment drops the batches before it and says where to go on, so an interrupt
    finds both done or neither; a load that was interrupted is found and finished by the next call.
    Owned by the user's thread, and immutable once made.
    """

    def __init__(self, number: int, position: bytes) -> None:
        super().__init__()
        self.number = number
        """The number of this load; the first is 1."""
        self.position = position
        """The bytes of the state: where to go on."""


class SnapshotRequest:
    """A user's question for a snapshot: the I/O thread answers it, and the user's thread waits.

    The I/O thread owns the answer, but for a wait that is given up. A `Future` will not do: its
    wait, when interrupted, may release a lock that another thread holds (see `OneShotEvent`).
    """

    def __init__(self) -> None:
        self._event = OneShotEvent()
        self._answer: bytes | RemoteError | None = None
        self.given_up = False
        """Whether nobody waits for the answer any more."""

    def answer(self, answer: bytes | RemoteError) -> None:
        """Give the answer; the first one counts."""
        # The waiter may have given up just now, and has its own answer then.
        if self._answer is None:
            self._answer = answer
        self._event.ring()

    def result(self, timeout_s: float) -> bytes:
        """Wait for the snapshot's bytes; `RemoteError` if there is none. The user's thread's."""
        if not self._event.wait(timeout_s):
            # Told to the I/O thread first, which then need not send the question at all.
            self.given_up = True
            why = f"no answer within {timeout_s:g} s"
            self.answer(RemoteError(f"no snapshot: {why}; use state_dict()"))
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemoteError):
            raise answer
        return answer


class Inbox:
    """Where the I/O thread leaves what has come, and the user's thread finds it.

    The I/O thread writes all fields but two: `handed` and `begun` are the user's thread's. Each
    field is written by one assignment, so a reader without the lock sees an older value and never a
    torn one. The lock guards what `wait_for_opened` looks at together: the lease, the failure,
    the number of restarts, and the list of events to ring.
    """

    def __init__(self, describe_wait: Callable[[], str], landing: Landing | None = None) -> None:
        self._describe_wait = describe_wait
        self._began = time.monotonic()
        self.landing = landing
        """The GPU that batches go to; None if they stay on the host."""
        # Held for a few assignments, never around a wait: the user's thread waits for an event of
        # its own. `threading.Condition` would take the lock back in Python code after a wait, and
        # an interrupt just then makes it release what another thread holds.
        self._lock = threading.Lock()
        self._events: list[OneShotEvent] = []
        self.batches = self._make_queue()
        """The batches, in the order of the stream."""
        self.stats = ConsumerStats()
        """What this consumer counts of itself, for the server."""
        self.start = b""
        """The position at which the consumer was first given the queue, as a state dict's bytes."""
        self.received = 0
        """Batches received since the start, or since a state was loaded."""
        self.handed = 0
        """Batches handed to the user since the start; written by the user's thread."""
        self.begun = False
        """Whether the user has asked for a batch; written by the user's thread."""
        self.lease: ClientLease | None = None
        """The lease in force, otherwise the last one; None before the first."""
        self.num_opened = 0
        """How often a server has given the queue."""
        self.num_restarts = 0
        """The number of the load that the I/O thread did last."""
        self._opened_before = 0
        self.failure: FeedError | None = None
        """Why nothing more will come; the first reason stands."""

    def _make_queue(self) -> HostQueue | CudaQueue:
        if self.landing is None:
            # Without a bound: the credit bounds what a server may send, and the I/O thread must
            # never wait for the user's.
            return HostQueue(2**62, self._describe_wait)
        return self.landing.make_queue(self._describe_wait)

    def _renew_queue(self) -> None:
        # The clock of waits goes on: counters of one process never fall.
        starved = self.batches.starved
        self.batches = self._make_queue()
        self.batches.starved = starved

    @property
    def has_opened(self) -> bool:
        """Whether a server has given the queue since the last load."""
        return self.num_opened > self._opened_before

    def drop_in_child(self) -> None:
        """In a forked child: let go of the batches, which its parent hands out."""
        self._renew_queue()

    # ---- the I/O thread's

    def clear(self, number: int) -> None:
        """Forget all that has come: the consumer starts where the load of this number says."""
        with self._lock:
            # One thread reads at a time. A thread that still waits at the old queue gets an error
            # and not silence: nothing will ever be put there.
            self.batches.finish(ClosedError("another thread has loaded a state"))
            self._renew_queue()
            self.received, self.begun = 0, False
            # A load may follow a refused one, so the failure of the position before is void.
            self.failure = None
            self.num_restarts = number
            self._opened_before = self.num_opened

    def set_lease(self, lease: ClientLease, start: bytes) -> None:
        """Note that a server has given the queue."""
        with self._lock:
            self.lease, self.start = lease, start
            self.num_opened += 1
            self._wake_waiters()

    def finish(self, ending: Any) -> None:
        """After the batches that have come, the stream ends: at a position, or with an error. Of
        several errors the first is kept."""
        # Outside the lock, as the queue has its own.
        self.batches.finish(ending)
        if isinstance(ending, FeedError):
            with self._lock:
                self.failure = self.failure or ending
                self._wake_waiters()

    def summarise(self, rows: int, num_bytes: int) -> dict[str, Any]:
        """Return the consumer's figures; `rows` and `num_bytes` are what was handed out.

        Any thread may call it. Figures are read one after the other, so they may be of moments that
        lie microseconds apart.
        """
        stats, now = self.stats, time.monotonic()
        starved_s, age_s = self.batches.starved.seconds(now), now - self._began
        asked_at = stats.position_asked_at
        return {
            "batches": self.handed,
            "rows": rows,
            "bytes": num_bytes,
            "prefetched_batches": self.received - self.handed,
            "reconnects": max(0, self.num_opened - 1),
            "starved_s": starved_s,
            "starved_share": starved_s / max(age_s, 1e-9),
            "checked_s": stats.checked_s,
            "checksum_failures": stats.corrupt,
            "position_age_s": age_s if asked_at is None else now - asked_at,
            "age_s": age_s,
        }

    def _wake_waiters(self) -> None:
        for event in self._events:
            event.ring()
        self._events = []

    def report(self) -> Report:
        """Return what is new since the server's last report. The I/O thread's."""
        return self.stats.take_report(self.batches.starved.seconds(time.monotonic()))

    # ---- the user's thread's

    def wait_for_opened(self, number: int) -> None:
        """Wait until a server has given the queue after load `number` (0: none); raises what came
        instead."""
        while True:
            with self._lock:
                # An older load's lease or failure says nothing about this one.
                if self.num_restarts >= number:
                    if self.has_opened:
                        return
                    if self.failure is not None:
                        raise self.failure
                self._events.append(event := OneShotEvent())
            # Rung by each change, so what is waited for is looked at again.
            event.wait()
