"""What a snapshot of a running feed costs, how large a token is, and both of a loader's state."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

import feeder
from contenders import FEED, copyto, make_coordinator, timed
from fetches import IMAGES, VECTORS, Load, SeekableFetch
from harness import Measures, Settings, Spread, interleave, time_of
from report import Goal, Report, figure, spread

NUM_WORKERS = 8
WARM_BATCHES = 10
ASKED_US = 50
ASKED_TOKEN_BYTES = 256
TOKEN_BATCHES = 500
COLD_BYTES = 200_000_000
COLD_STEP_BYTES = 21_000_000
FIRST_ROWS = (0, 10**6, 10**12)
ASKED_STATE_US = 100
ASKED_STATE_BYTES = 512
STATES = 2000
SAMPLES = (1000, 10**7)

TINY = Load(
    name="8×4 int64", batch_size=8, row_shape=(4,), dtype="int64", chunk_rows=3, bound=100
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """A feed whose snapshots hold leftovers of some size."""

    name: str
    load: Load
    snapshots: int
    """Snapshots in each repetition, each after another batch."""


KINDS = (
    Leftovers(name="at most 64 bytes", load=TINY, snapshots=300),
    Leftovers(name="at most 1.6 MB", load=VECTORS.in_chunks_of(400), snapshots=50),
    Leftovers(name="at most 16 MB", load=VECTORS.in_chunks_of(4000), snapshots=20),
)


def snapshots(settings: Settings) -> Report:
    """`bytes(coordinator.snapshot())` after each batch, beside a copy of as many bytes."""
    times = interleave(
        [
            *(partial(_snapshot_times, kind) for kind in KINDS),
            timed("copyto of 19.8 MB", copyto(IMAGES), settings),
        ],
        settings.repetitions,
    )
    copied = times["copyto of 19.8 MB"].times(IMAGES.batch_bytes / 1e9)
    changed = sum(times[f"{kind.name}: changed"].high for kind in KINDS)
    return Report(
        case="snapshot",
        title=f"bytes(coordinator.snapshot()) of a running feed with {NUM_WORKERS} workers, in µs",
        head=("leftover rows", "bytes", "snapshot", "copy of as many bytes", "beyond the copy"),
        rows=tuple(_row(kind, times) for kind in KINDS),
        measures=times,
        goals=(
            *(_goal(kind, times) for kind in KINDS),
            Goal(
                what="snapshot: changed when the feed ran on",
                asked=0,
                measured=Spread(samples=(changed,)),
                at_most=True,
            ),
        ),
        notes=(f"copyto of 19.8 MB: {spread(copied, 'GB/s')}",),
    )


def snapshots_per_second() -> float:
    """How many snapshots with the largest leftovers fit into a second."""
    kind = KINDS[-1]
    return 1e6 / _snapshot_times(kind)[f"{kind.name}: snapshot"]


def _snapshot_times(kind: Leftovers) -> Measures:
    """Medians over the snapshots of one feed, in microseconds."""
    with make_coordinator(kind.load, SeekableFetch(kind.load), NUM_WORKERS) as coordinator:
        feed = coordinator[FEED]
        for _ in range(WARM_BATCHES):
            next(feed)
        kept = coordinator.snapshot()
        kept_bytes = bytes(kept)
        taken, copied, sizes = _time_snapshots(coordinator, kind.snapshots)
        return {
            f"{kind.name}: snapshot": statistics.median(taken) * 1e6,
            f"{kind.name}: copy": statistics.median(copied) * 1e6,
            f"{kind.name}: beyond": statistics.median(
                a - b for a, b in zip(taken, copied, strict=True)
            ) * 1e6,
            f"{kind.name}: bytes": statistics.median(sizes),
            f"{kind.name}: changed": bytes(kept) != kept_bytes,
        }  # fmt: skip


def _time_snapshots(
    coordinator: feeder.Coordinator, count: int
) -> tuple[list[float], list[float], list[int]]:
    """Seconds for each snapshot, seconds to copy as many bytes into new memory, and the bytes."""
    feed = coordinator[FEED]
    taken, copied, sizes = [], [], []
    for _ in range(count):
        next(feed)
        start = time.perf_counter()
        data = bytes(coordinator.snapshot())
        taken.append(time.perf_counter() - start)
        sizes.append(len(data))
        copied.append(time_of(partial(bytes, _cold_bytes(len(data)))))
    return taken, copied, sizes


@cache
def _memory() -> tuple[memoryview, Iterator[int]]:
    return memoryview(np.ones(COLD_BYTES, np.uint8)), itertools.count(step=COLD_STEP_BYTES)


def _cold_bytes(size: int) -> memoryview:
    """Bytes that no cache holds any more, as the rows of a chunk that was fetched a while ago."""
    memory, starts = _memory()
    start = next(starts) % (COLD_BYTES - size)
    return memory[start : start + size]


def _row(kind: Leftovers, times: dict[str, Spread]) -> tuple[str, ...]:
    return (
        kind.name,
        figure(times[f"{kind.name}: bytes"].median),
        *(spread(times[f"{kind.name}: {what}"]) for what in ("snapshot", "copy", "beyond")),
    )


def _goal(kind: Leftovers, times: dict[str, Spread]) -> Goal:
    return Goal(
        what=f"snapshot: leftover of {kind.name}, beyond its copy",
        asked=ASKED_US,
        measured=times[f"{kind.name}: beyond"],
        unit="µs",
        at_most=True,
    )


def tokens(settings: Settings) -> Report:
    """The tokens of a feed whose workers have integer cursors, small and large."""
    sizes = {first: _token_sizes(first) for first in FIRST_ROWS}
    longest = Spread(samples=(max(spread.high for spread in sizes.values()),))
    return Report(
        case="token",
        title=f"batch.cut.token() of a feed with {NUM_WORKERS} workers and integer cursors",
        head=("cursors from", "bytes"),
        rows=tuple((f"{first:,}", spread(size)) for first, size in sizes.items()),
        measures={f"cursors from {first}": size for first, size in sizes.items()},
        goals=(
            Goal(
                what="token: the longest",
                asked=ASKED_TOKEN_BYTES,
                measured=longest,
                unit="bytes",
                at_most=True,
            ),
        ),
    )


def _token_sizes(first_row: int) -> Spread:
    with make_coordinator(TINY, SeekableFetch(TINY, first_row), NUM_WORKERS) as coordinator:
        feed = coordinator[FEED]
        return Spread(samples=tuple(len(next(feed).cut.token()) for _ in range(TOKEN_BATCHES)))


def states(settings: Settings) -> Report:
    """`loader.state_dict()` after each batch, as trainers take it: torchft in every step. Loaders
    of all frameworks have it from one class."""
    times = interleave([partial(_state_times, num) for num in SAMPLES], settings.repetitions)
    slowest = max((times[f"{num}: time"] for num in SAMPLES), key=lambda spread: spread.median)
    longest = Spread(samples=(max(times[f"{num}: bytes"].high for num in SAMPLES),))
    return Report(
        case="state",
        title="loader.state_dict() of a shuffled data set, in µs",
        head=("samples", "bytes", "state_dict"),
        rows=tuple(
            (f"{num:,}", figure(times[f"{num}: bytes"].median), spread(times[f"{num}: time"]))
            for num in SAMPLES
        ),
        measures=times,
        goals=(
            Goal(
                what="state: time", asked=ASKED_STATE_US, measured=slowest, unit="µs", at_most=True
            ),
            Goal(
                what="state: the longest", asked=ASKED_STATE_BYTES, measured=longest, unit="bytes",
                at_most=True,
            ),
        ),
    )  # fmt: skip


def _state_times(num_samples: int) -> Measures:
    """The median over the batches of one loader, in microseconds, and the longest state."""
    taken, sizes = [], []
    # Here, for `bench pair` measures commits that have no adapters, too.
    from feeder.adapters.arrays import ArrayLoader

    with ArrayLoader(range(num_samples), 1, shuffle=True) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in itertools.islice(batches, STATES):
            start = time.perf_counter()
            state = loader.state_dict()
            taken.append(time.perf_counter() - start)
            sizes.append(sum(len(value) for value in state.values()))
    return {
        f"{num_samples}: time": statistics.median(taken) * 1e6,
        f"{num_samples}: bytes": max(sizes),
    }
