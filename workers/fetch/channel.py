"""Where fetchers hand chunks over to the merge: one lock, and everything that it guards.

A hand-over between threads costs more than the copy of a small chunk, so chunks go in chunk lists.
A chunk list is handed over when it is full. Where the merge waits for a partition it takes what is
there after a short grace, also from under a call that does not return.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from feeder.workers.errors import ClosedError, FetchTimeout, in_words
from feeder.workers.fetch.policy import ConcurrencyPolicy
from feeder.workers.fetch.scheduler import (
    BufferBudget,
    CallsReport,
    Held,
    Partition,
    Scheduler,
    Turn,
)
from feeder.workers.fetch.threads import Wakes, stack
from feeder.workers.spec import CallNames
from feeder.workers.stats import Stopwatch, StreamStats
from feeder.workers.stream.chunks import ChunkList, count_bytes
from feeder.workers.tuning import TUNING, Tuning

_T = TypeVar("_T")


class User(Protocol):
    """Somebody who may be waiting for a batch."""

    @property
    def waited_since(self) -> float | None:
        """Since when (monotonic clock); None while not."""


# ---- The timeout: a fetch function that has given nothing for too long


class StallDetector:
    """The timeout of a stream. It counts from when a user began to wait, the last row came, or the
    call began, whichever was last: a slow call behind a full buffer is no fault.

    Owner: the channel, which calls every method under its lock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        budget: BufferBudget,
        timeout_s: float,
        names: CallNames,
        users: Sequence[User],
        tuning: Tuning,
        stack_of: Callable[[int | None], str],
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._stack_of = stack_of
        self._timeout_s = timeout_s
        self._names = names
        self._users = users
        # Four looks within the timeout, where nobody waits for a batch yet.
        self._calm_s = min(tuning.slow_look_s, timeout_s / 4)
        self._longest_s = tuning.slow_look_s
        self.hungry_since: float | None = None
        """Since when the merge has waited without a row having come."""

    def check(self, partitions: Sequence[Partition], now: float) -> float:
        """Seconds to wait on for partitions; raises `FetchTimeout` where there are none left."""
        waits = [user.waited_since for user in self._users]
        waited_since = min((since for since in waits if since is not None), default=None)
        if waited_since is None or self._waits_for_user(partitions):
            return self._calm_s  # Nobody waits, or what is missing is the user, who takes no batch.
        suspects = [partition for partition in partitions if partition.silent_since is not None]
        suspects = suspects or [
            partition for partition in self._scheduler.partitions if partition.running
        ]
        last = max(suspects, key=lambda partition: partition.silent_since or 0.0, default=None)
        silent_since = last.silent_since or 0.0 if last is not None else 0.0
        since = max(waited_since, self.hungry_since or 0.0, silent_since)
        if now - since >= self._timeout_s:
            raise self._timeout(last if last is not None else partitions[0], now)
        return min(self._longest_s, since + self._timeout_s - now)

    def _waits_for_user(self, partitions: Sequence[Partition]) -> bool:
        """Whether the user is late: the bound is reached, and batches are there."""
        budget = self._budget
        idle = not any(
            partition.running or partition.silent_since is not None for partition in partitions
        )
        return idle and not (budget.below_bound or budget.starving)

    def _timeout(self, partition: Partition, now: float) -> FetchTimeout:
        worker_id, call = self._names.of_call(partition.number, partition.next)
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
            told = self._stack_of(partition.ident)
            error.add_note(f"the call has not returned:\n{told}")
        return error


class Channel:
    """The partitions of a stream between its fetchers and its merge.

    Any thread may call any method; one thread at a time collects. One lock guards the scheduler,
    the budget, the policy and all that stands here. Nobody calls user code while holding it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        budget: BufferBudget,
        stats: StreamStats,
        names: CallNames,
        users: Sequence[User],
        *,
        timeout_s: float,
        tuning: Tuning = TUNING,
        waits: bool = False,
        stack_of: Callable[[int | None], str] = stack,
    ) -> None:
        """`waits`: calls are made in processes, and fetcher threads wait for them. `stack_of` tells
        the stack of the call that a thread has made."""
        self._scheduler = scheduler
        self._budget = budget
        self._stats = stats
        self._marked = names.spec.seekable
        self._axis = names.spec.axes[0]
        self._silence = StallDetector(scheduler, budget, timeout_s, names, users, tuning, stack_of)
        self._policy = ConcurrencyPolicy(
            scheduler, budget, names.spec.batch_size, tuning, waits=waits
        )
        # Clocks of the wait for chunks that is going on.
        self._clocks: Sequence[Stopwatch] = ()
        self._lock = threading.Lock()
        # Fetchers wait here for a partition that may be called.
        self._wakes = Wakes()
        self._num_idle = 0
        # When the first of them goes on by itself, to call what was put off.
        self._wakes_at = math.inf
        # What fetchers hold.
        self._turns: list[Turn] = []
        # Whether one was woken that has not gone on yet. A fetcher that finds a partition wakes the
        # next, so one at a time is enough, and none is woken for what another will find.
        self._is_coming = False
        # The enqueuer thread waits here for a chunk list of a partition that the merge wants.
        self._arrived = threading.Condition(self._lock)
        # Whoever merges waits here for room to assemble a batch.
        self._room = threading.Condition(self._lock)
        # Threads that let time pass, or wait for a call that is made apart, wait here, so that the
        # end of the stream wakes them.
        self._closing = threading.Condition(self._lock)
        self.closed = False
        """Whether the stream is over."""
        self.cuts_short = False
        """Whether chunk lists end with the call that is under way: the stream is over, or there is
        no room for what chunks have grown to. Fetchers read it without the lock between two
        calls."""

    # ---- the fetchers' side

    def acquire(self, most: int) -> Turn | None:
        """Wait for partitions that may be called, and hold so many at most; None when no call is
        left."""
        waits, until = False, math.inf
        while True:
            with self._lock:
                now = time.monotonic()
                if waits:
                    self._num_idle -= 1
                    self._is_coming = False
                    # Whoever else waits with an end wakes by itself; to wake one more does no harm.
                    if until == self._wakes_at:
                        self._wakes_at = math.inf
                    self._stats.idle.change(-1, now)
                if self.closed or self._scheduler.finished:
                    self._wake_all_fetchers()
                    return None
                self._scheduler.end_pauses(now)
                partitions = self._policy.pick(most)
                if partitions:
                    limits, ident = self._policy.list_limits(), threading.get_ident()
                    self._budget.begin_calls(len(partitions))
                    for partition in partitions:
                        self._scheduler.hold(partition, ident, limits, now)
                    turn = Turn(partitions)
                    self._turns.append(turn)
                    self._wake_fetcher()
                    return turn
                until = self._scheduler.pause_ends
                self._wakes_at = min(self._wakes_at, until)
                self._num_idle += 1
                self._stats.idle.change(1, now)
                waits = True
            self._wakes.wait(until - now)

    def release(self, turn: Turn) -> None:
        """Give partitions back with what was got.

        No other fetcher is woken for their sake: the caller acquires next.
        """
        with self._lock:
            now = time.monotonic()
            self._turns.remove(turn)
            self._take_back(turn, now)
            self.cuts_short = self.closed or self._budget.is_outgrown
            if self.closed:
                # Nobody collects any more, and rows that are kept would outlive the feed.
                self._scheduler.drop_all()
            elif self._policy.lists_came(now):
                self._arrived.notify()

    def _take_back(self, turn: Turn, now: float) -> None:
        """Take back the partitions of a turn that have been called, and those that have not been
        begun."""
        scheduler, begins_epoch = self._scheduler, False
        for called in turn.take_done():
            begins_epoch |= scheduler.give_back(called, now, self._marked)
            self._policy.note_calls(called.partition, called.report)
            counted = scheduler.take_counted(called.partition)
            self._budget.end_calls(called.report, *counted)
            if called.report.rows:
                self._silence.hungry_since = None
        while (partition := turn.take_next()) is not None:
            begins_epoch |= scheduler.let_go(partition)
            self._budget.end_calls(CallsReport())
        # All partitions may be called at once, and a stream that has ended lets all go home.
        if begins_epoch:
            self._wake_all_fetchers()

    def pause(self, seconds: float) -> bool:
        """Let time pass; returns at once, with False, when the stream is over."""
        if not seconds:
            return not self.closed
        with self._lock:
            return not self._closing.wait_for(lambda: self.closed, seconds)

    def wait_for(self, is_there: Callable[[], bool], seconds: float) -> bool:
        """Wait for what another thread gets and tells of; whether it is there. Returns at once when
        the stream is over."""
        with self._lock:
            self._closing.wait_for(lambda: self.closed or is_there(), seconds)
            return is_there()

    def tell(self) -> None:
        """Something is there that another thread may wait for."""
        with self._lock:
            self._closing.notify_all()

    def run_steps(self, steps: Generator[float, None, _T]) -> _T | None:
        """Take steps, each of which says how long to wait after it; returns what they come to, None
        where the stream is over before."""
        try:
            while self.pause(next(steps)):
                pass
        except StopIteration as end:
            value: _T = end.value
            return value
        return None

    def report_progress(self, partition: Partition) -> None:
        """A fetcher that gives no chunk yet is busy with the partition."""
        with self._lock:
            partition.report_progress(time.monotonic())

    # ---- the merge's side

    def collect(self, wanted: int | None) -> list[ChunkList]:
        """All chunk lists handed over, once there is one of partition `wanted` (None: of any
        partition). For the enqueuer thread.

        Raises `FetchTimeout` where the partition has given nothing for the feed's timeout, and
        `ClosedError` where the stream is over.
        """
        with self._lock:
            partitions = self._scheduler.partitions_of(wanted)
            self._wait_while_held_back(partitions)
            if not self._find(partitions):
                self._wait_for(partitions)
            return self._take_all()

    def _find(self, partitions: Sequence[Partition]) -> bool:
        """Whether there is a chunk list of one of the partitions."""
        if not self._policy.merge_collects(partitions):
            return False
        if any(partition.silent_since is not None for partition in partitions):
            # Chunk lists without rows may come for ever.
            self._silence.check(partitions, time.monotonic())
        return True

    def _wait_while_held_back(self, partitions: Sequence[Partition]) -> None:
        """Wait for room where nothing comes of the partitions because none of them may be called,
        for the bound. As a wait for chunks it would be blamed on the calls."""
        if self._budget.below_bound or self._budget.starving:
            return
        if not any(partition.chunk_lists or partition.running for partition in partitions):
            self._wait_for_room()

    def _take_all(self) -> list[ChunkList]:
        # All, and not the wanted partition's alone: each further collect would be another wait.
        found = self._scheduler.take_all()
        self._budget.collect()
        self._wake_fetcher()
        return found

    def _wait_for(self, partitions: Sequence[Partition]) -> None:
        """Wait in the enqueuer thread for partitions."""
        policy = self._policy
        policy.enqueuer_waits()
        self._await(partitions, time.monotonic())
        self._wake_fetcher()
        try:
            while not any(one.chunk_lists for one in partitions):
                if self.closed:
                    raise ClosedError("the feed is stopped")
                if self._arrived.wait(policy.looks_in):
                    policy.enqueuer_waits()
                else:
                    self._look(time.monotonic())
        finally:
            self._stop_clocks(time.monotonic())
            policy.merge_resumes()

    def _look(self, now: float) -> None:
        """Look after calls that take long; in the enqueuer thread, once its wait is over."""
        # The partitions after a call that does not return do not wait for it.
        for turn in self._turns:
            self._take_back(turn, now)
        # Rows that exist are not held back by the call after them.
        partitions = self._policy.enqueuer_looks()
        # The look may have allowed more calls.
        self._wake_fetcher()
        found = self._scheduler.take_open(partitions, marked=self._marked)
        for partition in found:
            chunks = partition.chunk_lists[-1].chunks
            if rows := sum(map(self._count_rows, chunks)):
                # Now, and not when the call returns: the user may have had them by then.
                row_bytes = self._budget.row_bytes
                num_bytes = sum(map(count_bytes, chunks)) if row_bytes is None else rows * row_bytes
                self._budget.add(rows, num_bytes)
                self._scheduler.note_rows(partition, rows, num_bytes, now)
        if not found:
            self._policy.look_in(self._silence.check(partitions, now))

    def _count_rows(self, chunk: Any) -> int:
        """The rows of a chunk; 1 of what is none, as the merge will say."""
        try:
            rows: int = chunk[0].shape[self._axis]
        except (AttributeError, IndexError, TypeError, KeyError):
            return 1
        return rows

    def _await(self, partitions: Sequence[Partition], now: float) -> None:
        """From now on the merge waits for these partitions."""
        if self._silence.hungry_since is None:
            self._silence.hungry_since = now
        self._policy.merge_waits(partitions, now)
        stats = self._stats
        # A wait for a single partition is counted as its own as well.
        alone = [stats.partitions[one.number] for one in partitions] if len(partitions) == 1 else []
        self._clocks = [stats.chunks, *alone]
        for clock in self._clocks:
            clock.start(now)

    def _stop_clocks(self, now: float) -> None:
        for clock in self._clocks:
            clock.stop(now)
        self._clocks = ()

    # ---- the bound

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row, once they are known and where all rows have as many; read without the
        lock, since they are learnt once."""
        return self._budget.row_bytes

    def learn(self, row_bytes: int) -> None:
        """All rows of the stream have so many bytes."""
        with self._lock:
            self._budget.learn(row_bytes)

    def batches_ahead(self, calls_per_batch: int) -> int:
        """For how many batches slots are taken before their calls are made."""
        with self._lock:
            return self._policy.batches_ahead(calls_per_batch)

    def allow(self, allowed: tuple[int, int] | None) -> None:
        """Let fetchers make those calls that have a place to write to: all of an epoch before this
        one; None where any may be made."""
        with self._lock:
            self._scheduler.allow(allowed)
            self._wake_fetcher()

    def count(self, rows: int, num_bytes: int, kept_rows: int = 0) -> None:
        """Count rows and bytes into the buffers (or, if negative, out of them)."""
        if rows or num_bytes or kept_rows:
            with self._lock:
                self._budget.add(rows, num_bytes, kept_rows)
                self._make_use_of_room()

    def queue(self, device: int, batches: int) -> None:
        """Count batches into a device queue."""
        with self._lock:
            self._budget.queue(device, batches)
            self._stats.queued[device] += batches

    def hand_out(self, device: int, held: Held) -> None:
        """Batches of a device have been handed out: they are buffered no longer. Harmless when
        said again, as where an interrupt came before all had been woken."""
        with self._lock:
            self._budget.hand_out(device, held)
            self._make_use_of_room()

    def _make_use_of_room(self) -> None:
        self._wake_fetcher()
        if self._budget.below_bound or self._budget.starving:
            # All: the user's thread may have been interrupted here, and one that it had woken be
            # listed still, who would be woken alone. Nobody waits but whoever makes batches.
            self._room.notify_all()

    def wait_for_room(self) -> None:
        """Wait until a batch may be copied: that adds to what is buffered while chunks are kept."""
        # Without the lock: nearly always there is room, and a batch above the bound does no harm.
        if not self._budget.below_bound:
            with self._lock:
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        # The starving device's batch goes above the bound: else nothing would ever move.
        room = self._stats.room
        room.start(time.monotonic())
        while not (self.closed or self._budget.below_bound or self._budget.starving):
            self._room.wait()
        room.stop(time.monotonic())

    def close(self) -> None:
        """End the stream: whoever waits here is woken, and no call is started any more."""
        with self._lock:
            self.closed = self.cuts_short = True
            self._scheduler.drop_all()
            self._wake_all_fetchers()
            for condition in (self._arrived, self._room, self._closing):
                condition.notify_all()

    def _wake_fetcher(self) -> None:
        """Wake a fetcher that waits, where there is a partition for it, or will be before one goes
        on by itself: who put it off may be in a call that does not return."""
        if not self._num_idle or self._is_coming:
            return
        if self._scheduler.pause_ends < self._wakes_at or self._policy.has_work():
            # In this order: after an interrupt between the two nobody would be woken again.
            self._wakes.wake()
            self._is_coming = True

    def _wake_all_fetchers(self) -> None:
        # Each wakes the next: where it finds a partition, and at the end.
        if self._num_idle:
            self._wakes.wake()
