"""How many fetchers compute at once, beside a merge that has enough to do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.fetch import channel as channel_module
from feeder.workers.fetch import policy as dispatch_module
from feeder.workers.fetch.channel import SLOW_S, Channel, StallDetector
from feeder.workers.fetch.scheduler import BufferBudget, Held, Partition, Scheduler
from feeder.workers.stats import StreamStats
from feeder.workers.stream.position import Partitions
from small import WAIT_S, Aside

NUM_LANES = 4


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Four partitions; one fetcher may compute while the merge is busy."""
    monkeypatch.setattr(dispatch_module, "MOST_COMPUTING", 1)
    monkeypatch.setattr(StallDetector, "check", lambda *_: 10 * WAIT_S)
    partitions = Partitions(num_partitions=NUM_LANES, pure=False, arrival=False)
    channel = Channel(
        Scheduler(partitions, partitions.origin(), 1),
        BufferBudget(1000, 10**12, 1),
        StreamStats(NUM_LANES, 1),
        timeout_s=WAIT_S,
        marked=False,
        axis=0,
        describe=lambda partition, call: (partition, call),
        waited_since=lambda: None,
    )
    yield channel
    channel.close()


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for something that other threads do; what they do wakes nobody here."""
    pause, until = threading.Event(), time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        pause.wait(0.001)


def acquire(channel: Channel) -> Partition:
    partition = channel.acquire()
    assert partition is not None
    return partition


def release(channel: Channel, partition: Partition) -> None:
    partition.chunks.append((np.zeros(1),))
    channel.release(partition, 1, 8)


class Fetcher(threading.Thread):
    """Waits for a partition in a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self.partition: Partition | None = None
        self.has_one = threading.Event()
        self.start()

    def run(self) -> None:
        self.partition = self._channel.acquire()
        self.has_one.set()


def make_busy(channel: Channel) -> None:
    """Have the merge find what it wants, so that it does not wait."""
    partitions = [acquire(channel) for _ in range(2)]
    for partition in partitions:
        release(channel, partition)
    assert len(channel.collect(partitions[0].number)) == 2


def test_before_the_merge_has_anything_all_may_compute(channel: Channel) -> None:
    assert {acquire(channel).number for _ in range(NUM_LANES)} == set(range(NUM_LANES))


def test_beside_a_busy_merge_one_computes(channel: Channel) -> None:
    make_busy(channel)
    first = acquire(channel)
    second = Fetcher(channel)
    wait_until(lambda: len(channel._idle) == 1)
    assert not second.has_one.wait(0.05)
    release(channel, first)
    third = acquire(channel)
    assert third is not first
    # A merge that has to wait lets all of them go on.
    collected: list[Any] = []
    merge = threading.Thread(target=lambda: collected.extend(channel.collect(third.number)))
    merge.start()
    assert second.has_one.wait(WAIT_S)
    release(channel, third)
    merge.join(WAIT_S)
    assert [bundle.partition for bundle in collected] == [first.number, third.number]
    channel.close()
    second.join(WAIT_S)


def test_beside_a_busy_merge_any_number_wait(channel: Channel) -> None:
    make_busy(channel)
    partitions = {acquire(channel).number}
    for partition in channel._rota.partitions:
        partition.waits = True
    partitions |= {acquire(channel).number for _ in range(NUM_LANES - 1)}
    assert partitions == set(range(NUM_LANES))


@pytest.fixture
def flooded(channel: Channel) -> Channel:
    """The merge is busy, and each call fills a bundle about as fast as that is merged."""
    make_busy(channel)
    for partition in channel._rota.partitions:
        partition.floods = True
    return channel


def test_of_calls_that_flood_the_caches_one_is_ahead_of_a_busy_merge(flooded: Channel) -> None:
    first = acquire(flooded)
    release(flooded, first)
    second = Fetcher(flooded)
    wait_until(lambda: len(flooded._idle) == 1)
    assert not second.has_one.wait(0.05)
    assert [bundle.partition for bundle in flooded.collect(first.number)] == [first.number]
    assert second.has_one.wait(WAIT_S)


def test_a_fetcher_that_is_coming_counts_as_one_that_computes(
    flooded: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = flooded._dispatch
    assert dispatch.pick(0.0) is not None
    assert dispatch.pick(0.0, 1) is None
    monkeypatch.setattr(dispatch_module, "MOST_COMPUTING", 2)
    assert dispatch.pick(0.0, 1) is None  # Of these one is ahead, however many may compute.
    for partition in flooded._rota.partitions:
        partition.floods = False
    assert dispatch.pick(0.0, 1) is not None
    assert dispatch.pick(0.0, 2) is None


def test_none_is_woken_for_what_one_that_is_coming_will_find(
    flooded: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(flooded)
    second, woken = Fetcher(flooded), []
    wait_until(lambda: len(flooded._idle) == 1)
    monkeypatch.setattr(dispatch_module, "MOST_COMPUTING", 3)
    with monkeypatch.context() as patch:
        patch.setattr(flooded._idle, "notify", lambda: woken.append(flooded._idle.coming))
        for coming in (1, 0):
            flooded._idle.coming = coming
            flooded.count(0, 1)
    assert woken == [0]
    flooded.close()
    second.join(WAIT_S)


@pytest.mark.parametrize("floods", [True, False])
def test_for_a_call_that_floods_the_caches_the_merge_waits_alone(
    flooded: Channel, monkeypatch: pytest.MonkeyPatch, floods: bool
) -> None:
    monkeypatch.setattr(channel_module, "GRACE_S", 10 * WAIT_S)
    monkeypatch.setattr(dispatch_module, "PATIENCE", 1e-9)
    first, second = acquire(flooded), Fetcher(flooded)
    first.floods = floods
    wait_until(lambda: len(flooded._idle) == 1)
    merge = Aside(lambda: flooded.collect(first.number))
    wait_until(lambda: flooded._dispatch.awaited)
    assert second.has_one.wait(0.05 if floods else WAIT_S) is not floods
    first.chunks.append((np.zeros(1),))
    flooded.release(first, 1, dispatch_module.AHEAD_BYTES)
    assert [bundle.partition for bundle in merge.result()] == [first.number]
    # With the next it is patient anew.
    assert not flooded._dispatch.lose_patience()


def test_the_merge_is_patient_for_a_part_of_the_time_that_it_was_busy(flooded: Channel) -> None:
    dispatch, partitions = flooded._dispatch, flooded._rota.partitions
    first, second = acquire(flooded), partitions[1]
    dispatch.go_on(1000.0)
    assert dispatch.be_patient([first], 1000.0004) == pytest.approx(0.0001)
    # Without end where one of them is not being called, or is of another kind.
    assert dispatch.be_patient([first, second], 1000.0004) == math.inf
    second.running, second.floods = True, False
    assert dispatch.be_patient([first, second], 1000.0004) == math.inf


def test_a_merge_that_waits_may_have_what_floods_the_caches_fetched_ahead(flooded: Channel) -> None:
    dispatch, partitions = flooded._dispatch, flooded._rota.partitions
    first = acquire(flooded)
    flooded._ledger.ahead_bytes = 1
    assert dispatch.pick(0.0) is None
    dispatch.want([first], 0.0)
    dispatch._starved = True
    assert dispatch.pick(0.0) in [partition for partition in partitions if partition is not first]


@pytest.mark.parametrize(("patience", "grace_s"), [(1e9, 10 * WAIT_S), (1e-9, 0.0005)])
def test_the_merge_loses_its_patience(
    flooded: Channel, monkeypatch: pytest.MonkeyPatch, patience: float, grace_s: float
) -> None:
    monkeypatch.setattr(dispatch_module, "PATIENCE", patience)
    monkeypatch.setattr(channel_module, "GRACE_S", grace_s)
    first, second = acquire(flooded), Fetcher(flooded)
    wait_until(lambda: len(flooded._idle) == 1)
    merge = Aside(lambda: flooded.collect(first.number))
    assert second.has_one.wait(WAIT_S)
    first.chunks.append((np.zeros(1),))
    flooded.release(first, 1, dispatch_module.AHEAD_BYTES)
    assert [bundle.partition for bundle in merge.result()] == [first.number]


def test_a_quick_call_is_waited_for_only_while_somebody_looks(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in channel._rota.partitions:
        partition.is_quick = True
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
    # The merge soon sees that this one is not quick, and lets another begin; then it looks no more.
    second = acquire(channel)
    assert first.partition is not None
    assert (first.partition.is_quick, second.is_quick) == (False, True)
    release(channel, acquire(channel))
    release(channel, first.partition)
    assert merge.result()[0].partition == first.partition.number == 0


@pytest.fixture
def aloof(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Channel:
    """All partitions are quick; an enqueuer that waits goes on when it is woken, and not before."""
    monkeypatch.setattr(channel_module, "GRACE_S", 10 * WAIT_S)
    monkeypatch.setattr(dispatch_module, "GRACE_S", WAIT_S)
    for partition in channel._rota.partitions:
        partition.is_quick = True
    return channel


def lead(channel: Channel, num: int = NUM_LANES) -> None:
    """Fetch from partitions, after the last of which the fetcher is told to stand in."""
    told = []
    for _ in range(num):
        partition = acquire(channel)
        partition.chunks.append((np.zeros(1),))
        told.append(channel.release(partition, 1, 8))
    assert told == [False] * (num - 1) + [True]


def test_the_merge_is_one_threads_at_a_time(aloof: Channel) -> None:
    enqueuer = Aside(lambda: aloof.collect(0))
    lead(aloof)
    other = Fetcher(aloof)
    wait_until(lambda: len(aloof._idle) == 1)
    with aloof._lock:
        aloof._arrived.notify()  # Whatever wakes it, the enqueuer stays where it is.
    assert not other.has_one.wait(0.05)
    found = aloof.collect_or_leave(0)
    assert found is not None
    assert [bundle.partition for bundle in found] == list(range(NUM_LANES))
    assert aloof.collect_or_leave(1) is None
    partition = acquire(aloof)
    assert partition.number == 1
    partition.is_quick = False
    for _ in range(NUM_LANES):
        aloof._ledger.ahead_bytes += dispatch_module.AHEAD_BYTES
        partition.chunks.append((np.zeros(1),))
    assert aloof.release(partition, 1, 8) is False
    assert [bundle.partition for bundle in enqueuer.result()] == [1]
    aloof.close()
    other.join(WAIT_S)


def test_what_ends_a_lead_is_raised_in_the_enqueuer(aloof: Channel) -> None:
    enqueuer = Aside(lambda: aloof.collect(0))
    lead(aloof)
    aloof.give_back(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        enqueuer.result()


def test_the_end_of_the_stream_wakes_the_enqueuer(aloof: Channel) -> None:
    enqueuer = Aside(lambda: aloof.collect(0))
    lead(aloof)
    assert aloof.collect_or_leave(0)
    aloof.give_back(None)
    assert enqueuer.result() == []


def test_an_enqueuer_that_has_stopped_looking_is_woken_when_it_is_to_look_again(
    aloof: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, looked, wait = threading.Event(), threading.Event(), aloof._arrived.wait

    def noted(pause: float) -> Any:
        if pause == SLOW_S:
            long.set()
        return wait(pause)

    def check(*_: Any) -> float:
        looked.set()
        return 10 * WAIT_S

    monkeypatch.setattr(aloof._arrived, "wait", noted)
    monkeypatch.setattr(aloof._silence, "check", check)
    enqueuer = Aside(lambda: aloof.collect(0))
    partition = acquire(aloof)
    monkeypatch.setattr(channel_module, "GRACE_S", 0.0)
    monkeypatch.setattr(channel_module, "LOOK_S", 0.0)
    for other in aloof._rota.partitions[1:]:
        other.is_quick = False
    partition.chunks.append((np.zeros(1),))
    assert aloof.release(partition, 1, 8) is True
    with aloof._lock:
        aloof._arrived.notify()
    assert long.wait(WAIT_S)
    assert aloof.collect_or_leave(0)
    assert aloof.collect_or_leave(0) is None
    assert looked.wait(SLOW_S / 2)
    aloof.close()
    with pytest.raises(feeder.ClosedError):
        enqueuer.result()


def test_a_slow_partition_wakes_an_enqueuer_that_does_not_look_soon(aloof: Channel) -> None:
    enqueuer = Aside(lambda: aloof.collect(0))
    partition = acquire(aloof)
    partition.is_quick = False
    release(aloof, partition)
    assert [bundle.partition for bundle in enqueuer.result()] == [0]


def test_beside_a_lead_what_a_slow_call_has_got_before_is_taken_at_each_look(
    aloof: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take_open = threading.Event(), Partition.take_open

    def noted(partition: Partition, *ending: Any, **settings: Any) -> Any:
        bundle = take_open(partition, *ending, **settings)
        if partition is slow and bundle is not None:
            taken.set()
        return bundle

    monkeypatch.setattr(Partition, "take_open", noted)
    aloof._rota.partitions[0].is_quick = False
    slow = acquire(aloof)
    slow.chunks.append((np.zeros(1),))
    enqueuer = Aside(lambda: aloof.collect(1))
    lead(aloof, NUM_LANES - 1)
    monkeypatch.setattr(channel_module, "GRACE_S", 0.0)
    with aloof._lock:
        aloof._arrived.notify()
    assert taken.wait(WAIT_S)
    assert [bundle.partition for bundle in aloof.collect_or_leave(1) or ()] == [0, 1, 2, 3]
    aloof.close()
    with pytest.raises(feeder.ClosedError):
        enqueuer.result()


def test_what_has_been_called_since_the_last_look_is_not_slow(aloof: Channel) -> None:
    first, second, _, _ = aloof._rota.partitions
    for partition in (first, second):
        partition.running, partition.called_at = True, 100.0
    second.is_quick = False
    assert not aloof._dispatch.slow_partitions(100.0 + 0.9 * dispatch_module.LOOK_S)
    assert aloof._dispatch.slow_partitions(100.0 + 1.1 * dispatch_module.LOOK_S) == [second]


def test_who_leads_and_waits_for_room_is_idle(
    aloof: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait, idle = threading.Event(), aloof._room.wait, aloof._stats.idle

    def noted() -> Any:
        waits.set()
        return wait()

    monkeypatch.setattr(aloof._room, "wait", noted)
    enqueuer = Aside(lambda: aloof.collect(0))
    lead(aloof)
    aloof.count(aloof._ledger.max_rows, 0)
    aloof.queue(0, 1)
    leader = Aside(aloof.wait_for_room)
    assert waits.wait(WAIT_S)
    now = time.monotonic()
    assert idle.read(now + 1) - idle.read(now) == pytest.approx(1)
    aloof.hand_out(0, Held(1, aloof._ledger.max_rows, 0, 0))
    leader.result()
    assert idle.read(now + 9) == idle.read(now + 8)
    aloof.close()
    with pytest.raises(feeder.ClosedError):
        enqueuer.result()


@pytest.mark.parametrize("leads", [False, True])
def test_a_merge_whose_calls_the_bound_holds_back_waits_for_room(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """Who looks at the clocks must not blame calls that may not be made."""
    waits, wait, stats = threading.Event(), channel._room.wait, channel._stats

    def noted() -> Any:
        waits.set()
        return wait()

    monkeypatch.setattr(channel._room, "wait", noted)
    partition = acquire(channel)
    channel.count(1000, 0)
    channel.queue(0, 1)
    # One that is being called is waited for as ever.
    assert not channel._dispatch.is_held_back([partition])
    release(channel, partition)
    assert not channel._dispatch.is_held_back([partition])
    collect = channel.collect_or_leave if leads else channel.collect
    assert collect(partition.number)
    merge = Aside(lambda: collect(partition.number))
    assert waits.wait(WAIT_S)
    with channel._lock:
        clocks = (stats.room, stats.chunks, stats.partitions[partition.number])
        assert [clock.since is not None for clock in clocks] == [True, False, False]
        assert partition.wanted_since is None
    channel.hand_out(0, Held(1, 1000, 0, 0))
    if leads:
        assert merge.result() is None
    else:
        wait_until(lambda: stats.chunks.since is not None)
        assert stats.room.since is None
        channel.close()
        with pytest.raises(feeder.ClosedError):
            merge.result()


class Waiting:
    """Calls that wait until all of them are under way."""

    def __init__(self, num: int) -> None:
        self.together = threading.Barrier(num)

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.together.wait(WAIT_S)
        return (np.full((batch_size, 1), worker_id),)


def test_calls_that_wait_for_each_other_are_made_together() -> None:
    fetch = Waiting(NUM_LANES)
    coordinator = feeder.init_data_input_workers(
        ["x"], fetch, 4, NUM_LANES, epochs=None, coordinator=feeder.Coordinator()
    )
    with coordinator:
        feed = coordinator["train"]
        workers = [int(next(feed)["x"][0, 0]) for _ in range(50 * NUM_LANES)]
        fetch.together.abort()
    assert workers == list(range(NUM_LANES)) * 50
