"""Where fetchers hand chunks over: one lock, the lanes, and the bound on what is buffered.

A hand-over between threads costs more than the copy of a small chunk, so chunks go in bundles. A
bundle is handed over when it is full; where the merge waits for a lane it takes what is there
after a short grace, also from under a call that does not return.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from workers.errors import ClosedError, FeedError
from workers.ledger import Ledger
from workers.rota import Bundle, End, Lane, Rota
from workers.silence import Silence
from workers.stats import Stopwatch, StreamStats

GRACE_S = 0.0005
"""How long a merge that waits lets a bundle grow, so that a quick function is not interrupted
after every row."""

AHEAD_BYTES = 8 * 1024 * 1024
"""While the merge is busy no lane that has something to collect is called above this: else rows
leave every cache before they are copied (measured at 4.3 MB chunks: two to three times slower)."""

_MOST_COMPUTING = max(1, len(os.sched_getaffinity(0)) - 1)
"""Fetchers that compute while the merge is busy: one core is the merge's. Measured on two cores
with 4.3 MB chunks: a second fetcher beside the merge costs four tenths of what they get done."""


class Channel:
    """The lanes of a stream between its fetchers and its merge.

    Every method may be called from any thread. One thread collects.
    """

    def __init__(
        self,
        rota: Rota,
        ledger: Ledger,
        stats: StreamStats,
        *,
        timeout_s: float,
        marked: bool,
        describe: Callable[[int, int], tuple[int, int]],
        waited_since: Callable[[], float | None],
    ) -> None:
        self._rota = rota
        self._ledger = ledger
        self._stats = stats
        self._marked = marked
        self.describe = describe
        """Worker id and call number, as a user knows them, of a lane's call."""
        self._silence = Silence(rota, ledger, timeout_s, describe, waited_since)
        self._lock = threading.Lock()
        # Fetchers wait here for a lane that may be called. Notified one at a time; who finds a
        # lane wakes the next.
        self._callable = threading.Condition(self._lock)
        self._num_idle = 0
        # The merge waits here for a bundle of a lane that it wants.
        self._arrived = threading.Condition(self._lock)
        # The enqueuer waits here for room to assemble a batch.
        self._room = threading.Condition(self._lock)
        # Threads that only let time pass wait here, so that the end of the stream wakes them.
        self._closing = threading.Condition(self._lock)
        self._wanted: Sequence[Lane] = ()
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        self.closed = False
        """Whether the stream is over; read without the lock between two calls."""

    # ---- the fetchers' side

    def acquire(self) -> Lane | None:
        """Wait for a lane that may be called, and hold it; None when no call is left."""
        with self._lock:
            while True:
                now = time.monotonic()
                if self.closed or self._rota.finished:
                    self._callable.notify_all()
                    return None
                lane = self._pick(now)
                if lane is not None:
                    break
                self._num_idle += 1
                self._stats.idle.change(1, now)
                self._callable.wait(self._rota.next_ready(now))
                self._stats.idle.change(-1, time.monotonic())
                self._num_idle -= 1
            lane.running = True
            lane.ident = threading.get_ident()
            if lane.silent_since is None:
                lane.silent_since = now
            self._wake_fetcher(now)
            return lane

    def release(
        self,
        lane: Lane,
        rows: int,
        num_bytes: int,
        ending: End | FeedError | None = None,
        put_off_s: float = 0.0,
    ) -> None:
        """Give a lane back with what was got; `put_off_s` seconds pass before its next call. The
        caller acquires the next one, and wakes no other fetcher for this one's sake."""
        with self._lock:
            self._ledger.add(rows, num_bytes)
            self._ledger.ahead_bytes += num_bytes
            if rows:
                lane.silent_since = self._silence.hungry_since = None
            bundle = lane.take_open(ending, marked=self._marked)
            if bundle is not None and not self.closed:
                lane.bundles.append(bundle)
            lane.running, lane.ident = False, None
            lane.ready_at = time.monotonic() + put_off_s if put_off_s else 0.0
            if isinstance(ending, End):
                self._rota.end(lane, lane.next)
                lane.silent_since = None
            lane.halted = isinstance(ending, FeedError)
            epoch = lane.epoch
            self._rota.settle()
            if self._rota.lanes[0].epoch != epoch:
                self._callable.notify_all()
            if lane in self._wanted and lane.bundles and self._is_due(lane):
                # Cleared here and not by the merge: until that has the GIL again, each further
                # chunk would be handed over by itself.
                self._want(())
                self._arrived.notify()

    def _is_due(self, lane: Lane) -> bool:
        """Whether to wake the merge now. Within the grace it looks again by itself, and a switch
        of threads for each batch would cost more than the batch; unless much has come."""
        since = lane.wanted_since
        late = since is None or time.monotonic() - since > GRACE_S
        much = self._ledger.ahead_bytes >= AHEAD_BYTES // 2 or not self._ledger.below_bound
        return late or much

    def pause(self, seconds: float) -> bool:
        """Let time pass; returns at once, with False, when the stream is over."""
        if not seconds:
            return not self.closed
        with self._lock:
            return not self._closing.wait_for(lambda: self.closed, seconds)

    # ---- the merge's side

    def collect(self, wanted: int | None) -> list[Bundle]:
        """All bundles handed over, once there is one of lane `wanted` (None: of any lane).

        Raises `FetchTimeout` where the lane has given nothing for the feed's timeout, and
        `ClosedError` where the stream is over.
        """
        lanes = self._rota.lanes if wanted is None else (self._rota.lanes[wanted],)
        with self._lock:
            self._starved = not any(lane.bundles for lane in lanes)
            if self._starved:
                self._wait_for(lanes)
            elif any(lane.silent_since is not None for lane in lanes):
                self._silence.check(
                    lanes, time.monotonic()
                )  # Bundles without rows may come for ever.
            found: list[Bundle] = []
            for lane in self._rota.lanes:
                found.extend(lane.bundles)
                lane.bundles.clear()
            self._ledger.ahead_bytes = 0
            if self._num_idle:
                self._wake_fetcher(time.monotonic())
            return found

    def _wait_for(self, lanes: Sequence[Lane]) -> None:
        started = time.monotonic()
        if self._silence.hungry_since is None:
            self._silence.hungry_since = started
        self._want(lanes, started)
        clocks = self._clocks(lanes)
        for clock in clocks:
            clock.start(started)
        self._wake_fetcher(started)
        try:
            pause = GRACE_S
            while not any(lane.bundles for lane in lanes):
                if self.closed:
                    raise ClosedError("the feed is stopped")
                if not self._arrived.wait(pause) and not self._take_open(lanes):
                    pause = self._silence.check(lanes, time.monotonic())
        finally:
            self._want(())
            now = time.monotonic()
            for clock in clocks:
                clock.stop(now)

    def _clocks(self, lanes: Sequence[Lane]) -> Sequence[Stopwatch]:
        """What a wait for some lanes is counted in: a single one is named."""
        stats = self._stats
        if len(lanes) > 1:
            return (stats.chunks,)
        return stats.chunks, stats.lanes[lanes[0].number]

    def _want(self, lanes: Sequence[Lane], since: float | None = None) -> None:
        for lane in self._wanted:
            lane.wanted_since = None
        for lane in lanes:
            lane.wanted_since = since
        self._wanted = lanes

    def _take_open(self, lanes: Sequence[Lane]) -> bool:
        """Take what fetchers that hold the lanes have got so far; whether that was anything."""
        taken = False
        for lane in lanes:
            bundle = lane.take_open(None, marked=self._marked) if lane.running else None
            if bundle is not None:
                lane.bundles.append(bundle)
                lane.silent_since = time.monotonic()
                taken = True
        return taken

    # ---- the bound

    def count(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes into the buffers (or, if negative, out of them)."""
        if rows or num_bytes or kept_rows:
            with self._lock:
                self._ledger.add(rows, num_bytes, kept_rows)
                self._make_use_of_room()

    def queue(self, device: int, batches: int) -> None:
        """Count batches into a device queue."""
        with self._lock:
            self._ledger.waiting[device] += batches
            self._stats.queued[device] += batches

    def hand_out(
        self, device: int, batches: int, rows: int, num_bytes: int, kept_rows: int
    ) -> None:
        """Batches of a device have been handed out: they are buffered no longer."""
        with self._lock:
            self._ledger.add(-rows, -num_bytes, -kept_rows)
            self._ledger.waiting[device] -= batches
            self._make_use_of_room()

    def _make_use_of_room(self) -> None:
        if self._num_idle:
            self._wake_fetcher(time.monotonic())
        if self._ledger.below_bound or self._ledger.starving:
            self._room.notify()

    def learn(self, row_bytes: int) -> None:
        """All rows of the stream have so many bytes."""
        self._ledger.row_bytes = row_bytes

    def wait_for_room(self) -> None:
        """Wait until a batch may be assembled: below the bound, or where a device has none. A
        copy adds to what is buffered for as long as its chunk is kept."""
        if self._ledger.below_bound:
            return
        room = self._stats.room
        with self._lock:
            room.start(time.monotonic())
            while not (self.closed or self._ledger.below_bound or self._ledger.starving):
                self._room.wait()
            room.stop(time.monotonic())

    def close(self) -> None:
        """End the stream: whoever waits here is woken, and no call is started any more."""
        with self._lock:
            self.closed = True
            for lane in self._rota.lanes:
                lane.bundles.clear()
            for condition in (self._callable, self._arrived, self._room, self._closing):
                condition.notify_all()

    def _pick(self, now: float) -> Lane | None:
        ledger, wanted = self._ledger, self._wanted
        if not ledger.below_bound:
            due = [lane for lane in wanted if not lane.bundles] if ledger.starving else ()
            return self._rota.first_callable(now, due)
        # While the merge waits for one lane the others may run ahead; while it is busy, what
        # they fetch would only grow cold in memory, and they would take its core.
        ahead = bool(wanted) or ledger.ahead_bytes < AHEAD_BYTES
        compute = self._starved or self._rota.num_computing < _MOST_COMPUTING
        first = self._rota.first_callable(now, wanted)
        return first or self._rota.pick(now, ahead=ahead, compute=compute)

    def _wake_fetcher(self, now: float) -> None:
        if self._num_idle and self._pick(now) is not None:
            self._callable.notify()
