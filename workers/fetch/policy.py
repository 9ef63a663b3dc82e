"""Every heuristic decision of the fetching side, in one class without threads, locks or clocks.

The channel tells the policy what happened (a chunk list came, the merge waits, it goes on) and asks
what to do: which partition is called next, how large its chunk list gets, whether the merge is
woken. The answers change how fast a stream is and never a row: which calls are *allowed* is the
scheduler's, what comes in which order is the merge's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from feeder.workers.fetch.scheduler import (
    BufferBudget,
    CallsReport,
    ListLimits,
    Partition,
    Scheduler,
)
from feeder.workers.tuning import Tuning


class ConcurrencyPolicy:
    """How many calls run at once, how large chunk lists are, and when the merge is woken.

    Owner: the channel, which calls every method under its lock and passes the time in. The policy
    starts nothing and writes no partition; what it knows of one lies here, by its number.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        budget: BufferBudget,
        batch_size: int,
        tuning: Tuning,
        *,
        waits: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._batch_size = batch_size
        self._tuning = tuning
        # Calls that are made in processes wait, however short they are there.
        self._waits = waits
        # The partitions whose last calls waited for something else than a core, such as a disk: any
        # number of these may go on at once.
        self._waiting = (1 << len(scheduler.partitions)) - 1 if waits else 0
        # Calls of an epoch that the merge has come to in ticket order; None in order of arrival.
        self._merged: int | None = None
        # How many calls each partition may be ahead of these.
        self._ahead = [math.inf for _ in scheduler.partitions]
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        self.awaited: Sequence[Partition] = ()
        """The partitions that the merge waits for; empty while it is busy."""
        self.looks_in = math.inf
        """After how many seconds the enqueuer thread looks, unless it is woken before."""

    # ---- events

    def merge_collects(self, partitions: Sequence[Partition]) -> bool:
        """The merge asks for chunk lists of these partitions; returns whether there are any."""
        self._starved = not any(partition.chunk_lists for partition in partitions)
        # The merge has nothing of a partition that it asks for, so it tells how far it has come.
        self._merged = partitions[0].num_collected() if len(partitions) == 1 else None
        return not self._starved

    def merge_waits(self, partitions: Sequence[Partition], now: float) -> None:
        """There are none: from now on the merge waits for them."""
        self.awaited = partitions
        self._scheduler.want(partitions, now)

    def merge_resumes(self) -> None:
        """The enqueuer thread goes on with the merge."""
        self.awaited = ()
        self._scheduler.want(())

    def note_calls(self, partition: Partition, report: CallsReport) -> None:
        """A fetcher has given a partition back; its calls came to this."""
        # Calls that compute wait for the interpreter alone, and that for less.
        computed = report.took - report.waited
        waits = self._waits or report.waited > max(computed, self._tuning.waiting_list_s)
        bit = partition.bit
        self._waiting = self._waiting | bit if waits else self._waiting & ~bit
        if report.rows:
            # Its share of the bound, and one call: in order, each is called for the next round
            # before this round is over.
            share_rows = self._budget.max_rows // len(self._scheduler.partitions)
            self._ahead[partition.number] = 1 + max(1, share_rows * report.calls // report.rows)

    def lists_came(self, now: float) -> bool:
        """A fetcher has given a partition back; whether the enqueuer thread is to be woken."""
        scheduler, budget, tuning = self._scheduler, self._budget, self._tuning
        if not scheduler.wanted_bits & scheduler.handed:
            return False
        since = scheduler.wanted[0].wanted_since
        is_early = since is not None and now - since <= tuning.grace_s and budget.below_bound
        is_much = budget.ahead_bytes >= tuning.ahead_bytes // 2
        if is_early and self.looks_in <= tuning.grace_s and not is_much:
            # Within the grace the enqueuer thread looks by itself, and to wake it for each batch
            # would cost more than the batch.
            return False
        # The mark is cleared here and not by the merge: until the merge has the interpreter again
        # each further chunk would be handed over by itself. (Chunk lists of 1.2 chunks and not of 8
        # gave a third of the 8 KB batches; 2026-11-21.)
        scheduler.want(())
        return True

    # ---- the enqueuer thread while it waits

    def enqueuer_waits(self) -> None:
        """It begins to wait, or was woken and waits on: it looks again after the grace."""
        self.looks_in = self._tuning.grace_s

    def enqueuer_looks(self) -> Sequence[Partition]:
        """It was not woken in time: it takes what the calls of these partitions have given."""
        self.looks_in = self._tuning.slow_look_s
        return self.awaited

    def look_in(self, seconds: float) -> None:
        """The enqueuer thread has to look earlier: the timeout is over by then."""
        self.looks_in = seconds

    # ---- decisions

    def has_work(self) -> bool:
        """Whether `pick` has something for one more fetcher."""
        return bool(self._in_turn(self._callable(), 1))

    def pick(self, most: int) -> list[Partition]:
        """The partitions that a fetcher calls now, one after the other, so many at most; none if no
        further call is worth it, or allowed."""
        found = self._in_turn(self._callable(), self._tuning.turns_compared)
        if not found:
            return []
        # Then none falls behind, and in ticket order what is called is what is merged next.
        least = min(found, key=lambda partition: partition.made)
        most = min(most, self._room() // self._batch_size, self._budget.num_lists())
        # Only if the enqueuer thread looks soon, or will: it takes back the partitions after a call
        # that does not return.
        if most <= 1 or (self.awaited and self.looks_in > self._tuning.grace_s):
            return [least]
        # To ask for the next of many partitions under the lock takes longer than a quick call.
        return self._in_turn(self._scheduler.ready, most, least.number)

    def _in_turn(self, partitions: int, most: int, first: int | None = None) -> list[Partition]:
        """At most so many of these partitions, in turn, that are near enough to the merge. Else a
        few would take all room, and those whose turn comes before could give one call at a time.
        """
        merged, ahead, found = self._merged, self._ahead, []
        for partition in self._scheduler.in_turn(partitions, first):
            if merged is None or partition.made - merged < ahead[partition.number]:
                found.append(partition)
                if len(found) == most:
                    break
        return found

    def _callable(self) -> int:
        """Of the partitions that may be called those that are worth it now."""
        budget, scheduler = self._budget, self._scheduler
        ready, wanted = scheduler.ready, scheduler.wanted_bits
        hungry = ready & wanted & ~scheduler.handed
        if not budget.may_call():
            # At the bound only the call whose turn it is may start, and only while a device has no
            # batch. Of several that the merge waits for any will do: one at a time, where bytes
            # are short.
            calling = budget.num_calling
            is_enough = len(scheduler.wanted) > 1 and calling and not budget.has_bytes_for(calling)
            return hungry if budget.starving and not is_enough else 0
        if hungry:
            return hungry
        # While the merge waits for one partition the others may run ahead. While it is busy, what
        # they fetch would only grow cold in memory, and they would take the merge's core.
        if not wanted and budget.ahead_bytes >= self._tuning.ahead_bytes:
            ready &= ~scheduler.handed
        computing = scheduler.running & ~self._waiting
        if not self._starved and computing.bit_count() >= self._tuning.max_computing:
            ready &= self._waiting
        return ready

    def list_limits(self) -> ListLimits:
        """How large the chunk lists get that a fetcher begins now."""
        rows, tuning = self._most_rows(), self._tuning
        return ListLimits(rows, min(rows, tuning.list_calls), tuning.part_bytes, tuning.grace_s)

    def batches_ahead(self, calls_per_batch: int) -> int:
        """For how many batches slots are taken before their calls are made: as many as all
        fetchers together fill at a time, and no more than there is room for."""
        budget, tuning, num = self._budget, self._tuning, len(self._scheduler.partitions)
        batch_bytes = max(1, self._batch_size * (budget.row_bytes or 0))
        most = min(budget.max_rows // self._batch_size, budget.max_bytes // batch_bytes)
        in_lists = min(tuning.list_batches, tuning.list_bytes // batch_bytes)
        wanted = 1 + -(-num // calls_per_batch) + in_lists
        return max(1, min(wanted, most - sum(budget.waiting)))

    def _most_rows(self) -> int:
        """Some of a batch where batches are large, several of them where they are small and there
        is room for them beside the chunk lists that others have begun. All chunk lists together
        always have half the bound."""
        batch, budget, tuning = self._batch_size, self._budget, self._tuning
        if not budget.has_bytes_for(budget.num_calling):
            return 1  # This is the one call that somebody waits for, above the bound.
        row_bytes = budget.row_bytes
        if row_bytes is None:
            return batch
        num = len(self._scheduler.partitions)
        share_bytes = budget.max_bytes // tuning.bound_share // num
        if batch * row_bytes > tuning.part_bytes:
            return max(1, min(tuning.part_bytes, share_bytes) // row_bytes)
        num_batches = min(tuning.list_bytes, share_bytes) // max(1, batch * row_bytes)
        share_batches = self._room() // (batch * num)
        return batch * max(1, min(num_batches, tuning.list_batches, share_batches))

    def _room(self) -> int:
        """Rows that there is room for beside the chunk lists that others have begun; half the bound
        at least."""
        budget = self._budget
        room = budget.room_rows() - self._scheduler.begun_rows
        return max(room, budget.max_rows // self._tuning.bound_share)
