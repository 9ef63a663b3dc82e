"""Checkpoints: what storing the position of a running feed costs the feeding, and what it takes.

A feed runs in one process. In every other second its position is stored by the feeder's own
thread, with up to 1 MB of leftover rows, and made durable; its batches are counted in all of them.
A second with and one without make a pair, of which each time the other comes first, so that what
else happens on the machine falls on both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

import feeder
from command import run_cases
from contenders import COLUMN, FEED
from feeder.state.snapshot import StreamState
from fetches import SMALL, VECTORS, Load, SeekableFetch
from harness import Measures, Settings, Spread, interleave, rate_of, time_of
from report import Goal, Report, figure, spread

NUM_WORKERS = 2
ASKED_PART = 0.97
PAIRS_PER_REPETITION = 4
WINDOW_S = 1.0
SAVES = 10
SIZES = (0, 1_000_000, 100_000_000)

PICTURES = Load(
    name="32×(227,227,3) uint8", batch_size=32, row_shape=(227, 227, 3), dtype="uint8",
    chunk_rows=7, bound=20,
)  # fmt: skip
LOADS = (SMALL.in_chunks_of(50), VECTORS.in_chunks_of(240), PICTURES)
"""None of them leaves more than 1 MB of rows over."""


def beside(settings: Settings) -> Report:
    """The throughput of feeds that are stored once a second, over that of the same ones without."""
    found: dict[str, Spread] = {}
    for load in LOADS:
        found |= _beside(load, settings)
    return Report(
        case="beside",
        title="batches/s of a running feed, in seconds without and with a checkpoint",
        head=("batches", "without", "with", "part", "a save takes"),
        rows=tuple(_row(load, found) for load in LOADS),
        measures=found,
        goals=tuple(
            Goal(
                what=f"{load.name}: with one checkpoint a second, of the throughput without",
                asked=ASKED_PART,
                measured=found[f"{load.name}: with"].per(found[f"{load.name}: without"]),
            )
            for load in LOADS
        ),
    )


def _beside(load: Load, settings: Settings) -> dict[str, Spread]:
    window = Settings(timed_s=max(WINDOW_S, settings.timed_s), warm_s=0.0, warm_batches=1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = feeder.CheckpointStore(Path(folder) / "run", keep=3)
        coordinator = feeder.Coordinator(feeder.Checkpointing(store))
        feeder.init_data_input_workers(
            [COLUMN], SeekableFetch(load), load.batch_size, NUM_WORKERS, FEED, load.bound,
            epochs=None, coordinator=coordinator,
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            rate_of(lambda: next(feed), settings)

            def without() -> Measures:
                return {f"{load.name}: without": rate_of(lambda: next(feed), window)}

            def saving() -> Measures:
                coordinator.checkpoint(wait=False)
                rate = rate_of(lambda: next(feed), window)
                took = coordinator.checkpoint_stats()["last_save_s"]
                return {f"{load.name}: with": rate, f"{load.name}: save": took}

            spreads = interleave([without, saving], settings.repetitions * PAIRS_PER_REPETITION)
        stats = coordinator.checkpoint_stats()
    assert stats["saves"] == settings.repetitions * PAIRS_PER_REPETITION, stats
    return spreads


def _row(load: Load, found: Mapping[str, Spread]) -> tuple[str, ...]:
    without, saved = found[f"{load.name}: without"], found[f"{load.name}: with"]
    took = found[f"{load.name}: save"].times(1000)
    parts = spread(saved.per(without))
    return load.name, spread(without), spread(saved), parts, spread(took, "ms")


def storing(settings: Settings) -> Report:
    """What it takes to store arrays durably, and to read them back."""
    found = interleave([partial(_store, size) for size in SIZES], settings.repetitions)
    rows = [
        (
            f"{size:,} bytes",
            *(spread(found[f"{size}: {what}"].times(1000), "ms") for what in ("put", "get")),
            figure(size / 1e9 / found[f"{size}: put"].median),
        )
        for size in SIZES
    ]
    return Report(
        case="store",
        title="CheckpointStore in a folder: put (until durable) and get (checked)",
        head=("array of", "put", "get", "GB/s put"),
        rows=tuple(rows),
        measures=found,
    )


def _store(size: int) -> Measures:
    rows = np.arange(size, dtype=np.uint8)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        feeder.CheckpointStore(folder) as store,
    ):
        store.put("first", {})
        put = time_of(lambda: store.put("second", {"rows": rows}))
        get = time_of(lambda: store.get("second"))
    return {f"{size}: put": put, f"{size}: get": get}


def computing(settings: Settings) -> Report:
    """The computing time that storing takes from a running feed, whatever else the machine does."""
    found = interleave([partial(_computing, size) for size in SIZES[:2]], settings.repetitions)
    times = {size: found[f"{size}: computing"].times(1000) for size in SIZES[:2]}
    return Report(
        case="computing",
        title="computing time of the thread that stores a position, median of a repetition",
        head=("leftover rows of", "of a save"),
        rows=tuple((f"{size:,} bytes", spread(times[size], "ms")) for size in times),
        measures=found,
        goals=(
            Goal(
                what="computing time of a save with 1 MB of leftover rows: 3 % of a second",
                asked=1000 * (1 - ASKED_PART),
                measured=times[SIZES[1]],
                unit="ms",
                at_most=True,
            ),
        ),
    )


def _computing(size: int) -> Measures:
    state = StreamState(
        name=FEED, number=0, fingerprint={}, token=bytes(200), columns=None,
        rows=(np.arange(size, dtype=np.uint8),), summary=(0, 0, 0, size),
    )  # fmt: skip
    times = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        feeder.CheckpointStore(Path(folder) / "run", keep=3) as store,
    ):
        for _ in range(SAVES):
            started = time.thread_time()
            store.save(feeder.Snapshot((state,)))
            times.append(time.thread_time() - started)
    return {f"{size}: computing": statistics.median(times)}


CASES: Mapping[str, Callable[[Settings], Report]] = {
    "beside": beside,
    "computing": computing,
    "store": storing,
}


if __name__ == "__main__":
    run_cases("checkpoints", __doc__, CASES)
