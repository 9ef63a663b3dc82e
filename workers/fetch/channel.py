"""Where fetchers hand chunks over: one lock, the partitions, and the bound on what is buffered.

A hand-over between threads costs more than the copy of a small chunk, so chunks go in bundles. A
bundle is handed over when it is full; where the merge waits for a partition it takes what is there
after a short grace, also from under a call that does not return. A fetcher whose calls are quick,
or whose chunks are passed on, takes no time to hand over at all: it goes on with the merge itself
(`lead`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from feeder.workers.errors import ClosedError, FeedError, FetchTimeout, in_words
from feeder.workers.fetch.policy import GRACE_S, LOOK_S, ConcurrencyPolicy
from feeder.workers.fetch.scheduler import BufferBudget, ChunkList, End, Held, Partition, Scheduler
from feeder.workers.fetch.threads import WaitQueue, stack
from feeder.workers.stats import StreamStats

# ---- When a fetch function has given nothing for too long. Rules; the channel's lock guards them.


SLOW_S = 10.0
"""No wait for a partition is longer before it is looked at again."""


class StallDetector:
    """The timeout of a stream: it counts from when a batch is waited for, the last row came, or
    the call began, whichever was last."""

    def __init__(
        self,
        rota: Scheduler,
        ledger: BufferBudget,
        timeout_s: float,
        describe: Callable[[int, int], tuple[int, int]],
        waited_since: Callable[[], float | None],
    ) -> None:
        self._rota = rota
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._describe = describe
        self._waited_since = waited_since
        self.hungry_since: float | None = None
        """Since when the merge has waited without a row having come."""

    def check(self, partitions: Sequence[Partition], now: float) -> float:
        """Seconds to wait on for partitions; raises `FetchTimeout` where there are none left."""
        waited_since = self._waited_since()
        if waited_since is None or self._held_back(partitions):
            return min(SLOW_S, self._timeout_s / 4)
        suspects = [partition for partition in partitions if partition.silent_since is not None]
        suspects = suspects or [
            partition for partition in self._rota.partitions if partition.running
        ]
        last = max(suspects, key=lambda partition: partition.silent_since or 0.0, default=None)
        silent_since = last.silent_since or 0.0 if last is not None else 0.0
        since = max(waited_since, self.hungry_since or 0.0, silent_since)
        if now - since >= self._timeout_s:
            raise self._timeout(last if last is not None else partitions[0], now)
        return min(SLOW_S, since + self._timeout_s - now)

    def _held_back(self, partitions: Sequence[Partition]) -> bool:
        """Whether it is the user who is waited for: the bound is reached, batches are there."""
        ledger = self._ledger
        idle = not any(
            partition.running or partition.silent_since is not None for partition in partitions
        )
        return idle and not (ledger.below_bound or ledger.starving)

    def _timeout(self, partition: Partition, now: float) -> FetchTimeout:
        worker_id, call = self._describe(partition.number, partition.next)
        failure = partition.failure
        why = f"; its last call raised {in_words(failure)}" if failure else ""
        cure = "raise timeout, or end the epoch with StopIteration"
        lasted = now - max(partition.called_at, partition.silent_since or 0.0)
        # Else calls return, and give nothing.
        if partition.running and lasted > self._timeout_s / 2:
            why += f"; the call was made {lasted:.1f} s ago and has not returned"
            cure = "see in its stack what it waits for, or raise timeout"
        error = FetchTimeout(
            f"worker {worker_id}, call {call}: no chunk for {self._timeout_s} s{why}; {cure}",
            worker_id=worker_id,
            call=call,
        )
        error.__cause__ = failure
        if partition.running:
            error.add_note(f"the call has not returned:\n{stack(partition.ident)}")
        return error


class Channel:
    """The partitions of a stream between its fetchers and its merge.

    Every method may be called from any thread. One thread at a time collects.
    """

    def __init__(
        self,
        rota: Scheduler,
        ledger: BufferBudget,
        stats: StreamStats,
        *,
        timeout_s: float,
        marked: bool,
        axis: int,
        describe: Callable[[int, int], tuple[int, int]],
        waited_since: Callable[[], float | None],
    ) -> None:
        self._rota = rota
        self._ledger = ledger
        self._stats = stats
        self._marked = marked
        self.describe = describe
        """Worker id and call number, as a user knows them, of a partition's call."""
        self._silence = StallDetector(rota, ledger, timeout_s, describe, waited_since)
        self._lock = threading.Lock()
        # Fetchers wait here for a partition that may be called. Who finds one wakes the next.
        self._idle = WaitQueue(self._lock)
        # The enqueuer waits here for a bundle of a partition that the merge wants.
        self._arrived = threading.Condition(self._lock)
        # Who merges waits here for room to assemble a batch.
        self._room = threading.Condition(self._lock)
        # Threads that only let time pass wait here, so that the end of the stream wakes them.
        self._closing = threading.Condition(self._lock)
        self._dispatch = ConcurrencyPolicy(rota, ledger, stats, axis)
        self._lead = self._dispatch.lead
        self.closed = False
        """Whether the stream is over; read without the lock between two calls."""

    # ---- the fetchers' side

    def acquire(self) -> Partition | None:
        """Wait for a partition that may be called, and hold it; None when no call is left."""
        with self._lock:
            while True:
                now = time.monotonic()
                if self.closed or self._rota.finished:
                    self._idle.notify_all()
                    return None
                partition = self._dispatch.pick(now)
                if partition is not None:
                    break
                self._stats.idle.change(1, now)
                self._idle.wait(self._rota.next_ready(now))
                self._stats.idle.change(-1, time.monotonic())
            partition.running = True
            self._ledger.num_calling += 1
            partition.ident = threading.get_ident()
            if partition.silent_since is None:
                partition.silent_since = now
            self._wake_fetcher(now)
            return partition

    def release(
        self,
        partition: Partition,
        rows: int,
        num_bytes: int,
        ending: End | FeedError | None = None,
        put_off_s: float = 0.0,
    ) -> bool:
        """Give a partition back with what was got; `put_off_s` seconds pass before its next call.
        The caller acquires the next one, and wakes no other fetcher for this one's sake. True where
        it is to lead before."""
        with self._lock:
            self._ledger.num_calling -= 1
            self._ledger.add(rows, num_bytes)
            self._ledger.ahead_bytes += num_bytes
            if rows:
                partition.silent_since = self._silence.hungry_since = None
            bundle = partition.take_open(ending, marked=self._marked)
            if bundle is not None and not self.closed:
                partition.bundles.append(bundle)
            partition.running, partition.ident = False, None
            partition.ready_at = time.monotonic() + put_off_s if put_off_s else 0.0
            if isinstance(ending, End):
                self._rota.end(partition, partition.next)
                partition.silent_since = None
            partition.halted = isinstance(ending, FeedError)
            epoch = partition.epoch
            self._rota.settle()
            if self._rota.partitions[0].epoch != epoch:
                self._idle.notify_all()
            now = time.monotonic()
            if self.closed or not self._dispatch.is_due(partition, now):
                return False
            # Cleared here and not by the merge: until that has the GIL again, each further
            # chunk would be handed over by itself.
            self._dispatch.want(())
            if not (partition.is_quick or partition.leads):
                self._arrived.notify()
                return False
            self._dispatch.begin_lead(now)
            return True

    def pause(self, seconds: float) -> bool:
        """Let time pass; returns at once, with False, when the stream is over."""
        if not seconds:
            return not self.closed
        with self._lock:
            return not self._closing.wait_for(lambda: self.closed, seconds)

    # ---- the merge's side

    def collect(self, wanted: int | None) -> list[ChunkList]:
        """All bundles handed over, once there is one of partition `wanted` (None: of any
        partition).

        Raises `FetchTimeout` where the partition has given nothing for the feed's timeout, and
        `ClosedError` where the stream is over.
        """
        with self._lock:
            partitions = self._rota.partitions_of(wanted)
            if self._dispatch.is_held_back(partitions):
                self._wait_for_room()
            if not self._has_come(partitions):
                self._wait_for(partitions)
            return self._take_all()

    def collect_or_leave(self, wanted: int | None) -> list[ChunkList] | None:
        """The same for who leads: None where there is nothing; then the enqueuer waits on."""
        with self._lock:
            partitions = self._rota.partitions_of(wanted)
            if self._dispatch.is_held_back(partitions):
                self._wait_for_room()
            if self.closed:
                raise ClosedError("the feed is stopped")
            if self._has_come(partitions):
                return self._take_all()
            now = time.monotonic()
            self._await(partitions, now)
            self._lead.end()
            if self._dispatch.looks_in > LOOK_S:
                self._arrived.notify()
            return None

    def give_back(self, error: BaseException | None) -> None:
        """Who leads has come to the end of the stream, or to an error."""
        with self._lock:
            # Nobody asks any more after the close, and an error holds what its frames do.
            self._lead.finish(None if self.closed else error)
            self._arrived.notify()

    def _has_come(self, partitions: Sequence[Partition]) -> bool:
        """Whether there is a bundle of one of the partitions."""
        if not self._dispatch.has_come(partitions):
            return False
        if any(partition.silent_since is not None for partition in partitions):
            # Bundles without rows may come for ever.
            self._silence.check(partitions, time.monotonic())
        return True

    def _take_all(self) -> list[ChunkList]:
        found: list[ChunkList] = []
        for partition in self._rota.partitions:
            found.extend(partition.bundles)
            partition.bundles.clear()
        self._ledger.ahead_bytes = 0
        if self._idle:
            self._wake_fetcher(time.monotonic())
        return found

    def _wait_for(self, partitions: Sequence[Partition]) -> None:
        """Wait in the enqueuer's thread for partitions, or for those that who led was waiting
        for."""
        now = time.monotonic()
        dispatch, lead = self._dispatch, self._lead
        pause, seen = min(GRACE_S, dispatch.be_patient(partitions, now)), lead.times
        self._await(partitions, now)
        self._wake_fetcher(now)
        try:
            while not lead.take_end():
                if self.closed:
                    raise ClosedError("the feed is stopped")
                if not lead.active and any(partition.bundles for partition in dispatch.awaited):
                    return
                dispatch.looks_in = pause
                if self._arrived.wait(pause):
                    pause = GRACE_S
                elif dispatch.lose_patience():
                    pause = GRACE_S
                    self._wake_fetcher(time.monotonic())
                elif lead.times != seen:
                    pause, seen = LOOK_S, lead.times
                    self._take_open(dispatch.slow_partitions(time.monotonic()))
                else:
                    pause = SLOW_S if lead.active else self._look()
        finally:
            dispatch.go_on(time.monotonic())

    def _look(self) -> float:
        """See to calls that take long; returns for how long to wait on, 0 where there is something
        to go on with."""
        partitions, now = self._dispatch.awaited, time.monotonic()
        self._dispatch.slow_down()
        self._wake_fetcher(now)
        return 0.0 if self._take_open(partitions) else self._silence.check(partitions, now)

    def _take_open(self, partitions: Sequence[Partition]) -> bool:
        return self._dispatch.take_open(partitions, time.monotonic(), marked=self._marked)

    def _await(self, partitions: Sequence[Partition], now: float) -> None:
        """From now on the merge waits for these partitions."""
        if self._silence.hungry_since is None:
            self._silence.hungry_since = now
        self._dispatch.wait(partitions, now)

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

    def hand_out(self, device: int, held: Held) -> None:
        """Batches of a device have been handed out: they are buffered no longer. Harmless when
        said again, as where an interrupt came before all had been woken."""
        with self._lock:
            self._ledger.hand_out(device, held)
            self._make_use_of_room()

    def _make_use_of_room(self) -> None:
        if self._idle:
            self._wake_fetcher(time.monotonic())
        if self._ledger.below_bound or self._ledger.starving:
            # All: the user's thread may have been interrupted here, and one that it had woken be
            # listed still, who would be woken alone. Nobody waits but who makes batches.
            self._room.notify_all()

    def learn(self, row_bytes: int) -> None:
        """All rows of the stream have so many bytes."""
        self._ledger.row_bytes = row_bytes

    def wait_for_room(self) -> None:
        """Wait until a batch may be copied: that adds to what is buffered while chunks are kept."""
        if not self._ledger.below_bound:
            with self._lock:
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        room, now, waiting = self._stats.room, time.monotonic(), int(self._lead.active)
        room.start(now)
        self._stats.idle.change(waiting, now)
        while not (self.closed or self._ledger.below_bound or self._ledger.starving):
            self._room.wait()
        now = time.monotonic()
        room.stop(now)
        self._stats.idle.change(-waiting, now)

    def close(self) -> None:
        """End the stream: whoever waits here is woken, and no call is started any more."""
        with self._lock:
            self.closed = True
            for partition in self._rota.partitions:
                partition.bundles.clear()
            for condition in (self._idle, self._arrived, self._room, self._closing):
                condition.notify_all()

    def _wake_fetcher(self, now: float) -> None:
        if self._idle and self._dispatch.pick(now, self._idle.coming) is not None:
            self._idle.notify()
