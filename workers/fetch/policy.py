"""Which lane is called next, and when the merge goes on. Rules; the channel's lock guards them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from feeder.workers.fetch.lead import LOOK_S, Lead
from feeder.workers.fetch.ledger import Ledger
from feeder.workers.fetch.scheduler import Lane, Rota
from feeder.workers.stats import Stopwatch, StreamStats

GRACE_S = 0.0005
"""How long a merge that waits lets a bundle grow, so that a quick function is not interrupted
after every row."""

AHEAD_BYTES = 8 * 1024 * 1024
"""While the merge is busy no lane that has something to collect is called above this: else rows
leave every cache before they are copied (measured at 4.3 MB chunks: two to three times slower)."""

MOST_COMPUTING = max(1, len(os.sched_getaffinity(0)) - 1)
"""Fetchers that compute while the merge is busy: one core is the merge's. Measured on two cores
with 4.3 MB chunks: a second fetcher beside the merge costs four tenths of what they get done."""

PATIENCE = 4
"""For a call that floods the caches the merge waits, for that part of the time that it was busy
before, without another fetcher than would compute beside a busy merge."""


class Dispatch:
    """What the merge waits for, and what that means for who may be called."""

    def __init__(self, rota: Rota, ledger: Ledger, stats: StreamStats, axis: int) -> None:
        self._rota = rota
        self._axis = axis
        self._ledger = ledger
        self._stats = stats
        self._clocks: Sequence[Stopwatch] = ()
        self.lead = Lead()
        self.awaited: Sequence[Lane] = ()
        """The lanes that the merge waits for; empty while it is busy."""
        self._wanted: Sequence[Lane] = ()
        # Whether the merge waits, or had to wait for what it collected last.
        self._starved = True
        # Whether it waits, and no more compute for its sake yet.
        self._is_patient = False
        # When it last went on after a wait.
        self._busy_since = 0.0
        self.looks_in = math.inf
        """After how many seconds the enqueuer, which waits, looks again if it is not woken."""

    def wait(self, lanes: Sequence[Lane], now: float) -> None:
        """The merge waits for these lanes from now on."""
        self.awaited = lanes
        self.want(lanes, now)
        stats = self._stats
        # A wait for a single lane is counted as its own as well.
        alone = [stats.lanes[lane.number] for lane in lanes] if len(lanes) == 1 else []
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

    def want(self, lanes: Sequence[Lane], since: float | None = None) -> None:
        """The merge is to be told when something comes of these lanes, and of no others."""
        for lane in self._wanted:
            lane.wanted_since = None
        for lane in lanes:
            lane.wanted_since = since
        self._wanted = lanes

    def slow_down(self) -> None:
        """Calls that have not returned by now are not quick: others need not wait for them."""
        for lane in self._rota.lanes:
            if lane.running:
                lane.is_quick = False

    def slow_lanes(self, now: float) -> Sequence[Lane]:
        """Those whose calls take their time, and that a fetcher has held since the last look."""
        slow = [lane for lane in self._rota.lanes if lane.running and not lane.is_quick]
        return [lane for lane in slow if now - lane.called_at > LOOK_S]

    def take_open(self, lanes: Sequence[Lane], now: float, *, marked: bool) -> bool:
        """Take what fetchers that hold some lanes have got so far; whether that was anything."""
        taken = False
        for lane in lanes:
            bundle = lane.take_open(None, marked=marked) if lane.running else None
            if bundle is not None:
                lane.bundles.append(bundle)
                taken = True
                if any(map(self._has_rows, bundle.chunks)):
                    lane.silent_since = now
        return taken

    def _has_rows(self, chunk: Any) -> bool:
        """Whether a chunk has rows, or is none: then the merge will say so."""
        try:
            return bool(chunk[0].shape[self._axis])
        except (AttributeError, IndexError, TypeError, KeyError):
            return True

    def has_come(self, lanes: Sequence[Lane]) -> bool:
        """Whether the merge finds something of the lanes."""
        self._starved = not any(lane.bundles for lane in lanes)
        return not self._starved

    def be_patient(self, lanes: Sequence[Lane], now: float) -> float:
        """How long the merge, which now waits for these lanes, may do so before more may compute
        than beside a busy one; without end where more may at once."""
        if not all([lane.running and lane.floods for lane in lanes]):
            return math.inf
        self._starved, self._is_patient = False, True
        return (now - self._busy_since) / PATIENCE

    def lose_patience(self) -> bool:
        """The merge has waited for so long; whether it was patient until now."""
        was_patient, self._is_patient = self._is_patient, False
        self._starved = self._starved or was_patient
        return was_patient

    def is_held_back(self, lanes: Sequence[Lane]) -> bool:
        """Whether nothing comes of the lanes because none of them may be called, for the bound."""
        if self._ledger.below_bound or self._ledger.starving:
            return False
        return not any(lane.bundles or lane.running for lane in lanes)

    def is_due(self, lane: Lane, now: float) -> bool:
        """Whether the merge is to go on, after something has come of `lane`. Within the grace the
        enqueuer looks again by itself, and a switch of threads for each batch would cost more
        than the batch; unless much has come. No switch is needed after a quick call, so then it
        is time when no other quick one is left to be made first."""
        came = [wanted for wanted in self._wanted if wanted.bundles]
        if not came:
            return False
        since = came[0].wanted_since
        if since is None or now - since > GRACE_S or not self._ledger.below_bound:
            return True
        if lane.is_quick:
            return self._rota.pick(now, ahead=False, compute=False, quick=True) is None
        return self.looks_in > GRACE_S or self._ledger.ahead_bytes >= AHEAD_BYTES // 2

    def pick(self, now: float, coming: int = 0) -> Lane | None:
        """The lane to call now, besides those that `coming` fetchers are about to pick; None where
        there is none."""
        ledger, rota, wanted = self._ledger, self._rota, self._wanted
        hungry = [lane for lane in wanted if not lane.bundles]
        if not ledger.may_call(coming):
            calling = ledger.num_calling + coming
            # Of several that the merge waits for any will do: one at a time, where bytes are short.
            is_enough = len(wanted) > 1 and calling and not ledger.has_bytes_for(calling)
            return rota.least_called(now, hungry if ledger.starving and not is_enough else ())
        # While the merge waits for one lane the others may run ahead; while it is busy, what
        # they fetch would only grow cold in memory, and they would take its core.
        ahead = bool(wanted) or ledger.ahead_bytes < AHEAD_BYTES
        spare = bool(wanted) or not (ledger.ahead_bytes or coming)
        compute = self._starved or rota.num_computing + coming < MOST_COMPUTING
        # Quick calls are one thread's at a time, which leads after them; for as long as somebody
        # looks whether they are still quick.
        is_led = self.lead.active or (rota.is_quick_running and self.looks_in <= LOOK_S)
        quick = bool(self.awaited) and not is_led
        first = rota.least_called(now, [lane for lane in hungry if quick or not lane.is_quick])
        return first or rota.pick(now, ahead=ahead, compute=compute, quick=quick, spare=spare)
