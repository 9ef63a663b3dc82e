"""Fetchers, the merge and the user between them: who waits, who is woken, who merges."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.fetch.channel import Channel, StallDetector
from feeder.workers.fetch.policy import CallKind
from feeder.workers.fetch.scheduler import (
    BufferBudget,
    CallsReport,
    Held,
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
QUICK = CallsReport(1, 1, 8, 0.0, 0.0)
PATIENT = Tuning(max_computing=1, grace_s=10 * WAIT_S, look_s=10 * WAIT_S)
"""A batcher thread that waits goes on when it is woken, and not before."""


@pytest.fixture
def tuning() -> Tuning:
    """One fetcher may compute while the merge is busy."""
    return Tuning(max_computing=1)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch, tuning: Tuning) -> Iterator[Channel]:
    """Four partitions."""
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


def acquire_some(channel: Channel) -> Turn:
    turn = channel.acquire()
    assert turn is not None
    return turn


def acquire(channel: Channel) -> Partition:
    """Acquire one partition."""
    partition = acquire_some(channel).take_next()
    assert partition is not None
    return partition


def give(
    channel: Channel, partition: Partition, report: CallsReport, put_off_s: float = 0.0
) -> bool:
    """Give one partition back."""
    turn = Turn((), 0, 0)
    turn.done.append((partition, report, None, put_off_s))
    return channel.release(turn)


def release(channel: Channel, partition: Partition) -> None:
    partition.chunks.append((np.zeros(1),))
    give(channel, partition, ONE_ROW)


def is_one_idle(channel: Channel) -> bool:
    """Whether a fetcher waits."""
    return channel._num_idle == 1


def be(channel: Channel, kind: CallKind) -> None:
    """All partitions are of a kind."""
    for partition in channel._scheduler.partitions:
        channel._policy._set_kind(partition, kind)


class Fetcher(threading.Thread):
    """Waits for a partition in a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self.partition: Partition | None = None
        self.has_one = threading.Event()
        self.start()

    def run(self) -> None:
        turn = self._channel.acquire()
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


def test_a_quick_call_is_waited_for_only_while_somebody_looks(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(channel, CallKind.QUICK)
    first, wait = Fetcher(channel), channel._arrived.wait

    def noted(pause: float) -> Any:
        if first.has_one.is_set():
            return wait(pause)
        channel._lock.release()
        first.has_one.wait(WAIT_S)
        return not channel._lock.acquire()  # It looks, and not before.

    monkeypatch.setattr(channel._arrived, "wait", noted)
    merge = Aside(lambda: channel.collect(0))
    assert first.has_one.wait(WAIT_S)
    # The merge soon sees that this one is not quick, and lets the others of its turn go; then it
    # looks no more.
    second = acquire(channel)
    assert first.partition is not None
    kinds = [channel._policy.kind_of(partition) for partition in (first.partition, second)]
    assert kinds == [CallKind.COMPUTES, CallKind.QUICK]
    release(channel, acquire(channel))
    release(channel, first.partition)
    assert merge.result()[0].partition == first.partition.number == 0


@pytest.fixture
def aloof(channel: Channel) -> Channel:
    """All partitions are quick."""
    be(channel, CallKind.QUICK)
    return channel


def call_all(turn: Turn) -> None:
    """Call all partitions of a turn that are left."""
    while (partition := turn.take_next()) is not None:
        partition.chunks.append((np.zeros(1),))
        turn.done.append((partition, QUICK, None, 0.0))


def merge_inline(channel: Channel) -> None:
    """Fetch from all quick partitions in one turn, after which the fetcher is told to merge."""
    turn = acquire_some(channel)
    call_all(turn)
    assert channel.release(turn)


@pytest.mark.parametrize("tuning", [PATIENT])
def test_the_merge_is_one_threads_at_a_time(aloof: Channel) -> None:
    batcher = Aside(lambda: aloof.collect(0))
    merge_inline(aloof)
    other = Fetcher(aloof)
    wait_until(lambda: is_one_idle(aloof))
    with aloof._lock:
        aloof._arrived.notify()  # Whatever wakes it, the batcher stays where it is.
    assert not other.has_one.wait(0.05)
    found = aloof.collect_inline(0)
    assert found is not None
    assert [chunk_list.partition for chunk_list in found] == list(range(NUM_PARTITIONS))
    assert aloof.collect_inline(1) is None
    partition = acquire(aloof)
    assert partition.number == 1
    aloof._budget.ahead_bytes += aloof._policy._tuning.ahead_bytes
    aloof._policy._paces[1]._is_quick = False
    partition.chunks.append((np.zeros(1),))
    assert give(aloof, partition, ONE_ROW) is False
    assert [chunk_list.partition for chunk_list in batcher.result()] == [1]
    aloof.close()
    other.join(WAIT_S)


@pytest.mark.parametrize("tuning", [Tuning(grace_s=0.0, look_s=0.0)])
def test_a_batcher_that_has_stopped_looking_is_woken_when_it_is_to_look_again(
    aloof: Channel, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, looked, wait = threading.Event(), threading.Event(), aloof._arrived.wait

    def noted(pause: float) -> Any:
        if pause == tuning.slow_look_s:
            long.set()
        return wait(pause)

    def check(*_: Any) -> float:
        looked.set()
        return 10 * WAIT_S

    monkeypatch.setattr(aloof._arrived, "wait", noted)
    monkeypatch.setattr(aloof._silence, "check", check)
    batcher = Aside(lambda: aloof.collect(0))
    assert looked.wait(WAIT_S)
    looked.clear()
    merge_inline(aloof)
    with aloof._lock:
        aloof._arrived.notify()
    assert long.wait(WAIT_S)
    assert aloof.collect_inline(0)
    assert aloof.collect_inline(0) is None
    assert looked.wait(tuning.slow_look_s / 2)
    aloof.close()
    with pytest.raises(feeder.ClosedError):
        batcher.result()


@pytest.mark.parametrize("tuning", [PATIENT])
def test_who_merges_inline_at_the_bound_waits_for_room_and_is_idle(
    aloof: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait, idle = threading.Event(), aloof._room.wait, aloof._stats.idle

    def noted() -> Any:
        waits.set()
        return wait()

    monkeypatch.setattr(aloof._room, "wait", noted)
    batcher = Aside(lambda: aloof.collect(0))
    merge_inline(aloof)
    assert aloof.collect_inline(0)
    aloof.count(aloof._budget.max_rows, 0)
    aloof.queue(0, 1)
    fetcher = Aside(lambda: aloof.collect_inline(0))
    assert waits.wait(WAIT_S)
    now = time.monotonic()
    assert idle.seconds(now + 1) - idle.seconds(now) == pytest.approx(1)
    aloof.hand_out(0, Held(1, aloof._budget.max_rows, 0, 0))
    assert fetcher.result() is None
    assert idle.seconds(now + 9) == idle.seconds(now + 8)
    aloof.close()
    with pytest.raises(feeder.ClosedError):
        batcher.result()


@pytest.mark.parametrize("tuning", [PATIENT])
def test_a_call_that_does_not_return_holds_no_partition_of_its_turn(channel: Channel) -> None:
    be(channel, CallKind.QUICK)
    merge = Aside(lambda: channel.collect(0))
    turn = acquire_some(channel)
    first, second = turn.take_next(), turn.take_next()
    assert first is not None and second is not None
    first.chunks.append((np.zeros(1),))
    turn.done.append((first, QUICK, None, 0.0))
    second.begin_calls(time.monotonic())
    with channel._lock:
        channel._look(time.monotonic())
        channel._arrived.notify()
    assert [chunk_list.partition for chunk_list in merge.result()] == [0]
    assert [one.running for one in channel._scheduler.partitions] == [False, True, False, False]
    assert (turn.take_next(), turn.take_done(), channel._budget.rows) == (None, [], 1)
    assert channel._budget.room_bytes(1) == channel._budget.max_bytes - 2 * QUICK.num_bytes
    # What the call gives after all is given back like any other.
    second.chunks.append((np.zeros(1),))
    turn.done.append((second, QUICK, None, 0.0))
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
    partitions = [acquire(channel) for _ in range(2)]
    for partition in partitions:
        release(channel, partition)
    assert len(channel.collect(partitions[0].number)) == 2


def test_a_fetcher_is_woken_for_each_that_finds_a_partition(channel: Channel) -> None:
    """Two wake-ups in a row are for two threads, even before the first has gone on."""
    make_busy(channel)
    first = acquire(channel)
    others = [Fetcher(channel) for _ in range(NUM_PARTITIONS - 1)]
    wait_until(lambda: channel._num_idle == NUM_PARTITIONS - 1)
    with channel._lock:
        channel._policy.merge_collects([first])
        channel._policy.merge_waits([first], time.monotonic())
        channel._wake_fetcher()
    assert all(other.has_one.wait(WAIT_S) for other in others)
    numbers = {other.partition.number for other in others if other.partition is not None}
    assert numbers == set(range(NUM_PARTITIONS)) - {first.number}
