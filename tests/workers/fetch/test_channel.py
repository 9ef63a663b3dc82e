"""Fetchers, the merge and the user between them: who waits, who is woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from feeder.workers.fetch.channel import Channel, StallDetector
from feeder.workers.fetch.scheduler import (
    BufferBudget,
    Called,
    CallsReport,
    Partition,
    Scheduler,
    Turn,
)
from feeder.workers.fetch.threads import Wakes
from feeder.workers.spec import CallNames
from feeder.workers.stats import StreamStats
from feeder.workers.stream.position import Partitions
from feeder.workers.tuning import Tuning
from small import WAIT_S, Aside, make, wait_until

NUM_PARTITIONS = 4
ONE_ROW = CallsReport(1, 1, 8, 0.01, 0.0)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Four partitions, of which one may compute while the merge is busy."""
    tuning = Tuning(max_computing=1)
    monkeypatch.setattr(StallDetector, "check", lambda *_: 10 * WAIT_S)
    partitions = Partitions(num_partitions=NUM_PARTITIONS, pure=False, arrival=False)
    spec: Any = SimpleNamespace(seekable=False, axes=(0,), batch_size=4)
    channel = Channel(
        Scheduler(partitions, partitions.origin(), 1, tuning),
        BufferBudget(1000, 10**12, 1),
        StreamStats(NUM_PARTITIONS, 1),
        CallNames(spec, partitions),
        (),
        timeout_s=WAIT_S,
        tuning=tuning,
    )
    yield channel
    channel.close()


def acquire(channel: Channel, most: int = 1) -> Turn:
    """Acquire partitions."""
    turn = channel.acquire(most)
    assert turn is not None
    return turn


def call_next(turn: Turn) -> Partition:
    """Call the next partition of a turn, which gives a row."""
    partition = turn.take_next()
    assert partition is not None
    partition.chunks.append((np.zeros(1),))
    turn.done.append(Called(partition, ONE_ROW))
    return partition


class Fetcher(threading.Thread):
    """Waits for a partition in a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self.partition: Partition | None = None
        self.has_one = threading.Event()
        self.start()

    def run(self) -> None:
        turn = self._channel.acquire(1)
        self.partition = None if turn is None else turn.take_next()
        self.has_one.set()


def test_a_wait_that_is_over_before_it_begins_comes_to_an_end() -> None:
    def wait_often() -> None:
        for _ in range(20_000):
            Wakes().wait(1e-6)

    waiting = threading.Thread(target=wait_often, daemon=True)
    waiting.start()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def test_a_call_that_does_not_return_holds_no_partition_of_its_turn(channel: Channel) -> None:
    turn = acquire(channel, NUM_PARTITIONS)
    call_next(turn)
    second = turn.take_next()
    assert second is not None and len(turn.todo) == 2
    second.begin_calls(time.monotonic())
    merge = Aside(lambda: channel.collect(0))
    assert [chunk_list.partition for chunk_list in merge.result()] == [0]
    assert [one.running for one in channel._scheduler.partitions] == [False, True, False, False]
    assert (turn.take_next(), turn.take_done(), channel._budget.rows) == (None, [], 1)
    # What the call gives after all is given back like any other.
    second.chunks.append((np.zeros(1),))
    turn.done.append(Called(second, ONE_ROW))
    channel.release(turn)
    assert (channel._budget.rows, channel._scheduler.running) == (2, 0)
    assert channel._budget.num_calling == 0


class Waiting:
    """Calls that wait until all of them are under way."""

    def __init__(self, num: int) -> None:
        self.together = threading.Barrier(num)

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.together.wait(WAIT_S)
        return (np.full((batch_size, 1), worker_id),)


def test_calls_that_wait_for_each_other_are_made_together() -> None:
    fetch = Waiting(NUM_PARTITIONS)
    with make(fetch, ["x"], num_worker_threads=NUM_PARTITIONS, epochs=None) as coordinator:
        feed = coordinator["train"]
        workers = [int(next(feed)["x"][0, 0]) for _ in range(50 * NUM_PARTITIONS)]
        fetch.together.abort()
    assert workers == list(range(NUM_PARTITIONS)) * 50


def make_busy(channel: Channel) -> None:
    """Have the merge find what it wants, so that it does not wait."""
    turns = [acquire(channel) for _ in range(2)]
    first, _ = [call_next(turn) for turn in turns]
    for turn in turns:
        channel.release(turn)
    assert len(channel.collect(first.number)) == 2


def test_a_fetcher_is_woken_for_each_that_finds_a_partition(channel: Channel) -> None:
    """Two wake-ups in a row are for two threads, even before the first has gone on."""
    make_busy(channel)
    first = acquire(channel).take_next()
    assert first is not None
    others = [Fetcher(channel) for _ in range(NUM_PARTITIONS - 1)]
    wait_until(lambda: channel._num_idle == NUM_PARTITIONS - 1)
    with channel._lock:
        channel._policy.merge_collects([first])
        channel._policy.merge_waits([first], time.monotonic())
        channel._wake_fetcher()
    assert all(other.has_one.wait(WAIT_S) for other in others)
    numbers = {other.partition.number for other in others if other.partition is not None}
    assert numbers == set(range(NUM_PARTITIONS)) - {first.number}
