"""How long a stop takes while every fetcher is blocked on the bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from contenders import COLUMN, BusyThread, copyto, make_coordinator, timed
from fetches import SMALL, Array, Fetch, constant
from harness import Measures, Settings, interleave, time_of
from original import OriginalFeed
from report import Goal, Report, spread

NUM_FETCHERS = 8
STILL_S = 0.1
"""Fetchers that have not called for so long are blocked."""
ASKED_MS = {"quiet": 5, "beside busy": 50}
COPYTO = "copyto of 8 KB"


class CountedFetch:
    """A fetch function that tells when nobody has called it for a while."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._called = threading.Event()

    def __call__(self, worker_id: int, batch_size: int) -> list[Array]:
        self._called.set()
        return self._fetch(worker_id, batch_size)

    def wait_until_still(self) -> None:
        """Return once no call has come for `STILL_S` seconds, after the first one."""
        self._called.wait()
        while self._called.is_set():
            self._called.clear()
            self._called.wait(STILL_S)


def stop_product() -> float:
    """The seconds that a stop of the product takes; nobody has taken a batch."""
    before = threading.active_count()
    fetch = CountedFetch(constant(SMALL))
    coordinator = make_coordinator(SMALL, fetch, num_workers=NUM_FETCHERS)
    coordinator.start()
    fetch.wait_until_still()
    _expect_running(before)
    elapsed = time_of(coordinator.stop)
    if threading.active_count() != before:
        raise RuntimeError(f"threads were left behind: {threading.enumerate()!r}")
    return elapsed


def stop_original() -> float:
    """The seconds that a stop of the original takes."""
    before = threading.active_count()
    fetch = CountedFetch(constant(SMALL))
    feed = OriginalFeed([COLUMN], fetch, SMALL.batch_size, NUM_FETCHERS, SMALL.bound)
    feed.start()
    fetch.wait_until_still()
    _expect_running(before)
    return time_of(feed.stop)


def _expect_running(before: int) -> None:
    running = threading.active_count() - before
    if running < NUM_FETCHERS:
        raise RuntimeError(f"{running} threads run, {NUM_FETCHERS} fetchers were expected")


def _measured(
    name: str, stop: Callable[[], float], beside: Callable[[], AbstractContextManager[object]]
) -> Callable[[], Measures]:
    def measure() -> Measures:
        with beside():
            return {name: stop() * 1e3}

    return measure


def stopping(settings: Settings) -> Report:
    """Stops in a quiet process and beside a thread that is busy with pure Python."""
    times = interleave(
        [
            _measured("quiet", stop_product, nullcontext),
            _measured("beside busy", stop_product, BusyThread),
        ],
        settings.repetitions * settings.tries,
    )
    others = interleave(
        [
            _measured("original, quiet", stop_original, nullcontext),
            timed(COPYTO, copyto(SMALL), settings),
        ],
        settings.repetitions,
    )
    copied = others.pop(COPYTO).times(SMALL.batch_bytes / 1e9)
    times |= others
    return Report(
        case="stop",
        title=f"stop with {NUM_FETCHERS} fetchers blocked on the bound",
        head=("contender", "ms", "stops"),
        rows=tuple((name, spread(time), str(len(time.samples))) for name, time in times.items()),
        measures=times,
        goals=tuple(
            Goal(what=f"stop: {name}", asked=asked, measured=times[name], unit="ms", at_most=True)
            for name, asked in ASKED_MS.items()
        ),
        notes=(f"{COPYTO}: {spread(copied, 'GB/s')}; threads left after a stop: none",),
    )
