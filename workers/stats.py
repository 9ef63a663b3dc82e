"""Plain counts of what a stream has done, and clocks of who waited for whom.

Each number has one writer, a thread or the holder of a lock, and anybody may read it at any time
without one: related numbers are one tuple, so a reader never sees half of a change. Batches are
counted with integers alone; time is taken only where somebody waits, or calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from feeder.workers.stream.spec import RunSpec, StreamSpec


class Stopwatch:
    """Seconds spent in something that one thread at a time does again and again.

    What a reader sees never falls, though the writer may be held up between reading the clock and
    noting it: Prometheus takes a counter that falls for a restart.

    Owner: the thread that starts and stops it. Any thread may read.
    """

    __slots__ = ("_shown", "_state")

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)
        self._shown = 0.0

    # The clock is the caller's: it has read it anyway, and all numbers of a moment agree.
    def start(self, now: float) -> None:
        """It begins."""
        self._state = (self._state[0], now)

    def stop(self, now: float) -> None:
        """It ends; harmless where it does not run."""
        seconds, since = self._state
        if since is not None:
            self._state = (seconds + now - since, None)

    @property
    def since(self) -> float | None:
        """Since when it runs; None while it does not."""
        return self._state[1]

    def seconds(self, now: float) -> float:
        """Seconds in all, those that run included."""
        seconds, since = self._state
        if since is not None:
            seconds += max(0.0, now - since)
        # Two readers may race here: one of them then shows what the other has seen, which is true.
        self._shown = seconds = max(self._shown, seconds)
        return seconds


_STEPS = 4
"""Lengths of waits are counted by quarters of a power of two: a quantile is within 19 %."""


class Waits(Stopwatch):
    """A stopwatch that also tells how long its waits were. Owner and readers as of that."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        super().__init__()
        # From a microsecond on, up to 2 ** 32 of them.
        self._counts = [0] * (32 * _STEPS + 1)

    def stop(self, now: float) -> None:
        """It ends; harmless where it does not run."""
        since = self.since
        super().stop(now)
        if since is not None:
            self._counts[_step(now - since)] += 1

    def quantile(self, share: float) -> float:
        """The seconds that this share of the waits took at most; 0 where there was none."""
        counts = list(self._counts)
        left = share * sum(counts)
        for step, count in enumerate(counts):
            left -= count
            if count and left <= 1e-9:
                return float(1e-6 * 2 ** (step / _STEPS))
        return 0.0


def _step(seconds: float) -> int:
    microseconds = seconds * 1e6
    if microseconds <= 1.0:
        return 0
    return min(32 * _STEPS, math.ceil(_STEPS * math.log2(microseconds)))


class Crowd:
    """Seconds that several threads have spent in something, added up.

    Owner: the queue's lock. Any thread may read.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = (0.0, 0, 0.0)

    def change(self, num: int, now: float) -> None:
        """So many threads come, or, if negative, go."""
        seconds, size, since = self._state
        self._state = (seconds + size * (now - since), size + num, now)

    def seconds(self, now: float) -> float:
        """Seconds in all, those of threads that are in it included."""
        seconds, size, since = self._state
        return seconds + size * max(0.0, now - since)


class PartitionCounts(NamedTuple):
    """What the calls of one partition came to."""

    calls: int
    """Calls that gave a chunk."""
    rows: int
    """Rows they gave."""
    bytes: int
    """Bytes of these rows."""
    seconds: float
    """Seconds spent in the fetch function, without waiting for room."""
    ended_at: float
    """When the last of them returned."""
    computed_s: float
    """Seconds of them in which the thread had a processor."""


class ExecutorCounts(NamedTuple):
    """The processes that fetch functions run in."""

    processes: int
    """Those that live (may fall)."""
    busy: int
    """Those that have something to do (may fall)."""
    restarts: int
    """Those that have ended by themselves, and were replaced."""
    bytes: int
    """Bytes of the memory in which their chunks come (may fall)."""
    kind: str = "processes"
    """What they are: "processes" of this host, or "actors" of a cluster."""
    nodes: tuple[tuple[str, int], ...] = ()
    """The nodes of a cluster, and how many are there (may fall)."""


class FetchStats:
    """What the fetchers did, per partition. What a reader sees of a partition never falls.

    Owner of a partition's numbers: the fetcher that holds the partition. Any thread may read.
    """

    def __init__(self, num_partitions: int) -> None:
        self._began = [0.0] * num_partitions
        self._done: list[tuple[int, int, int, float, float, float]]
        self._done = [(0, 0, 0, 0.0, 0.0, 0.0)] * num_partitions
        self.errors = [0] * num_partitions
        """Calls that raised, retried or not."""
        self.last_error = ""
        """What the last of them raised."""
        self.retries = [0] * num_partitions
        """Calls made again after they raised."""
        self.nothings = [0] * num_partitions
        """Calls that gave None: nothing right now."""

    def go_on(self, before: FetchStats) -> None:
        """Count on from those of a stream before, without its calls that are under way."""
        self._done, self.last_error = list(before._done), before.last_error
        self.errors, self.retries = list(before.errors), list(before.retries)
        self.nothings = list(before.nothings)

    def begin_list(self, partition: int, now: float) -> None:
        """A partition is called, once or several times."""
        self._began[partition] = now

    def end_list(
        self, partition: int, calls: int, rows: int, num_bytes: int, now: float, computed_s: float
    ) -> None:
        """Those calls have returned."""
        done = self._done[partition]
        # A plain tuple: to make one with names takes as long as a quick call.
        self._done[partition] = (
            done[0] + calls, done[1] + rows, done[2] + num_bytes,
            done[3] + now - self._began[partition], now, done[5] + computed_s,
        )  # fmt: skip

    def fail(self, partition: int, error: str) -> None:
        """A call raised."""
        self.errors[partition] += 1
        self.last_error = error

    def counts_of(self, partition: int, now: float) -> tuple[PartitionCounts, float]:
        """What a partition's calls came to, the time of those under way included; and for how long
        these have lasted."""
        # In this order: calls that return between the two reads are counted once, as done.
        began, done = self._began[partition], PartitionCounts(*self._done[partition])
        if began <= done.ended_at:
            return done, 0.0
        running_s = max(0.0, now - began)
        return done._replace(seconds=done.seconds + running_s), running_s

    def counts(self, now: float) -> list[PartitionCounts]:
        """The same of every partition."""
        return [self.counts_of(partition, now)[0] for partition in range(len(self._done))]


class BatchStats:
    """Batches that have passed some point. Owner: the thread that counts them. Any may read."""

    __slots__ = ("batches", "bytes", "rows")

    def __init__(self) -> None:
        self.batches = 0
        """How many."""
        self.rows = 0
        """Rows in them."""
        self.bytes = 0
        """Bytes in them."""

    def count(self, batches: int, rows: int, num_bytes: int) -> None:
        """Add some batches."""
        self.batches += batches
        self.rows += rows
        self.bytes += num_bytes


def num_partitions(spec: StreamSpec, run: RunSpec) -> int:
    """For how many threads, or workers, the calls of a stream are counted."""
    # Any thread may make any call of a pure function.
    return max(1, run.num_threads) if spec.pure else spec.num_workers


class StreamStats:
    """Everything that is counted of one stream; it may outlive a pipeline and go on with the next.

    The partitions are those of the fetching side, the devices those that batches are routed to.
    Each part names the thread that writes it; any thread may read all of them.
    """

    def __init__(self, num_partitions: int, num_devices: int) -> None:
        self.fetch = FetchStats(num_partitions)
        """Of the calls."""
        self.idle = Crowd()
        """Fetchers that wait: at the bound, or for a partition that may be called."""
        self.chunks = Stopwatch()
        """The waits for chunks of whoever merges."""
        self.partitions = [Stopwatch() for _ in range(num_partitions)]
        """Those of them that were for one partition's chunk."""
        self.room = Stopwatch()
        """Its waits for room below the bound."""
        self.made = BatchStats()
        """Batches that were made."""
        self.queued = [0] * num_devices
        """Batches put on each device queue."""
        self.handed = [(0, 0, 0)] * num_devices
        """Batches, rows and bytes of each device that were handed to its user, whose thread assigns
        them together."""
        self.source: Any = None
        """What the run of now calls: it may count records that it leaves out."""

    @classmethod
    def of(cls, spec: StreamSpec, run: RunSpec, num_devices: int) -> StreamStats:
        """For the streams of a specification."""
        return cls(num_partitions(spec, run), num_devices)

    def go_on(self, before: StreamStats, queued: int) -> None:
        """Count on from those of a stream before, when so many batches will have been put on each
        device queue; before anything is counted here. Waits count anew, since those of then may be
        under way."""
        if len(before.partitions) == len(self.partitions):
            self.fetch.go_on(before.fetch)
        self.made = copy.copy(before.made)
        self.handed, self.queued = list(before.handed), [queued] * len(self.queued)

    @property
    def skipped(self) -> int:
        """Defective records that the source has left out."""
        # A function of the user's may have anything of that name.
        skipped: int = self.source.skipped if hasattr(self.source, "count_skipped") else 0
        return skipped

    @property
    def store(self) -> dict[str, float] | None:
        """What the source has met with in reading objects of stores; None if it reads none."""
        counts: Callable[[], dict[str, float] | None] = getattr(
            self.source, "_store_counts", lambda: None
        )
        return counts()

    def numbers(self, now: float) -> dict[str, Any]:
        """Counts and seconds as one flat dictionary of numbers."""
        partitions = self.fetch.counts(now)
        fetch, made = self.fetch, self.made
        handed = list(self.handed)
        return {
            "fetch_calls": sum([partition.calls for partition in partitions]),
            "fetch_rows": sum([partition.rows for partition in partitions]),
            "fetch_bytes": sum([partition.bytes for partition in partitions]),
            "fetch_s": sum([partition.seconds for partition in partitions]),
            "fetch_errors": sum(fetch.errors),
            "fetch_retries": sum(fetch.retries),
            "fetch_nothings": sum(fetch.nothings),
            "batches": made.batches,
            "rows": made.rows,
            "bytes": made.bytes,
            "handed_batches": sum([batches for batches, _, _ in handed]),
            "handed_rows": sum([rows for _, rows, _ in handed]),
            "handed_bytes": sum([num_bytes for _, _, num_bytes in handed]),
            "fetchers_wait_s": self.idle.seconds(now),
            "chunks_wait_s": self.chunks.seconds(now),
            "room_wait_s": self.room.seconds(now),
        }
