"""8 KB batches of quick calls: many workers, many threads and small buffers against few and large.

How many workers a feed has, how many threads, and how much it may buffer should cost next to
nothing where a call takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import feeder
from contenders import COLUMN, FEED, Contender, Take, timed
from fetches import SMALL, Array, constant, fresh
from harness import Settings, interleave
from report import Goal, Report, spread

FEW_WORKERS, LARGE_BUFFER = 2, SMALL.bound


def _fresh_by_index(call: feeder.Call) -> list[Array]:
    return _FRESH(call.worker_id, call.batch_size)


_FRESH = fresh(SMALL)

FETCHES: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "passed": lambda: fresh(SMALL),
    "copied": lambda: constant(SMALL),
    "by index": lambda: _fresh_by_index,
}
"""Fresh arrays are passed on, a constant one is copied; a pure function is called by index."""


def feed_of(
    fetch: Callable[..., Any],
    num_workers: int = FEW_WORKERS,
    buffered: int = LARGE_BUFFER,
    num_threads: int | None = None,
) -> Contender:
    """A feed of 8 KB batches, without end."""

    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            [COLUMN], fetch, SMALL.batch_size, num_workers, FEED, buffered, epochs=None,
            num_threads=num_threads, coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)[COLUMN]

    return running


def of_workers(num_workers: int, fetch: str) -> Contender:
    """A feed of so many workers, each with a thread unless the feed needs fewer."""
    return feed_of(FETCHES[fetch](), num_workers)


def of_buffer(buffered: int, fetch: str) -> Contender:
    """A feed that may buffer so many batches."""
    return feed_of(FETCHES[fetch](), buffered=buffered)


def of_threads(num_threads: int, fetch: str) -> Contender:
    """A feed of so many threads."""
    return feed_of(FETCHES[fetch](), num_threads=num_threads)


def _against(
    what: str,
    make: Callable[[int, str], Contender],
    base: int,
    asked: Mapping[int, float],
    fetches: tuple[str, ...],
    settings: Settings,
) -> Report:
    """Feeds that differ in one number, each against the one whose number is `base`."""
    numbers = (base, *asked)
    rates = interleave(
        [
            timed(f"{fetch}, {what} {number}", make(number, fetch), settings)
            for fetch in fetches
            for number in numbers
        ],
        settings.repetitions,
    )
    ratios = {
        (fetch, number): rates[f"{fetch}, {what} {number}"].per(rates[f"{fetch}, {what} {base}"])
        for fetch in fetches
        for number in numbers
    }
    return Report(
        case=f"many-{what}",
        title=f"batches of {SMALL.name} (8 KB), by the number of {what}",
        head=("contender", "batches/s", f"of {base}"),
        rows=tuple(
            (f"{fetch}, {what} {number}", spread(rates[f"{fetch}, {what} {number}"]),
             spread(ratio, "×"))
            for (fetch, number), ratio in ratios.items()
        ),
        measures=rates,
        goals=tuple(
            Goal(
                what=f"many-{what}: {fetch}, {number} against {base}",
                asked=asked[number], measured=ratio, unit="×",
            )
            for (fetch, number), ratio in ratios.items()
            if number != base
        ),
    )  # fmt: skip


CASES: Mapping[str, Callable[[Settings], Report]] = {
    "many-workers": partial(
        _against, "workers", of_workers, FEW_WORKERS, {16: 0.8, 64: 0.8, 1000: 0.6},
        ("passed", "copied"),
    ),
    "many-threads": partial(_against, "threads", of_threads, 1, {2: 1.0, 8: 1.0}, ("by index",)),
    "many-buffers": partial(
        _against, "buffers", of_buffer, LARGE_BUFFER, {2: 0.3, 8: 0.4}, ("passed", "copied"),
    ),
}  # fmt: skip
