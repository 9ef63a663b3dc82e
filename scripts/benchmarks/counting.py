"""What statistics cost: 8 KB batches with them, and in a build whose counts and clocks do nothing.

Off, the calls are still made and the clock is still read at waits; but nothing is added up, taken
note of or kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from contenders import Contender, Take, product, timed
from fetches import SMALL, constant, fresh
from harness import Settings, interleave
from report import Goal, Report, rate_cells, spread
from workers.stats import BatchStats, Crowd, FetchStats, Stopwatch, StreamStats

ASKED = 0.95


class NoStopwatch(Stopwatch):
    def start(self, now: float) -> None:
        pass

    def stop(self, now: float) -> None:
        pass


class NoCrowd(Crowd):
    def change(self, num: int, now: float) -> None:
        pass


class NoBatchStats(BatchStats):
    def count(self, rows: int, num_bytes: int) -> None:
        pass


class NoFetchStats(FetchStats):
    def count(self, lane: int, calls: int, rows: int, num_bytes: int, now: float) -> None:
        pass


class NoStats(StreamStats):
    """Counts nothing."""

    def __init__(self, num_lanes: int, num_devices: int) -> None:
        super().__init__(num_lanes, num_devices)
        self.fetch = NoFetchStats(num_lanes)
        self.fetch.clocks = [NoStopwatch() for _ in range(num_lanes)]
        self.idle, self.chunks, self.room = NoCrowd(), NoStopwatch(), NoStopwatch()
        self.lanes = [NoStopwatch() for _ in range(num_lanes)]
        self.made = NoBatchStats()
        self.handed = [NoBatchStats() for _ in range(num_devices)]


def without(contender: Contender) -> Contender:
    """The same contender, made of a build that counts nothing."""

    @contextmanager
    def running() -> Iterator[Take]:
        with mock.patch("feeder.stream.StreamStats", NoStats), contender() as take:
            yield take

    return running


def statistics(settings: Settings) -> Report:
    """Fresh arrays, which are passed on, and a constant one, which is copied; on and off."""
    contenders = {
        "passed": product(SMALL, lambda: fresh(SMALL)),
        "copied": product(SMALL, lambda: constant(SMALL)),
    }
    measures = []
    for name, contender in contenders.items():
        measures.append(timed(f"{name}, on", contender, settings))
        measures.append(timed(f"{name}, off", without(contender), settings))
    rates = interleave(measures, settings.repetitions)
    ratios = {name: rates[f"{name}, on"].per(rates[f"{name}, off"]) for name in contenders}
    return Report(
        case="statistics",
        title=f"batches of {SMALL.name} (8 KB), counted and not",
        head=("contender", "batches/s", "GB/s", "of passed, off"),
        rows=tuple(
            (name, *rate_cells(rate, rates["passed, off"], SMALL.batch_bytes))
            for name, rate in rates.items()
        ),
        measures=rates,
        goals=tuple(
            Goal(what=f"statistics: {name}, on against off", asked=ASKED, measured=ratio, unit="×")
            for name, ratio in ratios.items()
        ),
        notes=tuple(f"{name}, on / off: {spread(ratio, '×')}" for name, ratio in ratios.items()),
    )
