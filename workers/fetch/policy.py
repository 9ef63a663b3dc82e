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

from feeder.workers.fetch.scheduler import BufferBudget, ListLimits, Partition, Scheduler
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


class CallsReport(NamedTuple):
    """What the calls of one chunk list came to."""

    calls: int = 0
    """Calls that gave a chunk."""
    rows: int = 0
    """Rows of these chunks."""
    num_bytes: int = 0
    """Their bytes."""
    took: float = 0.0
    """Seconds from the first call to the last one's return."""
    waited: float = 0.0
    """Those of them in which the thread did not compute."""


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
        self, scheduler: Scheduler, budget: BufferBudget, batch_size: int, tuning: Tuning
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._batch_size = batch_size
        self._tuning = tuning
        trials = Trials(tuning)
        self._paces = [Pace(trials, tuning) for _ in scheduler.partitions]
        self._kinds = [CallKind.COMPUTES for _ in scheduler.partitions]
        # Whether the batches that were made last went to the user as they were fetched.
        self._passes = False
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        # Whether a fetcher has merged since the batcher thread last looked.
        self._merged_inline = False
        self.awaited: Sequence[Partition] = ()
        """The partitions that the merge waits for; empty while it is busy."""
        self.inline = False
        """Whether a fetcher merges; the batcher thread waits meanwhile."""
        self.looks_in = math.inf
        """After how many seconds the batcher thread looks, unless it is woken before."""

    # ---- events

    def merge_collects(self, partitions: Sequence[Partition]) -> bool:
        """The merge asks for chunk lists of these partitions; returns whether there are any."""
        self._starved = not any(partition.chunk_lists for partition in partitions)
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
        self.inline = self._merged_inline = True
        self.looks_in = max(self.looks_in, self._tuning.look_s)

    def inline_ends(self) -> None:
        """The fetcher has nothing left to merge."""
        self.inline = False

    def batches_made(self, *, copied: int, passed: int) -> None:
        """Batches were handed over; their rows were copied, or passed on as they were."""
        self._passes = passed > 0 and not copied

    def list_came(self, partition: Partition, report: CallsReport, now: float) -> Merger:
        """A fetcher has given a partition back; returns who merges what has come."""
        kind = self._kinds[partition.number] = self._classify(partition, report, now)
        scheduler, budget, tuning = self._scheduler, self._budget, self._tuning
        came = [wanted for wanted in scheduler.wanted if wanted.chunk_lists]
        if not came:
            return Merger.NOBODY
        since = came[0].wanted_since
        is_early = since is not None and now - since <= tuning.grace_s and budget.below_bound
        if is_early and kind is CallKind.QUICK:
            # No switch of threads is needed after a quick call. So it is time when no other quick
            # partition is left to be called before.
            if self._least_called(now, ahead=False, compute=False, quick=True) is not None:
                return Merger.NOBODY
        elif is_early:
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

    def _classify(self, partition: Partition, report: CallsReport, now: float) -> CallKind:
        calls, _, num_bytes, took, waited = report
        tuning, computed = self._tuning, took - waited
        # While larger chunks are copied the interpreter is free, for another fetcher.
        are_small = num_bytes < tuning.drop_gil_bytes * max(1, calls)
        if self._paces[partition.number].note(calls, took, waited, now) and are_small:
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
        self._merged_inline = False
        self.looks_in = self._tuning.grace_s

    def batcher_woken(self) -> None:
        """It was woken. Where there is nothing for it, it waits on for the grace."""
        self.looks_in = self._tuning.grace_s

    def batcher_looks(self, now: float) -> Look:
        """It was not woken in time."""
        if self._merged_inline:
            # Merges are made; only calls that have begun before the last look may be held up.
            self._merged_inline = False
            self.looks_in = self._tuning.look_s
            return Look(
                [one for one in self._scheduler.partitions if self._is_slow(one, now)], False
            )
        self.looks_in = self._tuning.slow_look_s
        if self.inline:
            return Look((), False)
        # Calls that have not returned by now are not quick: others need not wait for them.
        for partition in self._scheduler.partitions:
            if partition.running and self.kind_of(partition) is CallKind.QUICK:
                self._kinds[partition.number] = CallKind.COMPUTES
        return Look(self.awaited, True)

    def looks_late(self) -> bool:
        """Whether the batcher thread has to be woken to look after the calls that begin now."""
        return self.looks_in > self._tuning.look_s

    def look_in(self, seconds: float) -> None:
        """The batcher thread has to look earlier: the timeout is over by then."""
        self.looks_in = seconds

    def _is_slow(self, partition: Partition, now: float) -> bool:
        is_quick = self.kind_of(partition) is CallKind.QUICK
        held = partition.running and now - partition.called_at > self._tuning.look_s
        return held and not is_quick

    # ---- decisions

    def kind_of(self, partition: Partition) -> CallKind:
        """What the partition's calls are like, as far as its last chunk list shows."""
        return self._kinds[partition.number]

    def pick(self, now: float) -> Partition | None:
        """The partition to call now; None where no further call is worth it, or allowed."""
        budget, scheduler = self._budget, self._scheduler
        wanted = scheduler.wanted
        hungry = [partition for partition in wanted if not partition.chunk_lists]
        if not budget.may_call():
            # At the bound only the call whose turn it is may start, and only while a device has no
            # batch. Of several that the merge waits for any will do: one at a time, where bytes
            # are short.
            calling = budget.num_calling
            is_enough = len(wanted) > 1 and calling and not budget.has_bytes_for(calling)
            return scheduler.least_called(now, hungry if budget.starving and not is_enough else ())
        # While the merge waits for one partition the others may run ahead. While it is busy, what
        # they fetch would only grow cold in memory, and they would take the merge's core.
        ahead = bool(wanted) or budget.ahead_bytes < self._tuning.ahead_bytes
        compute = self._starved or self._num_computing() < self._tuning.max_computing
        # Quick calls are one thread's at a time, which merges after them; as long as the batcher
        # thread soon looks whether they are still quick.
        is_taken = self.inline or (not self.looks_late() and self._is_running(CallKind.QUICK))
        quick = bool(self.awaited) and not is_taken
        first = [one for one in hungry if quick or self.kind_of(one) is not CallKind.QUICK]
        turn = scheduler.least_called(now, first) if first else None
        return turn or self._least_called(now, ahead=ahead, compute=compute, quick=quick)

    def _least_called(
        self, now: float, *, ahead: bool, compute: bool, quick: bool
    ) -> Partition | None:
        """Of the partitions that are allowed now, the one that has been called least. `ahead`
        allows those with something to collect; `quick` and `compute` those of these kinds."""
        kinds, allowed = self._kinds, []
        for partition in self._scheduler.partitions:
            kind = kinds[partition.number]
            is_allowed = quick if kind is CallKind.QUICK else compute or kind is CallKind.WAITS
            if is_allowed and (ahead or not partition.chunk_lists):
                allowed.append(partition)
        return self._scheduler.least_called(now, allowed) if allowed else None

    def _num_computing(self) -> int:
        return sum(
            [
                partition.running and self.kind_of(partition) is not CallKind.WAITS
                for partition in self._scheduler.partitions
            ]
        )

    def _is_running(self, kind: CallKind) -> bool:
        return any(
            partition.running and self.kind_of(partition) is kind
            for partition in self._scheduler.partitions
        )

    def limits_of(self, partition: Partition) -> ListLimits:
        """How large the chunk list gets that a fetcher begins now; the fetcher counts among those
        that call already."""
        rows, tuning = self._most_rows(partition), self._tuning
        return ListLimits(rows, min(rows, tuning.list_calls), tuning.part_bytes, tuning.grace_s)

    def _most_rows(self, partition: Partition) -> int:
        """Some of a batch where batches are large, several of them where they are small and there
        is room for them beside the chunk lists that others have begun. All chunk lists together
        always have half the bound."""
        batch, budget, tuning = self._batch_size, self._budget, self._tuning
        partitions = self._scheduler.partitions
        if not budget.has_bytes_for(budget.num_calling - 1):
            return 1  # This is the one call that somebody waits for, above the bound.
        row_bytes = budget.row_bytes
        if row_bytes is None:
            return batch
        share_bytes = budget.max_bytes // tuning.bound_share // len(partitions)
        if batch * row_bytes > tuning.part_bytes:
            return max(1, min(tuning.part_bytes, share_bytes) // row_bytes)
        batch_bytes = max(1, batch * row_bytes)
        is_quick = self.kind_of(partition) is CallKind.QUICK
        # One thread makes the quick chunk lists of all partitions in turn, and then merges them.
        most_bytes = tuning.quick_bytes // len(partitions) if is_quick else tuning.list_bytes
        num_batches = min(most_bytes, share_bytes) // batch_bytes
        begun = sum([one.limits.rows for one in partitions if one.running and one is not partition])
        room = budget.max_rows - budget.rows - budget.kept_rows - begun
        share_rows = max(room, budget.max_rows // tuning.bound_share) // len(partitions)
        return batch * max(1, min(num_batches, tuning.list_batches, share_rows // batch))


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
            lasted = now - self._began > 10 * self._pause_s
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
        self._num_lists = 0
        # Seconds per call, averaged over the last chunk lists.
        self._call_s = 0.0

    def note(self, num_calls: int, took: float, waited: float, now: float) -> bool:
        """So many calls took so long, waited for so much of it, and ended now; returns whether
        they count as quick."""
        tuning = self._tuning
        if not self._is_quick:
            # A quick call cannot take this long, not even one that waits for the interpreter.
            if now >= self._trials.next and took < tuning.quick_wait_s * max(1, num_calls):
                self._trials.begin(now)
                self._is_quick, self._num_lists = True, 0
                self._call_s = tuning.quick_call_s / 2
            return self._is_quick
        self._num_lists += 1
        if num_calls:
            latest = min(took / num_calls, 4 * tuning.quick_call_s)
            self._call_s += tuning.quick_weight * (latest - self._call_s)
        # The first chunk list may have been under way beside those of other threads.
        is_long = took >= tuning.quick_list_s or waited >= tuning.quick_wait_s
        if (is_long and self._num_lists > 1) or self._call_s >= tuning.quick_call_s:
            self._is_quick = False
            self._trials.fail(now)
        return self._is_quick
