"""Plain counts of what a stream has done, and clocks of who waited for whom.

Each number is written by one thread, or under one lock; anybody may read it at any time. Batches
are counted with integers alone; time is taken only where somebody waits, or calls.
"""

from __future__ import annotations

from typing import Any

from workers.spec import RunSpec, StreamSpec


class Stopwatch:
    """Seconds spent in something that one thread at a time does again and again.

    What has passed and since when it runs are one value: a reader never sees half of a change, and
    what it reads never falls.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)

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

    def read(self, now: float) -> float:
        """Seconds in all, those that run included."""
        seconds, since = self._state
        return seconds if since is None else seconds + max(0.0, now - since)


class Crowd:
    """Seconds that several threads have spent in something, added up. Written under a lock."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = (0.0, 0, 0.0)

    def change(self, num: int, now: float) -> None:
        """So many threads come, or, if negative, go."""
        seconds, size, since = self._state
        self._state = (seconds + size * (now - since), size + num, now)

    def read(self, now: float) -> float:
        """Seconds in all, those of threads that are in it included."""
        seconds, size, since = self._state
        return seconds + size * max(0.0, now - since)


class FetchStats:
    """What the fetchers did, per lane."""

    def __init__(self, num_lanes: int) -> None:
        self.calls = [0] * num_lanes
        """Calls that gave a chunk."""
        self.rows = [0] * num_lanes
        """Rows they gave."""
        self.bytes = [0] * num_lanes
        """Bytes of these rows."""
        self.clocks = [Stopwatch() for _ in range(num_lanes)]
        """Time spent in the fetch function, without waiting for room."""
        self.errors = [0] * num_lanes
        """Calls that raised, retried or not."""
        self.retries = [0] * num_lanes
        """Calls made again after they raised."""
        self.last_error = ""
        """What the last of them raised."""
        self.nothings = [0] * num_lanes
        """Calls that gave None: nothing right now."""

    def fail(self, lane: int, error: str) -> None:
        """A call raised."""
        self.errors[lane] += 1
        self.last_error = error

    def count(self, lane: int, calls: int, rows: int, num_bytes: int, now: float) -> None:
        """Add what one bundle took; its clock was started before."""
        self.calls[lane] += calls
        self.rows[lane] += rows
        self.bytes[lane] += num_bytes
        self.clocks[lane].stop(now)


class BatchStats:
    """Batches that have passed some point."""

    __slots__ = ("batches", "bytes", "rows")

    def __init__(self) -> None:
        self.batches = 0
        """How many."""
        self.rows = 0
        """Rows in them."""
        self.bytes = 0
        """Bytes in them."""

    def count(self, rows: int, num_bytes: int) -> None:
        """Add one batch."""
        self.batches += 1
        self.rows += rows
        self.bytes += num_bytes

    def count_all(self, batches: int, rows: int, num_bytes: int) -> None:
        """Add several."""
        self.batches += batches
        self.rows += rows
        self.bytes += num_bytes


def num_lanes(spec: StreamSpec, run: RunSpec) -> int:
    """How many ordered sequences of calls a stream has."""
    return run.num_threads if spec.pure else spec.num_workers


class StreamStats:
    """Everything that is counted of one stream; it may outlive a pipeline and go on with the next.

    The lanes are those of the fetching side, the devices those that batches are dealt to.
    """

    def __init__(self, num_lanes: int, num_devices: int) -> None:
        self.fetch = FetchStats(num_lanes)
        """Of the calls."""
        self.idle = Crowd()
        """Fetchers that wait: at the bound, or for a lane that may be called."""
        self.chunks = Stopwatch()
        """The enqueuer's waits for chunks."""
        self.lanes = [Stopwatch() for _ in range(num_lanes)]
        """Those of them that were for one lane's chunk."""
        self.room = Stopwatch()
        """The enqueuer's waits for room below the bound."""
        self.made = BatchStats()
        """Batches that the enqueuer has made."""
        self.queued = [0] * num_devices
        """Batches put on each device queue."""
        self.handed = [BatchStats() for _ in range(num_devices)]
        """Batches of each device that were handed to the user."""

    @classmethod
    def of(cls, spec: StreamSpec, run: RunSpec, num_devices: int) -> StreamStats:
        """For the streams of a specification."""
        return cls(num_lanes(spec, run), num_devices)

    def totals(self) -> dict[str, Any]:
        """The counts as one flat dictionary of numbers."""
        fetch, made, handed = self.fetch, self.made, self.handed
        return {
            "fetch_calls": sum(fetch.calls),
            "fetch_rows": sum(fetch.rows),
            "fetch_bytes": sum(fetch.bytes),
            "fetch_errors": sum(fetch.errors),
            "fetch_retries": sum(fetch.retries),
            "fetch_nothings": sum(fetch.nothings),
            "batches": made.batches,
            "rows": made.rows,
            "bytes": made.bytes,
            "handed_batches": sum([device.batches for device in handed]),
            "handed_rows": sum([device.rows for device in handed]),
            "handed_bytes": sum([device.bytes for device in handed]),
        }

    def waits(self, now: float) -> dict[str, float]:
        """The clocks as one flat dictionary of seconds."""
        return {
            "fetch_s": sum([clock.read(now) for clock in self.fetch.clocks]),
            "fetchers_wait_s": self.idle.read(now),
            "chunks_wait_s": self.chunks.read(now),
            "room_wait_s": self.room.read(now),
        }
