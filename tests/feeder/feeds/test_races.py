"""What only shows at one moment of many, brought about by waiting for that moment."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

import feeder
from feeder.workers.stream.memory import Pool
from small import WAIT_S, Calls, Pure, Seekable, chunk, ids, make
from watching import around


def wait_until_all_is_enqueued() -> None:
    """Wait until the enqueuer of the one running feed has done all that it will do."""
    for thread in threading.enumerate():
        if thread.name == "feeder train enqueuer":
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("take", ["snapshot", "state_dict"])
def test_a_position_is_that_of_the_batch_handed_out_however_many_wait(take: str) -> None:
    with make(Pure(8, 3)) as coordinator:
        wait_until_all_is_enqueued()
        seen, positions = [], [getattr(coordinator, take)()]
        for batch in coordinator["train"]:
            seen.append(batch)
            positions.append(getattr(coordinator, take)())
    assert len(seen) == 6
    for i, position in enumerate(positions):
        with make(Pure(8, 3), resume=position) as resumed:
            assert ids(resumed["train"]) == ids(seen[i:]), i


@pytest.mark.parametrize("is_known", [False, True], ids=["end not known", "end known"])
def test_rows_that_a_larger_batch_leaves_out_are_there_for_smaller_ones(is_known: bool) -> None:
    """Whether the end of the epoch was known when the position was taken."""
    goes_on = threading.Event()

    def twelve_and_two(call: feeder.Call) -> Any:
        if call.index == 1:
            assert goes_on.wait(WAIT_S)
        return (np.split(np.arange(14), [12])[call.index] + 100 * call.epoch,)

    fetch = Calls(2, twelve_and_two)
    settings = {
        "batch_size": None, "global_batch_size": 12, "last_batch": "drop", "rounds": "epoch",
        "epochs": 2,
    }  # fmt: skip
    with make(fetch, **settings) as coordinator:
        if is_known:
            goes_on.set()
            wait_until_all_is_enqueued()
        assert len(next(coordinator["train"])["id"]) == 12
        position = coordinator.state_dict()
        goes_on.set()
    with make(fetch, devices=6, resume=position, **settings) as coordinator:
        assert next(coordinator["train"].on(0))["id"].tolist() == [12, 13]
        assert next(coordinator["train"].on(0))["id"].tolist() == [100, 101]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_batches_before_an_error_arrive_however_early_it_is_known(num_devices: int) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index >= 6:
            raise RuntimeError("no such image")
        return chunk(0, call.index, 4)

    with make(fetch, devices=num_devices) as coordinator:
        wait_until_all_is_enqueued()
        feed = coordinator["train"]
        for step in range(6):
            assert next(feed.on(step % num_devices)).step == step
        for device in range(num_devices):
            with pytest.raises(feeder.FetchError, match=r"worker 0, call 6: .*no such image"):
                next(feed.on(device))


def test_workers_that_wait_for_each_other_are_all_called() -> None:
    """A thread that has drawn quick calls of several workers keeps none of those that it has not
    begun from the others."""
    all_are_here, calls = threading.Barrier(4), [0] * 4

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] += 1
        if calls[worker_id] in (1, 50, 51, 90, 150):
            all_are_here.wait(WAIT_S)
        if calls[worker_id] > 200:
            raise StopIteration
        return chunk(worker_id, calls[worker_id], batch_size)

    with make(fetch, num_worker_threads=4, max_buffered_batches=64) as coordinator:
        assert sum(1 for _ in coordinator["train"]) == 800


@pytest.mark.parametrize("late", [0, 1], ids=["worker 0 late", "worker 1 late"])
def test_the_worker_whose_turn_is_later_is_blamed_whichever_came_first(late: int) -> None:
    other_goes_on = threading.Event()
    calls = [0, 0]

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls[worker_id] += 1
        if worker_id == late:
            assert other_goes_on.wait(WAIT_S)
        elif calls[worker_id] == 2:
            other_goes_on.set()  # its first chunk has been handed over
        if calls[worker_id] > 2:
            raise StopIteration
        return (np.ones(batch_size, np.float64 if worker_id else np.float32),)

    with make(fetch, num_worker_threads=2) as coordinator:
        assert next(coordinator["train"])["id"].dtype == np.float32
        with pytest.raises(feeder.ChunkError) as caught:
            next(coordinator["train"])
    assert (caught.value.worker_id, caught.value.call) == (1, 0)
    assert (caught.value.got, caught.value.expected) == ("float64", "float32")


class Tearing(Seekable):
    """Fails once, in a call of worker 1 that has moved on already."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call: int | None = call

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        at = self.calls[worker_id]
        got = super().__call__(worker_id, batch_size)
        if (worker_id, at) == (1, self.call):
            self.call = None
            raise OSError("the disk was away")
        return got


@pytest.mark.parametrize("call", [0, 3], ids=["first call", "fourth call"])
def test_a_call_is_made_again_from_where_the_failed_one_began(call: int) -> None:
    with make(Tearing(call), retries=1, retry_backoff_s=0.001) as coordinator:
        got = ids(coordinator["train"])
    with make(Seekable()) as undisturbed:
        assert got == ids(undisturbed["train"])


def test_a_cache_of_the_fetch_function_is_not_the_users_to_write() -> None:
    cache = {index: chunk(0, index, 4) for index in range(6)}
    seen = []
    with make(Calls(6, lambda call: cache[call.index]), epochs=2, writable=True) as coordinator:
        for batch in coordinator["train"]:
            seen += ids([batch])
            batch["id"][:] = 0
    assert seen == 2 * [int(row) for index in range(6) for row in chunk(0, index, 4)[0]]
    assert all(array.all() for (array,) in cache.values())


@pytest.mark.parametrize("rows", (4, 2**17), ids=("own memory", "memory of the pool"))
def test_nor_is_what_it_may_find_by_a_weak_reference(rows: int) -> None:
    """The second epoch finds an array for as long as the user keeps its batch, if that is it."""
    cache: WeakValueDictionary[int, Any] = WeakValueDictionary()
    pool = Pool()

    def find(call: feeder.Call) -> Any:
        array = cache.get(call.index)
        if array is None:
            array = cache[call.index] = pool.empty((rows,), np.int64)
            array[:] = call.index + 1
        return [array]

    kept, seen = [], []
    settings: Any = {"batch_size": rows, "epochs": 2, "writable": True, "num_threads": 1}
    with make(Calls(3, find), **settings) as coordinator:
        for batch in coordinator["train"]:
            kept.append(batch)
            seen.append(set(batch["id"].tolist()))
            batch["id"][:] = 0
    assert seen == 2 * [{1}, {2}, {3}]


def test_a_stop_wakes_an_enqueuer_in_the_middle_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make(Pure(1, 100), max_buffered_batches=4, devices=2)
    feed = coordinator["train"]
    queue, _ = feed.streams[0].queues
    waits = threading.Event()
    # Under the lock, which a stop gets once the wait has begun.
    around(monkeypatch, queue._drained, "wait", before=waits.set)
    coordinator.start()
    for _ in range(2):  # of the second device, so that the first is full when it wants more
        next(feed.on(1))
    assert waits.wait(WAIT_S)
    assert coordinator.stop(deadline_s=WAIT_S) is True
