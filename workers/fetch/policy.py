"""Every heuristic decision of the fetching side, in one class without threads, locks or clocks.

The channel tells the policy what happened (a chunk list came, the merge waits, it goes on) and asks
what to do: which partition is called next, how large its chunk list gets, who merges what came. The
answers change how fast a stream is and never a row: which calls are *allowed* is the scheduler's,
what comes in which order is the merge's.

Merging inline: to wake a thread costs more than to merge a small batch, or one that is passed on
without a copy. So a fetcher that made such chunks merges them itself while the batcher thread
waits, and goes on fetching when nothing is left to merge (the pattern is Leader/Followers, Schmidt
1996). The batcher thread looks after the calls meanwhile: the timeout, and what a call that does
not return has got before, stay its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from feeder.workers.fetch.scheduler import (
    BufferBudget,
    CallsReport,
    ListLimits,
    Partition,
    Scheduler,
)
from feeder.workers.tuning import Tuning


class CallKind(enum.Enum):
    """What the last chunk list of a partition says of its calls. A chunk list may change it to
    any."""

    COMPUTES = enum.auto()
    """They keep a core busy; so do calls of which nothing is known yet."""
    WAITS = enum.auto()
    """They wait for something else, such as a disk: any number may go on at once."""
    QUICK = enum.auto()
    """They take less than waking a thread: one thread makes them all, and merges inline."""
    PASSED = enum.auto()
    """They compute, and the user gets what they give without a copy: their fetcher merges inline,
    and other fetchers go on beside it."""


class Merger(enum.Enum):
    """Who merges what has come."""

    NOBODY = enum.auto()
    """Nobody yet: the merge waits for something else, or is about to look by itself."""
    BATCHER = enum.auto()
    """The batcher thread, which is to be woken."""
    FETCHER = enum.auto()
    """The fetcher that has just given its partition back."""


class Look(NamedTuple):
    """What the batcher thread does when it has waited for `looks_in` without being woken."""

    partitions: Sequence[Partition]
    """It takes what the calls of these have given so far."""
    is_overdue: bool
    """Whether the merge has waited for longer than its grace; then the timeout is checked too."""


class ConcurrencyPolicy:
    """How many calls run at once, how large chunk lists are, and who merges them.

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
        trials = Trials(tuning)
        self._paces = [Pace(trials, tuning) for _ in scheduler.partitions]
        # Calls that are made in processes wait, however quick they are there.
        self._waits = waits
        kind = CallKind.WAITS if waits else CallKind.COMPUTES
        self._kinds = [kind for _ in scheduler.partitions]
        # The partitions of two of the kinds, as bits.
        self._quick = 0
        self._waiting = (1 << len(scheduler.partitions)) - 1 if waits else 0
        # Calls of an epoch that the merge has come to in ticket order; None in order of arrival.
        self._merged: int | None = None
        # How many calls each partition may be ahead of these.
        self._ahead = [math.inf for _ in scheduler.partitions]
        # Whether the batches that were made last went to the user as they were fetched.
        self._passes = False
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        self.awaited: Sequence[Partition] = ()
        """The partitions that the merge waits for; empty while it is busy."""
        self.inline = False
        """Whether a fetcher merges; the batcher thread waits meanwhile."""
        self.merged_inline = False
        """Whether a fetcher has merged since the batcher thread last looked."""
        self.looks_in = math.inf
        """After how many seconds the batcher thread looks, unless it is woken before."""

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
        """The batcher thread goes on with the merge."""
        self.awaited = ()
        self._scheduler.want(())

    def inline_begins(self) -> None:
        """A fetcher goes on with the merge, while the batcher thread stays where it waits."""
        self.inline = self.merged_inline = True
        self.looks_in = max(self.looks_in, self._tuning.look_s)

    def inline_ends(self) -> None:
        """The fetcher has nothing left to merge."""
        self.inline = False

    def batches_made(self, *, copied: int, passed: int) -> None:
        """Batches were handed over; their rows were copied, or passed on as they were."""
        self._passes = passed > 0 and not copied

    def note_calls(
        self, partition: Partition, report: CallsReport, now: float, counted_s: float = math.inf
    ) -> None:
        """A fetcher has given a partition back; its calls came to this. At most `counted_s` of
        their waits say something of them (`counted_wait`)."""
        kind = self._classify(partition, report, now, counted_s)
        if kind is not self._kinds[partition.number]:
            self._set_kind(partition, kind)
        if report.rows:
            # Its share of the bound, and one call: in order, each is called for the next round
            # before this round is over.
            share_rows = self._budget.max_rows // len(self._scheduler.partitions)
            self._ahead[partition.number] = 1 + max(1, share_rows * report.calls // report.rows)

    def counted_wait(self, hungry_s: float) -> float:
        """For how long the calls of a turn that ends now may have waited for something else than
        the interpreter, where a user has been waiting for a batch for `hungry_s`."""
        # While no user waits, a user's thread may have the interpreter, and nobody is held up. So
        # may other calls that compute.
        num_waiting = (self._scheduler.running & self._waiting).bit_count()
        return hungry_s if self._budget.num_calling <= num_waiting else 0.0

    def lists_came(self, partition: Partition, now: float) -> Merger:
        """A fetcher has given partitions back, this one last; returns who merges what has come."""
        scheduler, budget, tuning = self._scheduler, self._budget, self._tuning
        came = scheduler.wanted_bits & scheduler.handed
        if not came:
            return Merger.NOBODY
        kind = self.kind_of(partition)
        since = scheduler.wanted[0].wanted_since
        is_early = since is not None and now - since <= tuning.grace_s and budget.below_bound
        if is_early and kind is not CallKind.QUICK:
            # Within the grace the batcher thread looks by itself, and to wake it for each batch
            # would cost more than the batch; unless much has come.
            much = budget.ahead_bytes >= tuning.ahead_bytes // 2
            if self.looks_in <= tuning.grace_s and not much:
                return Merger.NOBODY
        # The mark is cleared here and not by the merge: until the merge has the interpreter again
        # each further chunk would be handed over by itself. (Chunk lists of 1.2 chunks and not of 8
        # gave a third of the 8 KB batches; 2026-11-21.)
        scheduler.want(())
        is_inline = kind is CallKind.QUICK or kind is CallKind.PASSED
        return Merger.FETCHER if is_inline else Merger.BATCHER

    def _set_kind(self, partition: Partition, kind: CallKind) -> None:
        bit = partition.bit
        self._kinds[partition.number] = kind
        self._quick = self._quick | bit if kind is CallKind.QUICK else self._quick & ~bit
        self._waiting = self._waiting | bit if kind is CallKind.WAITS else self._waiting & ~bit

    def _classify(
        self, partition: Partition, report: CallsReport, now: float, counted_s: float
    ) -> CallKind:
        if self._waits:
            return CallKind.WAITS
        calls, _, num_bytes, took, waited = report
        tuning, computed = self._tuning, took - waited
        # While larger chunks are copied the interpreter is free, for another fetcher.
        are_small = num_bytes < tuning.drop_gil_bytes * max(1, calls)
        # Of large rows that are passed on, or were written where they belong, nothing is copied.
        # Beside another thread a quick call computes for up to twice as long.
        are_small |= self._passes and computed < 2 * tuning.quick_call_s * calls
        is_quick = self._paces[partition.number].note(calls, took, waited, now, counted_s)
        if is_quick and are_small:
            return CallKind.QUICK
        # What fills memory at its full speed waits for a core or the interpreter, if for anything.
        computes = waited < computed or num_bytes > took * tuning.memory_bytes_per_s
        if self._passes and computes and took < tuning.passed_call_s * calls:
            return CallKind.PASSED
        # Calls that compute wait for the interpreter alone, and that for less.
        is_long = waited > max(computed, tuning.waiting_list_s)
        return CallKind.WAITS if is_long else CallKind.COMPUTES

    # ---- the batcher thread while it waits

    def batcher_waits(self) -> None:
        """It begins to wait."""
        self.merged_inline = False
        self.looks_in = self._tuning.grace_s

    def batcher_woken(self) -> None:
        """It was woken. Where there is nothing for it, it waits on for the grace."""
        self.looks_in = self._tuning.grace_s

    def batcher_looks(self, now: float) -> Look:
        """It was not woken in time."""
        if self.merged_inline:
            # Merges are made; only calls that have begun before the last look may be held up.
            self.merged_inline = False
            self.looks_in = self._tuning.look_s
            running = self._scheduler.among(self._scheduler.running & ~self._quick)
            return Look([one for one in running if self._is_slow(one, now)], False)
        self.looks_in = self._tuning.slow_look_s
        if self.inline:
            return Look((), False)
        # Calls that have not returned by now are not quick: others need not wait for them.
        scheduler = self._scheduler
        for partition in scheduler.among(scheduler.running & self._quick):
            self._set_kind(partition, CallKind.COMPUTES)
        return Look(self.awaited, True)

    def looks_late(self) -> bool:
        """Whether the batcher thread has to be woken to look after the calls that begin now."""
        return self.looks_in > self._tuning.look_s

    def look_in(self, seconds: float) -> None:
        """The batcher thread has to look earlier: the timeout is over by then."""
        self.looks_in = seconds

    def _is_slow(self, partition: Partition, now: float) -> bool:
        return now - partition.called_at > self._tuning.look_s

    # ---- decisions

    def kind_of(self, partition: Partition) -> CallKind:
        """What the partition's calls are like, as far as its last chunk list shows."""
        return self._kinds[partition.number]

    def has_work(self) -> bool:
        """Whether `pick` has something for one more fetcher."""
        return bool(self._in_turn(self._callable(), 1))

    def pick(self) -> Sequence[Partition]:
        """The partitions that a fetcher calls now, one after the other; none where no further call
        is worth it, or allowed."""
        scheduler = self._scheduler
        found = self._in_turn(self._callable(), self._tuning.turns_compared)
        if not found:
            return ()
        # Then none falls behind, and in ticket order what is called is what is merged next.
        least = min(found, key=lambda partition: partition.made)
        if self.kind_of(least) is not CallKind.QUICK:
            return (least,)
        # Only while the batcher thread looks soon: it takes back the partitions after a call that
        # does not return.
        if self.looks_late() or not self._budget.may_call():
            return (least,)
        # Of quick calls all that there is room for: where each of many workers gives a batch or
        # two, to ask for the next worker under the lock takes longer than its call.
        first, most = least.number, max(1, self._room() // self._batch_size)
        quick = scheduler.ready & self._quick
        return self._in_turn(quick | least.bit, most, first)

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
        # Quick calls are one thread's at a time, which merges after them; as long as the batcher
        # thread soon looks whether they are still quick.
        is_taken = self.inline or (not self.looks_late() and scheduler.running & self._quick)
        if is_taken or not self.awaited:
            ready &= ~self._quick
        if hungry & ready:
            return hungry & ready
        # While the merge waits for one partition the others may run ahead. While it is busy, what
        # they fetch would only grow cold in memory, and they would take the merge's core.
        if not wanted and budget.ahead_bytes >= self._tuning.ahead_bytes:
            ready &= ~scheduler.handed
        computing = scheduler.running & ~self._waiting
        if not self._starved and computing.bit_count() >= self._tuning.max_computing:
            ready &= self._quick | self._waiting
        return ready

    def limits_of(self, partition: Partition) -> ListLimits:
        """How large the chunk lists get that a fetcher begins now, this partition's first; the
        fetcher counts among those that call already."""
        rows, tuning = self._most_rows(partition), self._tuning
        return ListLimits(rows, min(rows, tuning.list_calls), tuning.part_bytes, tuning.grace_s)

    def batches_ahead(self, calls_per_batch: int) -> int:
        """For how many batches slots are taken before their calls are made: as many as all
        fetchers together fill at a time, and no more than there is room for."""
        budget, tuning, num = self._budget, self._tuning, len(self._scheduler.partitions)
        batch_bytes = max(1, self._batch_size * (budget.row_bytes or 0))
        most = min(budget.max_rows // self._batch_size, budget.max_bytes // batch_bytes)
        in_lists = min(tuning.list_batches, tuning.list_bytes // batch_bytes)
        if self._quick and self._passes:
            in_lists = tuning.list_batches
        wanted = 1 + -(-num // calls_per_batch) + in_lists
        return max(1, min(wanted, most - sum(budget.waiting)))

    def turn_limits(self) -> tuple[int, int]:
        """How many rows and bytes come of a turn at most, but for the last partition's."""
        budget = self._budget
        most_bytes = min(
            budget.max_bytes // self._tuning.bound_share, budget.room_bytes(budget.num_calling - 1)
        )
        return self._room(), most_bytes

    def _most_rows(self, partition: Partition) -> int:
        """Some of a batch where batches are large, several of them where they are small and there
        is room for them beside the chunk lists that others have begun. All chunk lists together
        always have half the bound."""
        batch, budget, tuning = self._batch_size, self._budget, self._tuning
        if not budget.has_bytes_for(budget.num_calling - 1):
            return 1  # This is the one call that somebody waits for, above the bound.
        row_bytes = budget.row_bytes
        if row_bytes is None:
            return batch
        # One thread makes the quick chunk lists of all partitions in turn, and then merges them.
        num, is_quick = len(self._scheduler.partitions), self.kind_of(partition) is CallKind.QUICK
        share_bytes = budget.max_bytes // tuning.bound_share // num
        are_passed = is_quick and self._passes
        if batch * row_bytes > tuning.part_bytes and not are_passed:
            return max(1, min(tuning.part_bytes, share_bytes) // row_bytes)
        batch_bytes = max(1, batch * row_bytes)
        most_bytes = tuning.quick_bytes // num if is_quick else tuning.list_bytes
        if are_passed:
            most_bytes = share_bytes  # No cache has to hold them.
        num_batches = min(most_bytes, share_bytes) // batch_bytes
        room, share = self._room(), batch * num
        # Rounded up where one turn makes the quick chunk lists of all: there the turn's own limit
        # keeps to the room. Else 64 workers would give a batch each where there is room for 127.
        share_batches = -(-room // share) if is_quick else room // share
        return batch * max(1, min(num_batches, tuning.list_batches, share_batches))

    def _room(self) -> int:
        """Rows that there is room for beside the chunk lists that others have begun; half the bound
        at least."""
        budget = self._budget
        room = budget.room_rows() - self._scheduler.begun_rows
        return max(room, budget.max_rows // self._tuning.bound_share)


# ---- Quick calls: whether a partition's calls take next to no time


class Trials:
    """When calls that were not quick are tried again: those of all partitions at once, since a
    partition that is quick waits for the interpreter beside one that is not, and would fail.

    Part of the policy, so the channel's lock guards it.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._pause_s = tuning.first_trial_pause_s / 2
        self._began = -1.0
        self.next = 0.0
        """From when on they are."""

    def begin(self, now: float) -> None:
        """The calls of a partition are tried."""
        if self._began < self.next:
            self._began = now

    def fail(self, now: float) -> None:
        """Those of a partition have turned out not to be quick: no partition is tried for a while,
        and for twice as long whenever it is the same again soon. Partitions that are quick stay
        so."""
        if now >= self.next:
            lasted = now - self._began > self._tuning.trial_pauses_held * self._pause_s
            longer_s = min(2 * self._pause_s, self._tuning.last_trial_pause_s)
            self._pause_s = self._tuning.first_trial_pause_s if lasted else longer_s
            self.next = now + self._pause_s


class Pace:
    """Whether the calls of one partition count as quick, from how long its chunk lists took.

    Beside other threads a call waits for the interpreter, and how long it takes itself is not
    seen. So calls count as quick until they show that they are not, and are tried again later. A
    mistake costs a few milliseconds. Part of the policy, so the channel's lock guards it.
    """

    def __init__(self, trials: Trials, tuning: Tuning) -> None:
        self._trials = trials
        self._tuning = tuning
        self._is_quick = False
        # Chunk lists since the last that was long.
        self._since_long = 0
        # Seconds per call, averaged over the last chunk lists.
        self._call_s = 0.0

    def note(
        self, num_calls: int, took: float, waited: float, now: float, counted_s: float = math.inf
    ) -> bool:
        """So many calls took so long, waited for so much of it, of which at most `counted_s` say
        something of the calls, and ended now; returns whether they count as quick."""
        tuning = self._tuning
        if not self._is_quick:
            # A quick call cannot take this long, not even one that waits for the interpreter.
            if now >= self._trials.next and took < tuning.quick_wait_s * max(1, num_calls):
                self._trials.begin(now)
                self._is_quick, self._since_long = True, tuning.quick_lists
                self._call_s = tuning.quick_call_s / 2
            return self._is_quick
        excused = max(0.0, waited - counted_s)
        took, waited = took - excused, waited - excused
        self._since_long += 1
        if num_calls:
            latest = min(took / num_calls, 4 * tuning.quick_call_s)
            # Of few calls one wait for the interpreter is most of the time.
            weight = min(1.0, num_calls / tuning.quick_calls) * tuning.quick_weight
            self._call_s += weight * (latest - self._call_s)
        is_lost = self._call_s >= tuning.quick_call_s
        if took >= tuning.quick_list_s or waited >= tuning.quick_wait_s:
            # Once in a while the machine has something else to do.
            is_lost |= self._since_long <= tuning.quick_lists
            self._since_long = 0
        if is_lost:
            self._is_quick = False
            self._trials.fail(now)
        return self._is_quick
