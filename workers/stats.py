"""Plain counts of what a stream has done. Each number is written by one thread alone."""

from __future__ import annotations

from typing import Any


class FetchStats:
    """What the fetchers did, per lane."""

    def __init__(self, num_lanes: int) -> None:
        self.calls = [0] * num_lanes
        """Calls that gave a chunk."""
        self.rows = [0] * num_lanes
        """Rows they gave."""
        self.seconds = [0.0] * num_lanes
        """Seconds spent in the fetch function, without waiting for room."""
        self.retries = 0
        """Calls made again after they raised."""

    def count(self, lane: int, calls: int, rows: int, seconds: float) -> None:
        """Add what one bundle took."""
        self.calls[lane] += calls
        self.rows[lane] += rows
        self.seconds[lane] += seconds


class BatchStats:
    """What the enqueuer did."""

    def __init__(self) -> None:
        self.batches = 0
        """Batches put on device queues."""
        self.rows = 0
        """Rows in them."""
        self.bytes = 0
        """Bytes in them."""

    def count(self, batches: int, rows: int, num_bytes: int) -> None:
        """Add some batches."""
        self.batches += batches
        self.rows += rows
        self.bytes += num_bytes


def totals(fetch: FetchStats, batches: BatchStats) -> dict[str, Any]:
    """Both as one flat dictionary of numbers."""
    return {
        "fetch_calls": sum(fetch.calls),
        "fetch_rows": sum(fetch.rows),
        "fetch_s": sum(fetch.seconds),
        "fetch_retries": fetch.retries,
        "batches": batches.batches,
        "rows": batches.rows,
        "bytes": batches.bytes,
    }
