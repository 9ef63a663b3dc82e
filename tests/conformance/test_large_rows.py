"""Memory is bounded with rows of an image's size and a slow user.

Small rows hide it: they are copied before anybody else gets to run.
"""

from __future__ import annotations

import weakref
from threading import Lock
from typing import Any

import numpy as np
import pytest

from feeder import Feed
from feeder.workers.fetch.bound import Bound
from feeds import running
from watching import CallsOf

pytestmark = pytest.mark.served  # as much work as feeds that are served

ROW = (227, 227, 3)
ROW_BYTES = 227 * 227 * 3 * 4 + 8
"""Bytes of an image of float32 and its id."""
BATCH = 32
WORKERS = 2
WAIT_S = 20.0


class Images:
    """`fetch(worker_id, batch_size)` of large rows: of each worker so many chunks of so many rows.

    It knows how many rows of its chunks are alive, whoever holds them.
    """

    def __init__(self, chunk_rows: int, chunks: int) -> None:
        self.chunk_rows, self.chunks = chunk_rows, chunks
        self.calls = [0] * WORKERS
        self.ended = 0
        self.lock = Lock()
        self.dead: list[int] = []
        self.most_alive = 0

    def __call__(self, worker_id: int, batch_size: int) -> tuple[np.ndarray, ...]:
        with self.lock:
            if self.calls[worker_id] == self.chunks:
                self.ended += 1
                raise StopIteration
            self.calls[worker_id] += 1
            alive = (sum(self.calls) - len(self.dead)) * self.chunk_rows
            self.most_alive = max(self.most_alive, alive)
        # Pages of zeros that nobody writes to take no memory.
        images = np.zeros((self.chunk_rows, *ROW), np.float32)
        weakref.finalize(images, self.dead.append, worker_id)
        return images, np.arange(self.chunk_rows)

    def wait_until_full(self, feed: Feed, calls: CallsOf, max_rows: int) -> None:
        """Wait until the bound is reached, or there is nothing left to fetch."""
        calls.wait_until(lambda: count_rows(feed) >= max_rows or self.ended == WORKERS)


def count_rows(feed: Feed) -> int:
    """Return the rows that are buffered, and those that are kept for a snapshot."""
    stats = feed.stats()
    return int(stats["buffered_rows"] + stats["kept_rows"])


@pytest.mark.parametrize("chunk_rows", (128, 7))
@pytest.mark.parametrize(
    "bound", ({"max_buffered_batches": 2}, {"max_buffered_bytes": 50_000_000}), ids=" ".join
)
def test_memory_is_bounded_whatever_the_size_of_the_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, bound: dict[str, int]
) -> None:
    fetch = Images(chunk_rows, 3 * 128 // chunk_rows)
    calls = CallsOf(monkeypatch, (Bound, "add_chunks"), (Bound, "add"))
    most_bytes = bound.get("max_buffered_bytes", 2 * BATCH * ROW_BYTES)
    most_rows = -(-most_bytes // ROW_BYTES)
    # A worker hands over a chunk, or chunks until they make a batch.
    list_rows = chunk_rows if chunk_rows >= BATCH else BATCH + chunk_rows - 1
    num = 0
    settings: dict[str, Any] = {
        "input_blob_names": ["image", "id"], "num_worker_threads": WORKERS, "timeout": WAIT_S,
        "batch_size": BATCH, **bound,
    }  # fmt: skip
    with running(fetch, **settings) as (_, feed):
        while True:
            fetch.wait_until_full(feed, calls, most_rows)
            batch = next(feed, None)
            if batch is None:
                break
            num += batch.rows
            del batch
        stats = feed.stats()
    assert num == fetch.chunks * chunk_rows * WORKERS
    # What is kept of a chunk that has been copied in part counts in the bound, but not as buffered.
    kept_bytes = (chunk_rows - 1) * ROW_BYTES
    assert most_rows - chunk_rows < stats["peak_buffered_rows"] <= most_rows + list_rows * WORKERS
    assert most_bytes - kept_bytes <= stats["peak_buffered_bytes"]
    assert stats["peak_buffered_bytes"] <= most_bytes + list_rows * WORKERS * ROW_BYTES
    assert stats["buffered_rows"] == stats["buffered_bytes"] == 0
    # Not counted is the chunk behind the cut of the batch that the user has.
    assert fetch.most_alive <= most_rows + list_rows * WORKERS + chunk_rows
