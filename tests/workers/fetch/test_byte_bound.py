"""The bounds on bytes and rows hold for chunks of calls under way, for any number of workers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import config
from feeder.workers.fetch.threads import Wakes
from small import WAIT_S, Aside, make
from watching import CallsOf

ROW_BYTES = 100_000


class Weighed:
    """Rows of 100 kB, and how many there were at most between a call's beginning and the moment
    when the user took them."""

    def __init__(self, num_calls: int, rows: int) -> None:
        self.num_calls, self.rows = num_calls, rows
        self._lock = threading.Lock()
        self._there = self.most = 0

    def count(self, rows: int) -> None:
        with self._lock:
            self._there += rows
            self.most = max(self.most, self._there)

    def __call__(self, call: feeder.Call) -> Any:
        if call.index >= self.num_calls:
            raise StopIteration
        self.count(self.rows)
        return [np.full((self.rows, ROW_BYTES), call.index % 251, np.uint8)]


@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("order", ["ticket", "arrival"])
def test_many_workers_keep_within_the_bound(rows: int, batch_size: int, order: str) -> None:
    fetch, bound = Weighed(200, rows), 10
    settings: dict[str, Any] = {
        "names": ["x"], "batch_size": batch_size, "num_worker_threads": 64, "order": order,
        "max_buffered_bytes": bound * ROW_BYTES, "max_buffered_batches": 1000,
    }  # fmt: skip
    with make(fetch, **settings) as coordinator:
        total = 0
        for batch in coordinator["train"]:
            total += batch.rows
            fetch.count(-batch.rows)
    assert total == 200 * rows
    # What comes on top while the user's device starves: a batch, and the chunks that it is made of.
    assert fetch.most <= bound + batch_size + 3 * rows


def test_a_chunk_larger_than_the_bound_goes_through() -> None:
    fetch = Weighed(20, 4)
    with make(fetch, names=["x"], batch_size=4, num_worker_threads=8,
              max_buffered_bytes=ROW_BYTES) as coordinator:  # fmt: skip
        assert [int(batch["x"][0, 0]) for batch in coordinator["train"]] == list(range(20))


def test_by_default_all_workers_begin_at_once() -> None:
    """Nobody knows how large their chunks are, and most are small."""
    barrier = threading.Barrier(8)

    def fetch(worker_id: int, batch_size: int) -> Any:
        barrier.wait(WAIT_S)
        return [np.zeros((batch_size, 3))]

    with make(fetch, names=["x"], num_worker_threads=8, epochs=None) as coordinator:
        reader = Aside(lambda: next(coordinator["train"]))
        assert reader.result().rows == 4
        barrier.abort()


def test_bytes_are_bounded_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < config.default_bytes() <= 2**30
    monkeypatch.setattr(config, "memory_bytes", lambda: 2**40)
    assert config.default_bytes() == 2**30
    monkeypatch.setattr(config, "memory_bytes", lambda: 2**24)
    assert config.default_bytes() == 2**22
    fetch = Weighed(200, 1)
    with make(fetch, names=["x"], batch_size=1, num_worker_threads=2) as coordinator:
        for batch in coordinator["train"]:
            fetch.count(-batch.rows)
    # 41 rows, and what is made while the user takes those.
    assert fetch.most < 60


# ---- rows


@pytest.mark.parametrize(("num_threads", "bound"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("form", ["call", "worker"])
def test_calls_are_ahead_by_the_bound_alone_however_small_the_rows_are(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, bound: int, form: str
) -> None:
    """What a policy that learns has not used yet is old."""
    made: list[None] = []

    def of_call(call: feeder.Call) -> Any:
        made.append(None)
        return [np.zeros((4, 2), np.uint8)]

    def of_worker(worker_id: int, batch_size: int) -> Any:
        return of_call(feeder.Call(0, 0, worker_id, batch_size, 0))

    fetch = of_call if form == "call" else of_worker
    calls = CallsOf(monkeypatch, (Wakes, "wait"))
    with make(fetch, ["x"], 4, num_worker_threads=num_threads, num_threads=num_threads,
              epochs=None, max_buffered_batches=bound) as coordinator:  # fmt: skip
        feed = coordinator["train"]
        for _ in range(10):
            next(feed)
        queue = feed.streams[0].pipeline.queue
        calls.wait_until(lambda: queue._num_idle == num_threads)
        # What calls under way give comes on top.
        assert len(made) <= 10 + bound + num_threads


@pytest.mark.served
def test_memory_is_bounded_however_many_threads_call_a_pure_function() -> None:
    def fetch(call: feeder.Call) -> Any:
        never.wait(0.0002)
        return [np.zeros((1, 1000))]

    never = threading.Event()
    with make(fetch, ["x"], 4, num_worker_threads=1, num_threads=16, epochs=None,
              max_buffered_batches=100) as coordinator:  # fmt: skip
        feed = coordinator["train"]
        for _ in range(300):
            next(feed)
            never.wait(0.001)
        assert feed.stats()["peak_buffered_rows"] < 2 * 400


def test_a_ticket_ends_at_the_byte_bound_when_the_bytes_of_a_row_are_known() -> None:
    """Tickets of calls that gave one row each are for many calls, which give many rows now."""
    one, many = np.zeros((1, 1024), "f4"), np.zeros((64, 1024), "f4")

    def fetch(call: feeder.Call) -> Any:
        if call.index == 4040:
            raise StopIteration
        return (one if call.index < 4000 else many,)

    bound = 1 << 20
    settings = {"num_threads": 1, "max_buffered_bytes": bound, "batch_size": 64}
    with make(fetch, ["x"], **settings) as coordinator:
        feed = coordinator["train"]
        assert sum(batch.rows for batch in feed) == 4000 + 40 * 64
        # Of the call that goes above it all rows are kept.
        assert feed.stats()["peak_buffered_bytes"] <= bound + 2 * many.nbytes
