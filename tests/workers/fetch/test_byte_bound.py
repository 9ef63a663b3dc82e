"""The bound on bytes holds for the chunks of calls under way too, for any number of workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import config
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.fetcher import Fetcher
from feeder.workers.fetch.policy import CallsReport
from feeder.workers.fetch.scheduler import BufferBudget, ListLimits, Scheduler, Turn
from feeder.workers.stats import StreamStats
from feeder.workers.stream.position import Partitions
from small import WAIT_S, Aside, make

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


class Calls:
    """The calls of one partition, of a row each; the third does something before it returns."""

    one_by_one = False

    def __init__(self, at_the_third: Callable[[], Any]) -> None:
        self._at_the_third = at_the_third
        self.made = 0

    def begin_epoch(self, epoch: int) -> int:
        return 0

    def put_back(self) -> tuple[float, ...]:
        return ()

    def begin_list(self, limits: Any) -> Callable[[], Any]:
        return self._call

    def _call(self) -> Any:
        self.made += 1
        if self.made == 3:
            self._at_the_third()
        return (np.zeros(1),)


@pytest.mark.parametrize(("num_bytes", "made"), [(8, 64), (900, 3)])
def test_a_list_under_way_ends_where_another_has_outgrown_what_it_was_taken_for(
    num_bytes: int, made: int
) -> None:
    """The large chunks of calls that have begun come in any case; no further ones are asked for."""
    partitions = Partitions(num_partitions=2, pure=False, arrival=False)
    spec = SimpleNamespace(
        names=("x",), seekable=False, axes=(0,), batch_size=64, pure=False, repeatable=True
    )
    names: Any = SimpleNamespace(spec=spec)
    stats, budget = StreamStats(2, 1), BufferBudget(1000, 1000, 1, 8, 2)
    scheduler = Scheduler(partitions, partitions.origin(), 1)
    channel = Channel(scheduler, budget, stats, names, (), timeout_s=WAIT_S)
    ahead, behind = scheduler.partitions
    turns = [Turn([partition], 64, 10**6) for partition in (ahead, behind)]
    for turn in turns:
        budget.begin_turn()
        scheduler.hold(list(turn.todo), 1, ListLimits(64, 64, 10**6, WAIT_S), 0.0)

    def hand_over() -> None:
        ahead.chunks.append((np.zeros(1),))
        turns[0].take_next()
        turns[0].done.append((ahead, CallsReport(1, 1, num_bytes), None, 0.0))
        channel.release(turns[0])

    run: Any = SimpleNamespace(debug=False)
    calls: Any = Calls(hand_over)
    Fetcher(names, run, channel, [calls, calls], stats.fetch).fill(turns[1])
    assert behind.next == made
    assert not channel.cuts_short, "there is room for the next ones"
    channel.close()


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
