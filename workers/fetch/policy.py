"""Which partition is called next, and when the merge goes on. Rules; the channel's lock guards
them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from feeder.workers.fetch.scheduler import BufferBudget, Partition, Scheduler
from feeder.workers.stats import Stopwatch, StreamStats

# ---- Who does the enqueuer's work where fetching takes next to no time.
#
# To wake a thread costs more than a small batch, or one that is passed on without a copy. So a
# fetcher whose calls were quick, or give such batches, takes the lead: it does the enqueuer's work
# while that waits for what was fetched, and goes on fetching when there is nothing left to merge
# (the pattern is Schmidt's Leader/Followers, 1996). The enqueuer watches over the calls meanwhile:
# the timeout, and what a call that does not return has got before, stay its own. It looks again
# every now and then, without being woken.
#
# "The enqueuer" is said of this work in general; its own thread is meant where threads are spoken
# of.


LOOK_S = 0.002
"""How long the enqueuer sleeps between two looks, while others lead again and again: for as long
calls that have become slow are made one after another."""


class InlineMerge:
    """Whether a fetcher leads. The channel's lock guards it."""

    def __init__(self) -> None:
        self.active = False
        """Whether one does now; the enqueuer waits meanwhile."""
        self.times = 0
        """How often one did."""
        self._finished = False
        self._error: BaseException | None = None

    def begin(self) -> None:
        """A fetcher begins."""
        self.active = True
        self.times += 1

    def end(self) -> None:
        """It has nothing left to do."""
        self.active = False

    def finish(self, error: BaseException | None) -> None:
        """It has come to the end of the stream, or to an error."""
        self.active = False
        self._finished, self._error = True, error

    def take_end(self) -> bool:
        """Whether the stream has come to its end; raises the error that it ended with, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._finished


GRACE_S = 0.0005
"""How long a merge that waits lets a bundle grow, so that a quick function is not interrupted
after every row."""

AHEAD_BYTES = 8 * 1024 * 1024
"""While the merge is busy no partition that has something to collect is called above this: else
rows leave every cache before they are copied (measured at 4.3 MB chunks: two to three times
slower)."""

MOST_COMPUTING = max(1, len(os.sched_getaffinity(0)) - 1)
"""Fetchers that compute while the merge is busy: one core is the merge's. Measured on two cores
with 4.3 MB chunks: a second fetcher beside the merge costs four tenths of what they get done."""

PATIENCE = 4
"""For a call that floods the caches the merge waits, for that part of the time that it was busy
before, without another fetcher than would compute beside a busy merge."""


class ConcurrencyPolicy:
    """What the merge waits for, and what that means for who may be called."""

    def __init__(
        self, rota: Scheduler, ledger: BufferBudget, stats: StreamStats, axis: int
    ) -> None:
        self._rota = rota
        self._axis = axis
        self._ledger = ledger
        self._stats = stats
        self._clocks: Sequence[Stopwatch] = ()
        self.lead = InlineMerge()
        self.awaited: Sequence[Partition] = ()
        """The partitions that the merge waits for; empty while it is busy."""
        self._wanted: Sequence[Partition] = ()
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        # Whether it waits, and no more compute for its sake yet.
        self._is_patient = False
        # When it last went on after a wait.
        self._busy_since = 0.0
        self.looks_in = math.inf
        """After how many seconds the enqueuer, which waits, looks again if it is not woken."""

    def wait(self, partitions: Sequence[Partition], now: float) -> None:
        """The merge waits for these partitions from now on."""
        self.awaited = partitions
        self.want(partitions, now)
        stats = self._stats
        # A wait for a single partition is counted as its own as well.
        alone = (
            [stats.partitions[partition.number] for partition in partitions]
            if len(partitions) == 1
            else []
        )
        self._clocks = [stats.chunks, *alone]
        for clock in self._clocks:
            clock.start(now)

    def begin_lead(self, now: float) -> None:
        """A fetcher goes on with the merge, while the enqueuer stays where it waits."""
        self._stop_clocks(now)
        self.lead.begin()
        self.looks_in = max(self.looks_in, LOOK_S)

    def go_on(self, now: float) -> None:
        """The enqueuer goes on with the merge."""
        self._stop_clocks(now)
        self._busy_since, self._is_patient = now, False
        self.awaited = ()
        self.want(())

    def _stop_clocks(self, now: float) -> None:
        for clock in self._clocks:
            clock.stop(now)
        self._clocks = ()

    def want(self, partitions: Sequence[Partition], since: float | None = None) -> None:
        """The merge is to be told when something comes of these partitions, and of no others."""
        for partition in self._wanted:
            partition.wanted_since = None
        for partition in partitions:
            partition.wanted_since = since
        self._wanted = partitions

    def slow_down(self) -> None:
        """Calls that have not returned by now are not quick: others need not wait for them."""
        for partition in self._rota.partitions:
            if partition.running:
                partition.is_quick = False

    def slow_partitions(self, now: float) -> Sequence[Partition]:
        """Those whose calls take their time, and that a fetcher has held since the last look."""
        slow = [
            partition
            for partition in self._rota.partitions
            if partition.running and not partition.is_quick
        ]
        return [partition for partition in slow if now - partition.called_at > LOOK_S]

    def take_open(self, partitions: Sequence[Partition], now: float, *, marked: bool) -> bool:
        """Take what fetchers that hold some partitions have got so far; whether that was
        anything."""
        taken = False
        for partition in partitions:
            bundle = partition.take_open(None, marked=marked) if partition.running else None
            if bundle is not None:
                partition.bundles.append(bundle)
                taken = True
                if any(map(self._has_rows, bundle.chunks)):
                    partition.silent_since = now
        return taken

    def _has_rows(self, chunk: Any) -> bool:
        """Whether a chunk has rows, or is none: then the merge will say so."""
        try:
            return bool(chunk[0].shape[self._axis])
        except (AttributeError, IndexError, TypeError, KeyError):
            return True

    def has_come(self, partitions: Sequence[Partition]) -> bool:
        """Whether the merge finds something of the partitions."""
        self._starved = not any(partition.bundles for partition in partitions)
        return not self._starved

    def be_patient(self, partitions: Sequence[Partition], now: float) -> float:
        """How long the merge, which now waits for these partitions, may do so before more may
        compute than beside a busy one; without end where more may at once."""
        if not all([partition.running and partition.floods for partition in partitions]):
            return math.inf
        self._starved, self._is_patient = False, True
        return (now - self._busy_since) / PATIENCE

    def lose_patience(self) -> bool:
        """The merge has waited for so long; whether it was patient until now."""
        was_patient, self._is_patient = self._is_patient, False
        self._starved = self._starved or was_patient
        return was_patient

    def is_held_back(self, partitions: Sequence[Partition]) -> bool:
        """Whether nothing comes of the partitions because none of them may be called, for the
        bound."""
        if self._ledger.below_bound or self._ledger.starving:
            return False
        return not any(partition.bundles or partition.running for partition in partitions)

    def is_due(self, partition: Partition, now: float) -> bool:
        """Whether the merge is to go on, after something has come of `partition`. Within the grace
        the enqueuer looks again by itself, and a switch of threads for each batch would cost more
        than the batch; unless much has come. No switch is needed after a quick call, so then it is
        time when no other quick one is left to be made first."""
        came = [wanted for wanted in self._wanted if wanted.bundles]
        if not came:
            return False
        since = came[0].wanted_since
        if since is None or now - since > GRACE_S or not self._ledger.below_bound:
            return True
        if partition.is_quick:
            return self._rota.pick(now, ahead=False, compute=False, quick=True) is None
        return self.looks_in > GRACE_S or self._ledger.ahead_bytes >= AHEAD_BYTES // 2

    def pick(self, now: float, coming: int = 0) -> Partition | None:
        """The partition to call now, besides those that `coming` fetchers are about to pick; None
        where there is none."""
        ledger, rota, wanted = self._ledger, self._rota, self._wanted
        hungry = [partition for partition in wanted if not partition.bundles]
        if not ledger.may_call(coming):
            calling = ledger.num_calling + coming
            # Of several that the merge waits for any will do: one at a time, where bytes are short.
            is_enough = len(wanted) > 1 and calling and not ledger.has_bytes_for(calling)
            return rota.least_called(now, hungry if ledger.starving and not is_enough else ())
        # While the merge waits for one partition the others may run ahead; while it is busy, what
        # they fetch would only grow cold in memory, and they would take its core.
        ahead = bool(wanted) or ledger.ahead_bytes < AHEAD_BYTES
        spare = bool(wanted) or not (ledger.ahead_bytes or coming)
        compute = self._starved or rota.num_computing + coming < MOST_COMPUTING
        # Quick calls are one thread's at a time, which leads after them; for as long as somebody
        # looks whether they are still quick.
        is_led = self.lead.active or (rota.is_quick_running and self.looks_in <= LOOK_S)
        quick = bool(self.awaited) and not is_led
        first = rota.least_called(
            now, [partition for partition in hungry if quick or not partition.is_quick]
        )
        return first or rota.pick(now, ahead=ahead, compute=compute, quick=quick, spare=spare)


# ---- Whether the calls of a partition take next to no time. A rule without threads.


QUICK_CALL_S = 0.00002
"""What takes less than it takes to wake another thread."""

QUICK_BUNDLE_S = 0.003
"""No bundle of quick calls takes longer: others would wait for it."""

QUICK_WAIT_S = 0.001
"""Nor do they wait for longer, as readers of files do: others could be called meanwhile. And what
takes as long each is not tried."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 3.2
_WEIGHT = 1 / 8


class Trials:
    """When calls that were not quick are tried again: those of all partitions at once, since a
    partition that is quick has to wait for the interpreter beside one that is not, and would fail.

    Threads share it without a lock: what that may spoil is one trial.
    """

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S / 2
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
            self._pause_s = _FIRST_PAUSE_S if lasted else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self.next = now + self._pause_s


class Pace:
    """Whether the calls of one partition count as quick, from how long its bundles took.

    Beside other threads a call waits for the interpreter, and how long it takes itself is not
    seen. So calls count as quick until they show that they are not, and are tried again later. To
    be mistaken costs a few milliseconds.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._is_quick = False
        self._num = 0
        # Seconds per call, averaged over the last bundles.
        self._call_s = 0.0

    def note(self, num_calls: int, took: float, waited: float, now: float) -> bool:
        """So many calls took so long, waited for so much of it, and ended now; returns whether
        they count as quick."""
        if not self._is_quick:
            # As long as that no call takes that is quick and waits for the interpreter alone.
            if now >= self._trials.next and took < QUICK_WAIT_S * max(1, num_calls):
                self._trials.begin(now)
                self._is_quick, self._num = True, 0
                self._call_s = QUICK_CALL_S / 2
            return self._is_quick
        self._num += 1
        if num_calls:
            latest = min(took / num_calls, 4 * QUICK_CALL_S)
            self._call_s += _WEIGHT * (latest - self._call_s)
        # The first may have been under way beside those of other threads.
        is_long = (took >= QUICK_BUNDLE_S or waited >= QUICK_WAIT_S) and self._num > 1
        if is_long or self._call_s >= QUICK_CALL_S:
            self._is_quick = False
            self._trials.fail(now)
        return self._is_quick
